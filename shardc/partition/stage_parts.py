"""The calls, reads and results of each part of each stage, given the stage of every call.

    forward    the stage's calls of forward, and the replicable calls that they need
    dgrad      the calls that a gradient which leaves the stage depends on    } both with the replicable calls that they
    wgrad      the rest of backward                                           } need: cheap ones are rematerialized,
                                                                                expensive ones kept from forward

One part makes a value; parts of the same stage or of others read it. Values that no other stage reads are bundled under
one name with all values of the same lifetime: `kept1.d` from forward to dgrad, `kept1.w` to wgrad, `kept1` to both,
`dkept1` from dgrad to wgrad. Gathers of weights belong to none of these parts (gather_hoisting.py): `params1` is a part
of its own, which runs once for many microbatches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import fx

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, info, operands, producer
from shardc.ir.microbatch import MADE
from shardc.partition.cross_stage_buffers import buffer_in_two_stages
from shardc.partition.gather_hoisting import group_gathers, hoisted_calls
from shardc.partition.microbatch_sums import MicrobatchSum
from shardc.partition.split_backward import split_backward
from shardc.partition.step_analysis import StepAnalysis
from shardc.schedule.pipeline import PARTS

PartKey = tuple[int, str]  # a stage, and the name of one of its parts or gathers


class StageParts:
    """The tables that describe a cut, each computed from those before it.

    `stage_of` gives the stage of each call of a microbatch that is not replicable. Raises ShardcError (SC221) if the
    result is no pipeline of forward and backward.
    """

    def __init__(
        self,
        graph: Graph,
        count: int,
        stage_of: dict[fx.Node, int],
        sums: tuple[MicrobatchSum, ...],
        kept: frozenset[fx.Node] = frozenset(),
    ) -> None:
        self.graph, self.count, self.stage_of, self.sums = graph, count, stage_of, sums
        self.analysis = StepAnalysis(graph)
        self.order = {call: index for index, call in enumerate(self.analysis.calls)}
        for call in self.analysis.calls:
            if call not in self.analysis.replicable:  # operands of sums count as not replicable only after split_sums
                stage_of.setdefault(call, 0)
        self.buffer_stage = {
            old: stage_of.get(producer(new)[0], 0) for old, new in self.analysis.buffer_updates.items()
        }
        self.calls: dict[PartKey, list[fx.Node]] = {}
        self.backward: list[list[fx.Node]] = []
        self.hoisted = hoisted_calls(self.analysis)
        self.gathers: list[tuple[str, ...]] = []  # by stage
        self.kept_gathers: list[tuple[str, ...]] = []  # those of them that are never run again for backward
        self.gather_of: list[dict[fx.Node, str]] = []
        for stage in range(count):
            self._assign_calls(stage)
            self._assign_gathers(stage, kept)
        self.outputs = self._step_outputs()
        self.readers = self._part_readers()

    # ------------------------------------------------------------------ assignment of calls to parts
    def _assign_calls(self, stage: int) -> None:
        stage_calls = [call for call in self.analysis.calls if self.stage_of.get(call) == stage]
        forward_calls = [call for call in stage_calls if call not in self.analysis.backward]
        backward_calls = [call for call in stage_calls if call in self.analysis.backward]
        forward_replicas = self._replicas(forward_calls, set())
        # Backward rematerializes cheap replicable calls. It keeps expensive ones of forward: gathered parameters.
        backward_replicas = self._replicas(
            backward_calls, {call for call in forward_replicas if not self.analysis.replicable[call]}
        )
        self.calls[stage, "forward"] = sorted({*forward_calls, *forward_replicas}, key=self.order.__getitem__)
        self.backward.append(sorted({*backward_calls, *backward_replicas}, key=self.order.__getitem__))
        self.calls[stage, "dgrad"], self.calls[stage, "wgrad"] = split_backward(self.backward[-1], self._leaves_stage)

    def _replicas(self, calls: Sequence[fx.Node], available: set[fx.Node]) -> set[fx.Node]:
        """The replicable calls that these calls need and that are neither available nor hoisted."""
        replicas: set[fx.Node] = set()
        todo = list(calls)
        while todo:
            for value in operands(todo.pop()):
                call = producer(value)[0]
                if (
                    call in self.analysis.replicable
                    and call not in replicas
                    and call not in available
                    and call not in self.hoisted
                ):
                    replicas.add(call)
                    todo.append(call)
        return replicas

    def _assign_gathers(self, stage: int, kept: frozenset[fx.Node]) -> None:
        """The hoisted calls that a stage reads become parts of their own."""
        readers = {which: self.calls[stage, which] for which in PARTS}
        groups = group_gathers(f"params{stage}", readers, self.hoisted, kept)
        self.gathers.append(tuple(groups))
        self.kept_gathers.append(tuple(name for name, group in groups.items() if group.kept))
        self.gather_of.append({call: name for name, group in groups.items() for call in group.calls})
        for name, group in groups.items():
            self.calls[stage, name] = sorted(group.calls, key=self.order.__getitem__)

    def _leaves_stage(self, value: fx.Node) -> bool:
        """Does another stage read this value of backward?"""
        home = self.stage_of.get(producer(value)[0])
        return home is not None and any(self.stage_of.get(user, home) != home for user in value.users)

    def _producing_part(self, value: fx.Node, reader: PartKey) -> PartKey | None:
        """The part that makes a value for the reading part. None if the reader has it from the start or makes it."""
        call, (stage, part) = producer(value)[0], reader
        if value in self.analysis.available_inputs or call in self._call_sets[reader]:
            return None
        if call in self.hoisted:
            return stage, self.gather_of[stage][call]
        if value in self.buffer_stage:
            if self.buffer_stage[value] != stage:
                raise buffer_in_two_stages(self.analysis, value, self.stage_of)
            return None if part == "forward" else (stage, "forward")
        if call in self.analysis.replicable:
            return (stage, "dgrad") if call in self._call_sets[stage, "dgrad"] else (stage, "forward")
        home = self.stage_of[call]
        if call not in self.analysis.backward:
            return (home, "forward")
        return (home, "dgrad") if call in self._call_sets[home, "dgrad"] else (home, "wgrad")

    @cached_property
    def _call_sets(self) -> dict[PartKey, set[fx.Node]]:
        return {part_key: set(calls) for part_key, calls in self.calls.items()}

    def _step_outputs(self) -> dict[PartKey, list[tuple[Port, fx.Node]]]:
        """The outputs of each part to the step: terms of sums, and outputs and buffers of each microbatch."""
        outputs: dict[PartKey, list[tuple[Port, fx.Node]]] = {part_key: [] for part_key in self.calls}
        for microbatch_sum in self.sums:
            for stage, node in microbatch_sum.accumulates.items():
                (value,) = operands(node)
                outputs[self._output_part(value, stage)].append((Port("sum", microbatch_sum.name), value))
        for port, value in zip(self.graph.outputs, self.graph.output_values, strict=True):
            if port.role in MADE and value in self.analysis.microbatch_nodes:
                outputs[self._output_part(value, self.buffer_stage.get(value, 0))].append((port, value))
        return outputs

    def _output_part(self, value: fx.Node, stage: int) -> PartKey:
        """The part that makes a value. An input belongs to the forward of `stage`."""
        call = producer(value)[0]
        stage = self.stage_of.get(call, stage)
        for part in PARTS:
            if call in self._call_sets[stage, part]:
                return stage, part
        return stage, "forward"

    def _part_readers(self) -> dict[tuple[PartKey, fx.Node], list[PartKey]]:
        """By producing part and value: the parts that read it. Only values that pass between parts are listed."""
        readers_of: dict[tuple[PartKey, fx.Node], list[PartKey]] = {}
        for part_key, calls in self.calls.items():
            read = [v for call in calls for v in operands(call)] + [v for _, v in self.outputs[part_key]]
            for value in dict.fromkeys(read):
                producer_part = self._producing_part(value, part_key)
                if producer_part is not None:
                    readers_of.setdefault((producer_part, value), []).append(part_key)
        for (producer_part, value), readers in readers_of.items():
            if producer_part[1] in ("dgrad", "wgrad") and any(part == "forward" for _, part in readers):
                raise error(
                    "SC221",
                    f"forward reads a gradient, {info(value).name}: such a step is no pipeline of forward and backward",
                    hint="compile it without `pipeline`",
                )
        return readers_of

    # ------------------------------------------------------------------ names of values
    @cached_property
    def names(self) -> dict[tuple[PartKey, fx.Node], str]:
        """A value's own name if it leaves its stage, otherwise the name of the bundle of its lifetime."""
        names: dict[tuple[PartKey, fx.Node], str] = {}
        for (maker, value), readers in self.readers.items():
            stage, part = maker
            if part in self.gathers[stage]:
                names[maker, value] = part
            elif any(other != stage for other, _ in readers):
                names[maker, value] = info(value).name
            elif part == "dgrad":
                names[maker, value] = f"dkept{stage}"
            else:
                read_in = {"dgrad", "wgrad"} & {of for _, of in readers}
                names[maker, value] = f"kept{stage}" + (f".{read_in.pop()[0]}" if len(read_in) == 1 else "")
        return names

    def makes(self, part_key: PartKey) -> dict[fx.Node, str]:
        return {value: name for (maker, value), name in self.names.items() if maker == part_key}

    def reads(self, part_key: PartKey) -> list[str]:
        readers = self.readers.items()
        return list(dict.fromkeys(self.names[key] for key, part_keys in readers if part_key in part_keys))

    @cached_property
    def sum_stages(self) -> dict[str, tuple[int, ...]]:
        """By sum: the stages with terms of it, and the stages that hold the parameter whose gradient it is."""
        reading_stages: dict[fx.Node, set[int]] = {}
        for (stage, _), calls in self.calls.items():
            for value in {v for call in calls for v in operands(call)} & self.analysis.available_inputs:
                reading_stages.setdefault(value, set()).add(stage)
        stages_of = {microbatch_sum.total: set(microbatch_sum.accumulates) for microbatch_sum in self.sums}
        inputs = self.graph.input_nodes()
        # A clipped gradient depends on all sums, by the norm; what counts is the gradient before.
        gradients = {p.name: v for p, v in self._returned if p.role == "grad"} | dict(self.graph.gradients)
        for name, value in gradients.items():
            for total in _sums_above(value, stages_of):
                stages_of[total] |= reading_stages.get(inputs[name], set())
        return {microbatch_sum.name: tuple(sorted(stages_of[microbatch_sum.total])) for microbatch_sum in self.sums}

    @property
    def _returned(self) -> list[tuple[Port, fx.Node]]:
        return list(zip(self.graph.outputs, self.graph.output_values, strict=True))


def _sums_above(value: fx.Node, sums: Mapping[fx.Node, set[int]]) -> set[fx.Node]:
    """The sums that a gradient depends on."""
    reached_sums: set[fx.Node] = set()
    todo, visited = [value], set[fx.Node]()
    while todo:
        node = todo.pop()
        if node in sums:
            reached_sums.add(node)
        elif node not in visited:
            visited.add(node)
            todo.extend(node.all_input_nodes)
    return reached_sums
