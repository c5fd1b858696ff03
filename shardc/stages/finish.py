"""What runs once a step, after the last microbatch: of each stage, the part that concerns what it holds.

    reduce    s_a -> its sum over the stage's own mesh, as soon as the stage's last microbatch is in (ReduceGrads)
    norm      s_a, s_b -> squares of a and b, added up over the stage's own parameters
              ... summed over the pipeline's ranks ...
    update    s_a, s_b, the total -> clipped gradients, new a and b, new state

Every value has a *home*, the stages where all that it is made of is at hand: those of a sum, all stages for parameters,
state and numbers; of a call, what its operands have in common. An addition of values with different homes is
*pending*: each stage adds up what it has, and what it lacks is 0. Linear calls keep it pending; whatever else reads it
wants the total, which all stages then have. A value that several stages have counts in the first of them alone: so a
tied weight enters the norm once. It is what a partial is for a mesh axis, with the pipeline's as the axis.

Of a sum that one stage has alone, the collectives over it, and what stands between, are of the stage, and not of the
end: under ZeRO a rank then holds whole gradients of no more stages than it is at work on.

A call whose operands have no common home, and that is no addition, cannot be cut: that is an error, and so is a total
that needs another before it, and a parameter that not all stages which hold it can update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce

import torch
from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info, operands, producer, set_info, type_of, update
from shardc.ir.microbatch import MADE
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.stages.anatomy import Anatomy, values_of
from shardc.stages.bodies import Output, extract
from shardc.stages.sums import ADD, Sum, linear, plain_add

aten = torch.ops.aten
Home = frozenset[int] | None  # None: pending


@dataclass(frozen=True)
class Finish:
    """The end of a step for the stages of one rank. `totals` are those outputs of `norm` that are summed over ranks;
    the others go to `update` as they are."""

    norm: Graph
    update: Graph
    totals: tuple[str, ...]


@dataclass(eq=False)
class End:
    """A step's end, with the home of every value. `held` lists the parameters and buffers that each stage's parts read,
    `own` the sums that its backward has alone.

    Raises ShardcError (SC221) where it cannot be cut.
    """

    anatomy: Anatomy
    sums: Sequence[Sum]
    groups: Mapping[str, tuple[int, ...]]
    held: Sequence[frozenset[str]]
    own: Sequence[frozenset[str]]
    home: dict[fx.Node, Home] = field(default_factory=dict[fx.Node, Home])
    totals: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])  # pending values that are wanted whole
    neutral: set[fx.Node] = field(default_factory=set[fx.Node])  # made of no sum, or only of totals

    def __post_init__(self) -> None:
        self.graph, self.everywhere = self.anatomy.body, frozenset(range(len(self.held)))
        self.leaves = {one.total for one in self.sums}
        for node in (*self.graph.placeholders, *self.anatomy.inside):
            self.home[node] = self.everywhere
            self.neutral.add(node)
        for one in self.sums:
            between = self._above([one.total], set(one.parts.values()))  # additions of the parts
            self.home |= dict.fromkeys((one.total, *between), frozenset(self.groups[one.name]))
        for call in self.graph.calls():
            if call not in self.home and call.target is not ACCUMULATE:
                home = self._home(call)
                self.home |= dict.fromkeys((call, *values_of(call)), home)
                if home is not None and all(v in self.neutral or self.home[v] is None for v in operands(call)):
                    self.neutral |= {call, *values_of(call)}
        for port, value in zip(self.graph.outputs, self.graph.output_values, strict=True):
            if port.role in ("loss", "grad") and value in self.anatomy.inside:
                hint = "compile the step with `accumulate(..., always=True)`"
                raise error("SC221", f"{port.role} '{port.name}' is not summed over microbatches", hint=hint)
            if self.home[value] is None:
                self.totals[value] = None
        for total in self.totals:
            if any(other in self.totals for other in self._above([total], self.leaves) - {total}):
                raise error(
                    "SC221",
                    f"{info(total).name} is a sum over stages that needs another such sum before it",
                    hint="clip by one norm of all gradients",
                )

    # ------------------------------------------------------------------ homes
    def _home(self, call: fx.Node) -> Home:
        read = operands(call)
        for value in read:
            source = producer(value)[0]
            if source in self.anatomy.inside and value not in self.anatomy.given and source not in self.anatomy.free:
                message = f"{info(call).name} runs once a step, but reads {info(value).name} of a microbatch"
                raise error("SC221", message, hint="leave out `pipeline`, or what reads it")
        waiting = [v for v in read if self.home[v] is None]
        common = self._common(read)
        if plain_add(call) and (waiting or len({self.home[v] for v in read if v not in self.neutral}) > 1):
            return None  # also where a stage has both, for the others have not
        if waiting and linear(call) and waiting == read[:1]:
            return None
        self.totals |= dict.fromkeys(waiting)
        if not common:
            raise error(
                "SC221",
                f"{info(call).name} computes with gradients of several stages, and is no sum of them",
                op=str(call.target),
                hint="an update that treats each parameter by itself can be cut, and clipping by the gradients' norm",
            )
        return common

    def _common(self, read: Iterable[fx.Node]) -> frozenset[int]:
        homes = (home for value in read if (home := self.home[value]) is not None)
        return reduce(lambda a, b: a & b, homes, self.everywhere)

    def _owners(self, port: Port, value: fx.Node) -> frozenset[int]:
        """The stages whose ranks are to have an output of the step."""
        there = self.everywhere if value in self.totals else self.home[value] or self.everywhere
        name = port.name if port.role != "state" else port.name.rpartition(":")[0]
        wanted = frozenset(stage for stage, held in enumerate(self.held) if name in held)
        if port.role not in ("param", "grad", "state") or not wanted:
            return there
        if not wanted <= there:
            message = f"stages {sorted(wanted)} hold '{name}', but only {sorted(there)} can make its {port.role}"
            raise error("SC221", message, tensor=name, hint="split so that one stage has all that uses it")
        return wanted

    # ------------------------------------------------------------------ what a rank runs
    def reduce(self, stage: int) -> Graph | None:
        """The reductions of a stage's own sums; what they give has the names that the end of the step knows."""
        build, table = self._copy
        sums = [one.total for one in self.sums if one.name in self.own[stage] and one.total in self.reduced]
        calls = {call for total in sums for call in self.reduced[total]}
        tails = [self.reduced[total][-1] for total in sums]
        outputs: list[Output] = [(Port("grad", info(tail).name), table[tail]) for tail in tails]
        listed = [table[call] for call in self.graph.calls() if call in calls]
        return extract(build, f"reduce{stage}", listed, outputs, [table[total] for total in sums]) if sums else None

    @cached_property
    def reduced(self) -> dict[fx.Node, tuple[fx.Node, ...]]:
        """By sum that one stage has alone: the calls that end with the last collective over nothing but it."""
        found: dict[fx.Node, tuple[fx.Node, ...]] = {}
        own = frozenset[str]().union(*self.own)
        for total in (one.total for one in self.sums if one.name in own):
            calls: list[fx.Node] = []
            last, value = 0, total
            while len(value.users) == 1 and (call := next(iter(value.users))).op == "call_function":
                if operands(call) != [value] or info(call).type is None:
                    break
                calls.append(call)
                last, value = len(calls) if call.target in COLLECTIVES else last, call
            if last:
                found[total] = tuple(calls[:last])
        return found

    def of(self, stages: Iterable[int]) -> Finish:
        """The end of a step on a rank that has these stages."""
        mine = set(stages)
        build, table = self._copy
        sums = {table[self.reduced[leaf][-1] if leaf in self.reduced else leaf] for leaf in self.leaves}
        with build.fx.inserting_before(build.output_node):
            shares = _Shares(self, mine, build, table)
            outputs: list[Output] = [(Port("value", info(v).name), shares.of(v)) for v in self.totals]
        returned = zip(self.graph.outputs, self.graph.output_values, strict=True)
        sinks = [
            (port, table[value])
            for port, value in returned
            if not (port.role in MADE and value in self.anatomy.inside) and self._owners(port, value) & mine
        ]
        early = self._above([value for _, value in outputs], sums)
        stop = {*sums, *(table[total] for total in self.totals)}
        # What the norm is made of is not made again: gradients, reduced over the axes of the stage's own mesh.
        late = self._above([value for _, value in sinks], {*stop, *early})
        read = {v for call in late for v in operands(call)} | {v for _, v in sinks}
        passed = [v for v in build.values() if v in read and producer(v)[0] in early and v not in stop]
        outputs += [(Port("value", info(v).name), v) for v in passed if v.op != "placeholder"]
        calls = list(build.calls())
        norm = extract(build, "norm", [c for c in calls if c in early], outputs, sums)
        last = extract(build, "update", [c for c in calls if c in late], sinks, sums)
        return Finish(norm, last, tuple(info(total).name for total in self.totals))

    @cached_property
    def _copy(self) -> tuple[Graph, dict[fx.Node, fx.Node]]:
        """The graph that shares are added to, those of every rank."""
        build = self.graph.copy()
        return build, dict(zip(self.graph.fx.nodes, build.fx.nodes, strict=True))

    def _above(self, values: Iterable[fx.Node], stop: set[fx.Node]) -> set[fx.Node]:
        """The calls that values are made of, as far as `stop`, which may name calls or values."""
        found: set[fx.Node] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            call = producer(value)[0]
            if value in stop or call in stop or call in found or call.op == "placeholder":
                continue
            found.add(call)
            todo.extend(operands(call))
        return found


class _Shares:
    """What some stages contribute to pending values, built at the end of a copy of the graph."""

    def __init__(self, end: End, mine: set[int], build: Graph, table: Mapping[fx.Node, fx.Node]) -> None:
        self.end, self.mine, self.build, self.table = end, mine, build, table
        self.known: dict[fx.Node, fx.Node | None] = {}

    def of(self, value: fx.Node) -> fx.Node:
        """The share in a total, which may be 0."""
        share = self._share(value)
        if share is None:
            type = type_of(value)
            shape = list(type.local_shape(self.build.mesh))
            given = {"dtype": type.dtype}
            share = self.build.call(aten.full.default, (shape, 0), given, like=self.table[value], type=type)
        return share

    def _share(self, value: fx.Node) -> fx.Node | None:
        home = self.end.home[value]
        if home is not None:
            return self.table[value] if min(home) in self.mine else None
        if value not in self.known:
            self.known[value] = self._made(value)
        return self.known[value]

    def _made(self, value: fx.Node) -> fx.Node | None:
        if plain_add(value):
            terms = [one for v in operands(value) if (one := self._share(v)) is not None]
            like, type, name = self.table[value], type_of(value), f"{info(value).name}.share"
            added: fx.Node | None = None
            for term in terms:
                whole = added is None
                added = term if whole else self.build.call(ADD, (added, term), like=like, type=type, name=name)
            return added
        first = operands(value)[0]
        share = self._share(first)
        if share is None:
            return None
        others = {first: share}
        copy = self.build.fx.node_copy(value, lambda n: others.get(n) or self.table[n])
        set_info(copy, info(value))
        update(copy, name=self.build.unique(f"{info(value).name}.share"))
        return copy
