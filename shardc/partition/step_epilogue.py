"""Cuts the epilogue, the calls that run once a step after the last microbatch: each stage gets those for what it holds.

    reduce    s_a -> its sum over the stage's own mesh, as soon as the stage's last microbatch is done (ReduceGrads)
    norm      s_a, s_b -> squares of a and b, added up over the stage's own parameters
              ... summed over the pipeline's ranks ...
    update    s_a, s_b, the total -> clipped gradients, new a and b, new state

Every value has a *home*: the stages that have everything it depends on. The home of a sum is the stages that need it;
of parameters, state and numbers, all stages; of a call, the intersection of its operands' homes. An addition of values
with different homes is *pending*: each stage adds the terms that it has, and a missing term is 0. Linear calls keep it
pending. Any other reader needs the total, which all stages then have. A value that several stages have is counted by
the first of them alone, so a tied weight enters the norm once. A pending value is a partial along the pipeline's axis.

If only one stage has a sum, the collectives over it, and the calls between them, belong to the stage's `reduce` and not
to the epilogue. Under ZeRO a rank then holds whole gradients of no more stages than it is working on.

Three things cannot be cut and are errors: a call whose operands have no common home and that is no addition; a total
that depends on another total; a parameter that not every stage which holds it can update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info, operands, producer, set_info, type_of, update
from shardc.ir.microbatch import MADE
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.provenance import Derivation
from shardc.partition.extract_subgraph import SubgraphOutput, extract_subgraph
from shardc.partition.microbatch_sums import ADD, MicrobatchSum, is_linear, is_plain_add
from shardc.partition.step_analysis import StepAnalysis, result_values

aten = torch.ops.aten
HomeStages = frozenset[int] | None  # None: pending


@dataclass(frozen=True)
class StepEpilogue:
    """The epilogue of a step for the stages of one rank. `totals` names the outputs of `norm` that are summed over
    ranks; the others go to `update` unchanged."""

    norm: Graph
    update: Graph
    totals: tuple[str, ...]


@dataclass(eq=False)
class EpilogueCut:
    """A step's epilogue with the home of every value. `held_names` lists the parameters and buffers that each stage's
    parts read, `single_stage_sums` the sums of which only that stage has terms.

    Raises ShardcError (SC221) if the epilogue cannot be cut.
    """

    analysis: StepAnalysis
    sums: Sequence[MicrobatchSum]
    groups: Mapping[str, tuple[int, ...]]
    held_names: Sequence[frozenset[str]]
    single_stage_sums: Sequence[frozenset[str]]
    home: dict[fx.Node, HomeStages] = field(default_factory=dict[fx.Node, HomeStages])
    totals: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])  # pending values whose total is needed
    neutral: set[fx.Node] = field(default_factory=set[fx.Node])  # values that depend on no sum, or only on totals

    def __post_init__(self) -> None:
        self.graph, self.all_stages = self.analysis.body, frozenset(range(len(self.held_names)))
        self.sum_totals = {microbatch_sum.total for microbatch_sum in self.sums}
        for node in (*self.graph.placeholders, *self.analysis.microbatch_nodes):
            self.home[node] = self.all_stages
            self.neutral.add(node)
        for microbatch_sum in self.sums:
            accumulates = set(microbatch_sum.accumulates.values())
            between = self._calls_above([microbatch_sum.total], accumulates)  # additions of the stages' terms
            self.home |= dict.fromkeys((microbatch_sum.total, *between), frozenset(self.groups[microbatch_sum.name]))
        for call in self.graph.calls():
            if call not in self.home and call.target is not ACCUMULATE:
                home = self._call_home(call)
                self.home |= dict.fromkeys((call, *result_values(call)), home)
                if home is not None and all(v in self.neutral or self.home[v] is None for v in operands(call)):
                    self.neutral |= {call, *result_values(call)}
        for port, value in zip(self.graph.outputs, self.graph.output_values, strict=True):
            if port.role in ("loss", "grad") and value in self.analysis.microbatch_nodes:
                hint = "compile the step with `accumulate(..., always=True)`"
                raise error("SC221", f"{port.role} '{port.name}' is not summed over microbatches", hint=hint)
            if self.home[value] is None:
                self.totals[value] = None
        for total in self.totals:
            if any(other in self.totals for other in self._calls_above([total], self.sum_totals) - {total}):
                raise error(
                    "SC221",
                    f"{info(total).name} is a sum over stages that needs another such sum before it",
                    hint="clip by one norm of all gradients",
                )

    # ------------------------------------------------------------------ homes
    def _call_home(self, call: fx.Node) -> HomeStages:
        read = operands(call)
        for value in read:
            source = producer(value)[0]
            if (
                source in self.analysis.microbatch_nodes
                and value not in self.analysis.available_inputs
                and source not in self.analysis.replicable
            ):
                message = f"{info(call).name} runs once a step, but reads {info(value).name} of a microbatch"
                raise error("SC221", message, hint="leave out `pipeline`, or what reads it")
        pending = [v for v in read if self.home[v] is None]
        common = self._common_stages(read)
        if is_plain_add(call) and (pending or len({self.home[v] for v in read if v not in self.neutral}) > 1):
            return None  # also if one stage has both terms, since the other stages lack one
        if pending and is_linear(call) and pending == read[:1]:
            return None
        self.totals |= dict.fromkeys(pending)
        if not common:
            raise error(
                "SC221",
                f"{info(call).name} computes with gradients of several stages, and is no sum of them",
                op=str(call.target),
                hint="an update that treats each parameter by itself can be cut, and clipping by the gradients' norm",
            )
        return common

    def _common_stages(self, read: Iterable[fx.Node]) -> frozenset[int]:
        homes = (home for value in read if (home := self.home[value]) is not None)
        return reduce(lambda a, b: a & b, homes, self.all_stages)

    def _output_stages(self, port: Port, value: fx.Node) -> frozenset[int]:
        """The stages whose ranks must return an output of the step."""
        available = self.all_stages if value in self.totals else self.home[value] or self.all_stages
        name = port.name if port.role != "state" else port.parameter
        holding_stages = frozenset(stage for stage, names in enumerate(self.held_names) if name in names)
        if port.role not in ("param", "grad", "state") or not holding_stages:
            return available
        if not holding_stages <= available:
            message = (
                f"stages {sorted(holding_stages)} hold '{name}', but only {sorted(available)} can make its {port.role}"
            )
            raise error("SC221", message, tensor=name, hint="split so that one stage has all that uses it")
        return holding_stages

    # ------------------------------------------------------------------ graphs of a rank
    def reduce(self, stage: int) -> Graph | None:
        """The reductions of a stage's own sums. Their outputs have the names that the epilogue reads."""
        build, table = self._copy
        sums = [
            microbatch_sum.total
            for microbatch_sum in self.sums
            if microbatch_sum.name in self.single_stage_sums[stage] and microbatch_sum.total in self.reductions
        ]
        calls = {call for total in sums for call in self.reductions[total]}
        tails = [self.reductions[total][-1] for total in sums]
        outputs: list[SubgraphOutput] = [(Port("grad", info(tail).name), table[tail]) for tail in tails]
        calls_in_order = [table[call] for call in self.graph.calls() if call in calls]
        return (
            extract_subgraph(build, f"reduce{stage}", calls_in_order, outputs, [table[total] for total in sums])
            if sums
            else None
        )

    @cached_property
    def reductions(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """By single-stage sum: its chain of calls up to the last collective that reads nothing else."""
        reductions: dict[fx.Node, tuple[fx.Node, ...]] = {}
        names = frozenset[str]().union(*self.single_stage_sums)
        for total in (microbatch_sum.total for microbatch_sum in self.sums if microbatch_sum.name in names):
            calls: list[fx.Node] = []
            last, value = 0, total
            while len(value.users) == 1 and (call := next(iter(value.users))).op == "call_function":
                if operands(call) != [value] or info(call).type is None:
                    break
                calls.append(call)
                last, value = len(calls) if call.target in COLLECTIVES else last, call
            if last:
                reductions[total] = tuple(calls[:last])
        return reductions

    def for_stages(self, stages: Iterable[int]) -> StepEpilogue:
        """The epilogue of the step on a rank that runs these stages."""
        stage_set = set(stages)
        build, table = self._copy
        sums = {table[self.reductions[leaf][-1] if leaf in self.reductions else leaf] for leaf in self.sum_totals}
        with build.fx.inserting_before(build.output_node):
            contributions = _Contributions(self, stage_set, build, table)
            outputs: list[SubgraphOutput] = [(Port("value", info(v).name), contributions.of(v)) for v in self.totals]
        returned = zip(self.graph.outputs, self.graph.output_values, strict=True)
        sinks = [
            (port, table[value])
            for port, value in returned
            if not (port.role in MADE and value in self.analysis.microbatch_nodes)
            and self._output_stages(port, value) & stage_set
        ]
        norm_calls = self._calls_above([value for _, value in outputs], sums)
        stop = {*sums, *(table[total] for total in self.totals)}
        # `update` reads what `norm` computed instead of repeating it: gradients reduced over the stage's own mesh.
        update_calls = self._calls_above([value for _, value in sinks], {*stop, *norm_calls})
        read = {v for call in update_calls for v in operands(call)} | {v for _, v in sinks}
        passed = [v for v in build.values() if v in read and producer(v)[0] in norm_calls and v not in stop]
        outputs += [(Port("value", info(v).name), v) for v in passed if v.op != "placeholder"]
        calls = list(build.calls())
        norm_graph = extract_subgraph(build, "norm", [c for c in calls if c in norm_calls], outputs, sums)
        update_graph = extract_subgraph(build, "update", [c for c in calls if c in update_calls], sinks, sums)
        return StepEpilogue(norm_graph, update_graph, tuple(info(total).name for total in self.totals))

    @cached_property
    def _copy(self) -> tuple[Graph, dict[fx.Node, fx.Node]]:
        """The graph to which the contributions of all ranks are added."""
        build = self.graph.copy()
        return build, dict(zip(self.graph.fx.nodes, build.fx.nodes, strict=True))

    def _calls_above(self, values: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
        """The calls that values depend on, up to `stop`, which may contain calls or values."""
        calls: set[fx.Node] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            call = producer(value)[0]
            if value in stop or call in stop or call in calls or call.op == "placeholder":
                continue
            calls.add(call)
            todo.extend(operands(call))
        return calls


class _Contributions:
    """The contributions of a rank's stages to pending values, built at the end of a copy of the graph."""

    def __init__(self, epilogue: EpilogueCut, stages: set[int], build: Graph, table: Mapping[fx.Node, fx.Node]) -> None:
        self.epilogue, self.stages, self.build, self.table = epilogue, stages, build, table
        self.known: dict[fx.Node, fx.Node | None] = {}

    def of(self, value: fx.Node) -> fx.Node:
        """The contribution to a total, a 0 if the stages have no term."""
        share = self._contribution(value)
        if share is None:
            type = type_of(value)
            shape = list(type.local_shape(self.build.mesh))
            kwargs = {"dtype": type.dtype}
            share = self.build.call(aten.full.default, (shape, 0), kwargs, like=self.table[value], type=type)
        return share

    def _contribution(self, value: fx.Node) -> fx.Node | None:
        home = self.epilogue.home[value]
        if home is not None:
            return self.table[value] if min(home) in self.stages else None
        if value not in self.known:
            self.known[value] = self._build(value)
        return self.known[value]

    def _build(self, value: fx.Node) -> fx.Node | None:
        if is_plain_add(value):
            terms = [term_node for v in operands(value) if (term_node := self._contribution(v)) is not None]
            like, type, name = self.table[value], type_of(value), f"{info(value).name}.share"
            origin = Derivation("stage_term", info(value).name)
            total: fx.Node | None = None
            about: dict[str, Any] = {"like": like, "type": type, "name": name, "origin": origin}
            for term in terms:
                total = term if total is None else self.build.call(ADD, (total, term), **about)
            return total
        first = operands(value)[0]
        share = self._contribution(first)
        if share is None:
            return None
        others = {first: share}
        copy = self.build.fx.node_copy(value, lambda n: others.get(n) or self.table[n])
        set_info(copy, info(value))
        name = info(value).name
        update(copy, name=self.build.unique(f"{name}.share"), origin=Derivation("stage_term", name))
        return copy
