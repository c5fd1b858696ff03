"""A stage's graph as prepared code, with the slots of its ports sorted by where their values come from.

Graphs of one form are prepared once: those of equal layers, which differ in names alone. Names are each graph's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, info
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.context import RankContext
from shardc.runtime.arena import Arena
from shardc.runtime.code import Code, Routine
from shardc.runtime.microbatches import Feed
from shardc.runtime.monitor import Monitor
from shardc.stages.pipeline import Value
from shardc.stages.transfers import Arrival, Clock

Values = tuple[torch.Tensor, ...]  # all that go by one name


@dataclass
class Now:
    """What a rank has at a moment of a step."""

    held: Mapping[str, torch.Tensor]
    feeds: Sequence[Feed]
    monitor: Monitor | None
    clock: Clock | None = None
    values: dict[Value, Values | Arrival] = field(default_factory=dict[Value, Values | Arrival])
    sums: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    buffers: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    outputs: dict[Port, dict[int, torch.Tensor]] = field(default_factory=dict[Port, dict[int, torch.Tensor]])

    def value(self, key: Value) -> Values:
        """A value that is used now: it must have arrived."""
        found = self.values[key]
        if isinstance(found, Arrival):
            self.values[key] = found = found.wait()
        return found

    def begin(self, place: int) -> None:
        """Note that an instruction begins, all that it waits for being there."""
        if self.clock is not None:
            self.clock.begin(place)

    def end(self, place: int) -> None:
        if self.clock is not None:
            self.clock.end(place)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What the graphs of one form share, on one rank. It keeps alive by what it was looked up."""

    context: RankContext
    arena: Arena | None
    routine: Routine
    code: tuple[Code, ...]

    def of(self, graph: Graph) -> Routine:
        """The routine, with the names of another graph of the form."""
        first, listing = self.routine.graph, self.routine.listing
        if graph is first:
            return self.routine
        own = dict(zip(first.fx.nodes, graph.fx.nodes, strict=True))
        instructions = tuple(
            replace(one, node=own[one.node], yields=tuple((own[value], at, slot) for value, at, slot in one.yields))
            for one in listing.instructions
        )
        found = copy(self.routine)
        found.graph, found.listing = graph, replace(listing, graph=graph, instructions=instructions)
        found.names = [one.where for one in instructions]
        return found


_prepared: WeakValueDictionary[tuple[int, int, int, torch.device, str], Prepared] = WeakValueDictionary()


def prepared(graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None) -> Prepared:
    """A graph's code, or that of an equal one which is in use. What writes to memory of its own is never shared."""
    form = form_of(graph)
    key = None if form is None else (id(context), id(arena), rank, device, form)
    found = None if key is None else _prepared.get(key)
    if found is None:
        routine = Routine(graph, context, rank, device, arena)
        found = Prepared(context, arena, routine, tuple(routine.code()))
        if key is not None:
            _prepared[key] = found
    return found


def form_of(graph: Graph) -> str | None:
    """All of a graph but its names; None where code would be bound to memory: what is held, or a bucket."""
    if any(port.role in ("param", "state") for port in graph.outputs):
        return None
    numbers: dict[fx.Node, int] = {}
    said: list[object] = [graph.mesh, graph.microbatches, [port.role for port in graph.inputs]]
    for node in graph.fx.nodes:
        if node.target is PACK:
            return None
        args = fx.map_arg((node.args, node.kwargs), lambda one: f"%{numbers[one]}")
        numbers[node] = len(numbers)
        call = (id(node.target), args) if node.op == "call_function" else args if node.op == "output" else ()
        said += [node.op, call, () if node.op == "output" else (info(node).type, info(node).phase)]
    return hashlib.sha256(repr([said, [port.role for port in graph.outputs]]).encode()).hexdigest()


class GraphCode:
    """A graph as the rank of `context` runs it. Whoever runs it fills in the slots of `values` and `sums`."""

    def __init__(
        self, graph: Graph, context: RankContext, rank: int, device: torch.device, arena: Arena | None = None
    ) -> None:
        self.graph, self.prepared = graph, prepared(graph, context, rank, device, arena)
        self.routine, self.code = self.prepared.of(graph), list(self.prepared.code)
        slots = self.routine.listing.inputs

        def of(*roles: str) -> list[tuple[int, str]]:
            return [(s, port.name) for port, s in zip(graph.inputs, slots, strict=True) if port.role in roles]

        self.values, self.sums, self._buffers, self._fed = of("value"), of("sum"), of("buffer"), of(*GIVEN)
        self._held = of("param", "state", "hyper")
        self.outputs = list(zip(graph.outputs, self.routine.listing.outputs, strict=True))

    def environment(self, now: Now, microbatch: int) -> list[Any]:
        """The slots before a run: what is held, what a microbatch is fed, and buffers as the one before left them."""
        env, feed = self.routine.empty.copy(), now.feeds[microbatch]
        for slot, name in self._fed:
            env[slot] = feed[name]
        for slot, name in self._held:
            env[slot] = now.held[name]
        for slot, name in self._buffers:
            found = now.buffers.get(name)
            env[slot] = now.held[name] if found is None else found
        return env

    def run(self, env: list[Any], now: Now, base: int, within: str) -> None:
        self.routine.run(self.code, env, now.monitor, base, within)


def summing(of: GraphCode, add: Callable[[str, torch.Tensor], None]) -> list[tuple[str, int]]:
    """Have a graph's terms of sums added as soon as they are made; those that no call makes are left, by slot."""
    wanted = [(port.name, slot) for port, slot in of.outputs if port.role == "sum"]
    others = [slot for _, slot in of.outputs]
    left: list[tuple[str, int]] = []
    for name, slot in wanted:
        made = [at for at, code in enumerate(of.code) if _fills(code, slot)]
        if not made:
            left.append((name, slot))
            continue
        call, free = partial(add, name), (slot,) if others.count(slot) == 1 else ()
        of.code.insert(made[-1] + 1, (of.code[made[-1]][0], call, _one(slot), (), free))
    return left


def _fills(code: Code, slot: int) -> bool:
    into = code[3]
    return into == slot if isinstance(into, int) else any(one == slot for _, one in into)


def _one(slot: int) -> Callable[[Sequence[Any]], tuple[Sequence[Any], dict[str, Any]]]:
    return lambda env: ((env[slot],), {})
