"""A stage's graph as prepared code, with the slots of its ports sorted by where their values come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shardc.ir.graph import Graph, Port
from shardc.ir.microbatch import GIVEN
from shardc.ir.ops.context import RankContext
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


class GraphCode:
    """A graph as the rank of `context` runs it. Whoever runs it fills in the slots of `values` and `sums`."""

    def __init__(self, graph: Graph, context: RankContext, rank: int, device: torch.device) -> None:
        self.graph, self.routine = graph, Routine(graph, context, rank, device)
        self.code = self.routine.code()
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
