"""offload_states: the optimizer's state lies on the host between steps.

    %m = state "w:exp_avg"                       %m = state "w:exp_avg"        on the host
    %m.new = lerp(%m, %d.w, 0.1)                 %m.back = begin_fetch(%m)
    return state "w:exp_avg" = %m.new     ->     %m.here = end_fetch(%m.back, %m)
                                                 %m.new = lerp(%m.here, %d.w, 0.1)
                                                 %m.out = begin_offload(%m.new)
                                                 %m.host = end_offload(%m.out, %m.new)
                                                 return state "w:exp_avg" = %m.host

Needs a body as ranks run it, or the update of a pipeline's stage. Ensures the same calls on the same values, and
copies; new state is copied over the old (`ir.in_place`). Moved is state of single parameters, up to `optimizer` bytes a
rank, in the order of the program, but for tensors smaller than `least`, such as counts of steps. What is no state of a
parameter stays: the scale of the loss, and the largest elements that 8-bit products have seen.

A copy back begins as late as lets it end before the update that reads it, which may be in backward; those under way
hold no more than two parameters' state, in each direction (`copy_schedule`). The method: Ren et al. 2021,
"ZeRO-Offload", without its update on the CPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from shardc.ir.buckets import pieces
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, producer, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.microbatch import calls_as_run, in_microbatch, sections
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, END_FETCH, END_OFFLOAD, LEAST
from shardc.ir.storages import storages
from shardc.passes.base import Pass
from shardc.passes.memory.copy_schedule import Clock, Copy, begins_of_fetches, ends_of_offloads
from shardc.passes.memory.offload import copy_call, put, seconds_of

PARAMETERS_UNDER_WAY = 2


@dataclass(frozen=True)
class OffloadStates(Pass):
    """Keep up to `optimizer` bytes a rank of the optimizer's state on the host."""

    optimizer: int | Literal["all"] = 0
    least: int = LEAST
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        if self.optimizer == 0 or not any(port.role == "state" for port in graph.outputs):
            return graph
        graph = graph.copy()
        calls = calls_as_run(graph)
        chosen = _within(movable_states(graph, calls, self.least), self.optimizer)
        if chosen:
            seconds = seconds_of(graph, calls, self.hardware)
            _move(graph, calls, chosen, Clock.of(seconds, self.hardware.host_bytes_per_second))
        else:
            graph.diagnostics.append(self._nothing(graph, calls))
        return graph

    def _nothing(self, graph: Graph, calls: Sequence[fx.Node]) -> Diagnostic:
        sizes = [state.bytes for state in movable_states(graph, calls, 1)]
        why, hint = "the optimizer has none that a step replaces", "leave 'optimizer' out of offload"
        if sizes:
            size = human_bytes(max(sizes))
            why = f"the largest has {size} a rank, and those of {human_bytes(self.least)} or more are moved"
            why += "" if self.optimizer == "all" else f", up to {human_bytes(self.optimizer)} in all"
            hint = f"write offload: {{optimizer: all, least: {size}}}, or leave it out"
        return Diagnostic("SC234", f"no state of the optimizer lies on the host: {why}", "warning", hint=hint)


@dataclass(frozen=True)
class State:
    """A state, its value after the step, and the calls by which it is read first and made."""

    parameter: str
    old: fx.Node
    new: fx.Node
    bytes: int
    read: int
    made: int


def movable_states(graph: Graph, calls: Sequence[fx.Node], least: int) -> list[State]:
    """In the order of the program's outputs."""
    of, members = storages(graph), pieces(graph)
    index_of = {call: index for index, call in enumerate(calls)}
    repeated = in_microbatch(graph) if graph.microbatches > 1 else set[fx.Node]()
    returned = Counter(of[value] for value in graph.output_values)
    olds = {
        port.name: node
        for port, node in zip(graph.inputs, graph.placeholders, strict=True)
        if port.role == "state" and port.parameter
    }
    states: list[State] = []
    for port, new in zip(graph.outputs, graph.output_values, strict=True):
        old = olds.get(port.name)
        if port.role != "state" or old is None or new.op == "placeholder" or not old.users:
            continue
        call, size = producer(new)[0], of[new].bytes
        readers = [user for user in old.users if user.op != "output"]
        if (
            size >= least
            and of[new].value is new
            and returned[of[new]] == 1
            and not returned[of[old]]
            and new not in members
            and type_of(old) == type_of(new)
            and not any(user in repeated for user in (call, *readers))
            and all(user in index_of for user in readers)
        ):
            states.append(
                State(port.parameter, old, new, size, min(index_of[user] for user in readers), index_of[call])
            )
    return states


def _within(states: Sequence[State], most: int | Literal["all"]) -> list[State]:
    left, chosen = math.inf if most == "all" else most, list[State]()
    for state in states:
        if state.bytes <= left:
            chosen.append(state)
            left -= state.bytes
    return chosen


def _move(graph: Graph, calls: Sequence[fx.Node], chosen: Sequence[State], clock: Clock) -> None:
    of_parameter = Counter[str]()
    for state in chosen:
        of_parameter[state.parameter] += state.bytes
    bound = PARAMETERS_UNDER_WAY * max(of_parameter.values())
    repeated = set[fx.Node]().union(*sections(graph)) if graph.microbatches > 1 else set[fx.Node]()
    first = sum(call in repeated for call in calls)
    places: list[tuple[int, int, fx.Node]] = []
    back = sorted(chosen, key=lambda state: state.read)
    begins = begins_of_fetches([Copy(state.bytes, state.read) for state in back], clock, bound, first)
    out = sorted(chosen, key=lambda state: state.made)
    ends = ends_of_offloads([Copy(state.bytes, state.made + 1) for state in out], clock, bound, len(calls))
    on_host: dict[fx.Node, fx.Node] = {}
    with graph.fx.inserting_before(graph.output_node):
        for state, begin in zip(back, begins, strict=True):
            old, name, like = state.old, info(state.old).name, state.new
            fetched = copy_call(graph, BEGIN_FETCH, (old,), like, f"{name}.back", "opt")
            here = copy_call(graph, END_FETCH, (fetched, old), like, f"{name}.here", "opt")
            old.replace_all_uses_with(here, lambda user, copies=(fetched, here): user not in copies)
            places += [(begin, 3 if begin == state.read else 5, fetched), (state.read, 4, here)]
        for state, end in zip(out, ends, strict=True):
            new, name, at = state.new, info(state.old).name, state.made + 1
            if new is not producer(new)[0]:
                producer(new)[0].append(new)
            begun = copy_call(graph, BEGIN_OFFLOAD, (new,), new, f"{name}.out", "opt")
            on_host[new] = host = copy_call(graph, END_OFFLOAD, (begun, new), new, f"{name}.host", "opt")
            places += [(at, 1, begun), (end, 2 if end == at else 0, host)]
    graph.output_node.args = (tuple(on_host.get(value, value) for value in graph.output_values),)
    put(graph, calls, places)
