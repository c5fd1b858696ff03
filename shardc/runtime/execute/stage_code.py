"""A stage's graph as prepared code, with the slots of its ports grouped by the source of their values.

Graphs that differ in names alone, such as those of equal layers, share one prepared code. Each keeps its own names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, info
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.accumulate import ADDS
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.context import RankContext
from shardc.ir.small_sums import added_together, may_be_sums
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.call_arguments import CallArguments, Slot
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.monitor import RunMonitor
from shardc.runtime.execute.prepared_code import CodeLine, Routine
from shardc.runtime.execute.transfers import Clock, PendingReceive
from shardc.schedule.pipeline import ValueKey

BundleTensors = tuple[torch.Tensor, ...]  # the tensors of all values of one name


@dataclass
class StepState:
    """The state of a rank during a step."""

    tensors: Mapping[str, torch.Tensor]
    feeds: Sequence[Feed]
    monitor: RunMonitor | None
    clock: Clock | None = None
    values: dict[ValueKey, BundleTensors | PendingReceive] = field(
        default_factory=dict[ValueKey, BundleTensors | PendingReceive]
    )
    sums: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    outputs: dict[Port, dict[int, torch.Tensor]] = field(default_factory=dict[Port, dict[int, torch.Tensor]])

    def value(self, key: ValueKey) -> BundleTensors:
        """The tensors of a value; waits for them if they are being received."""
        value = self.values[key]
        if isinstance(value, PendingReceive):
            self.values[key] = value = value.wait()
        return value

    def begin(self, counter: int) -> None:
        """Record that an instruction begins, after all its waits."""
        if self.clock is not None:
            self.clock.begin(counter)

    def end(self, counter: int) -> None:
        if self.clock is not None:
            self.clock.end(counter)


@dataclass(frozen=True, eq=False)
class SharedCode:
    """What the graphs of one form share, on one rank. It keeps alive by what it was looked up."""

    context: RankContext
    arena: Arena | None
    routine: Routine
    code: tuple[CodeLine, ...]

    def of(self, graph: Graph) -> Routine:
        """The routine, with the names of another graph of the form."""
        first, listing = self.routine.graph, self.routine.listing
        routine = self.routine.copy()
        if graph is first:
            return routine
        counterparts = dict(zip(first.fx.nodes, graph.fx.nodes, strict=True))
        instructions = tuple(
            replace(
                instruction,
                node=counterparts[instruction.node],
                yields=tuple((counterparts[value], position, slot) for value, position, slot in instruction.yields),
            )
            for instruction in listing.instructions
        )
        routine.graph, routine.listing = graph, replace(listing, graph=graph, instructions=instructions)
        routine.names = [instruction.where for instruction in instructions]
        return routine


_prepared: WeakValueDictionary[tuple[int, int, int, torch.device, str], SharedCode] = WeakValueDictionary()


def shared_code(graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None) -> SharedCode:
    """A graph's code, or that of an equal graph in use. Code that is bound to memory of its own is never shared."""
    text_form = graph_form(graph)
    key = None if text_form is None else (id(context), id(arena), rank, device, text_form)
    code = None if key is None else _prepared.get(key)
    if code is None:
        routine = Routine(graph, context, rank, device, arena)
        code = SharedCode(context, arena, routine, tuple(routine.code()))
        if key is not None:
            _prepared[key] = code
    return code


def graph_form(graph: Graph) -> str | None:
    """A hash of a graph without its names. None if its code would be bound to memory: held tensors or a bucket."""
    if any(port.role in ("param", "state") for port in graph.outputs):
        return None
    numbers: dict[fx.Node, int] = {}
    form: list[object] = [graph.mesh, graph.microbatches, [port.role for port in graph.inputs]]
    for node in graph.fx.nodes:
        if node.target is PACK:
            return None
        args = fx.map_arg((node.args, node.kwargs), lambda node_read: f"%{numbers[node_read]}")
        numbers[node] = len(numbers)
        call = (id(node.target), args) if node.op == "call_function" else args if node.op == "output" else ()
        form += [node.op, call, () if node.op == "output" else (info(node).type, info(node).phase)]
    return hashlib.sha256(repr([form, [port.role for port in graph.outputs]]).encode()).hexdigest()


class GraphCode:
    """A graph as the rank of `context` runs it. Its executor fills the slots of `values` and `sums`."""

    def __init__(
        self, graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.graph, self.prepared = graph, shared_code(graph, context, rank, device, arena)
        self.routine, self.code = self.prepared.of(graph), list(self.prepared.code)
        slots = self.routine.listing.inputs

        def of(*roles: str) -> list[tuple[int, str]]:
            return [(s, port.name) for port, s in zip(graph.inputs, slots, strict=True) if port.role in roles]

        self.values, self.sums, self._buffers, self._fed = of("value"), of("sum"), of("buffer"), of(*GIVEN)
        self._held = of("param", "state", "hyper")
        self.outputs = list(zip(graph.outputs, self.routine.listing.outputs, strict=True))

    def environment(self, state: StepState, microbatch: int) -> list[Any]:
        """The slots before a run: held tensors, the microbatch's feed, and buffers from the previous microbatch."""
        env, feed = self.routine.empty.copy(), state.feeds[microbatch]
        for slot, name in self._fed:
            env[slot] = feed[name]
        for slot, name in self._held:
            env[slot] = state.tensors[name]
        for slot, name in self._buffers:
            buffer = state.buffers.get(name)
            env[slot] = state.tensors[name] if buffer is None else buffer
        self.routine.held_views.fill(env)
        return env

    def run(self, env: list[Any], state: StepState, base: int, within: str) -> None:
        self.routine.run(self.code, env, state.monitor, base, within)


def add_terms(graph_code: GraphCode, add: Callable[..., None], add_small: Callable[..., None]) -> list[tuple[str, int]]:
    """Insert calls that add a graph's terms to their sums: large ones as soon as they are made, small ones together,
    by `add_small`, behind the last of them (`ir.small_sums`). Products and rows add their own. Returns the terms that
    no call makes, with their slots."""
    graph, outputs, code = graph_code.graph, graph_code.outputs, graph_code.code
    value_of = {slot: value for (_, slot), value in zip(outputs, graph.output_values, strict=True)}
    slots, instructions = [slot for _, slot in outputs], graph_code.routine.listing.instructions
    remaining: list[tuple[str, int]] = []
    made: list[tuple[int, int, str, int]] = []  # by which line, as which of its results; the name and slot of each
    for name, slot in [(port.name, slot) for port, slot in outputs if port.role == "sum"]:
        places = [(index, place) for index, line in enumerate(code) if (place := _fills(line, slot)) is not None]
        if places:
            made.append((*places[-1], name, slot))
        else:
            remaining.append((name, slot))
    made.sort()
    groups = added_together(graph, [value_of[slot] for _, _, _, slot in made])
    together = {value: index for index, group in enumerate(groups) for value in group}
    become = may_be_sums(graph, together) if together else set[fx.Node]()
    reads = {slot: line for line, (index, *_) in enumerate(code) for slot in instructions[index].reads}  # the last
    additions: list[tuple[int, CodeLine]] = []  # behind which line

    def add_behind(line: int, added: Callable[..., None], *read: int) -> None:
        free = tuple(slot for slot in read if slots.count(slot) == 1 and reads.get(slot, 0) <= line)
        additions.append((line, (code[line][0], added, CallArguments(tuple(map(Slot, read)), {}), (), free)))
        for slot in read:
            if slots.count(slot) == 1 and slot not in free:  # a call behind the addition reads it
                *last, freed = code[reads[slot]]
                code[reads[slot]] = *last, (*freed, slot)  # type: ignore[assignment]

    small: dict[int, list[tuple[int, int, str, int]]] = {}
    for term in made:
        line, _, name, slot = term
        index, _, arguments, _, freed = code[line]
        if value_of[slot] in together:
            small.setdefault(together[value_of[slot]], []).append(term)
        elif (op := instructions[index].target) in ADDS and slots.count(slot) == 1 and slot not in reads:
            code[line] = index, partial(add, name, by=op), arguments, (), freed  # the call adds what it makes
        else:
            add_behind(line, partial(add, name), slot)
    for terms in small.values():
        named = [(name, value_of[slot] in become) for *_, name, slot in terms]
        add_behind(terms[-1][0], partial(add_small, named), *(slot for *_, slot in terms))
    for line, addition in sorted(additions, key=lambda pair: pair[0], reverse=True):
        code.insert(line + 1, addition)
    return remaining


def _fills(code: CodeLine, slot: int) -> int | None:
    """As which of its results a line of code makes what is in a slot, if it does."""
    into = code[3]
    if isinstance(into, int):
        return 0 if into == slot else None
    return next((place for place, (_, result_slot) in enumerate(into) if result_slot == slot), None)
