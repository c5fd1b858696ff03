"""A step's timeline as it was: a clock on every instruction of every rank, on one scale.

Ranks meet at a barrier, and count from there: seconds on a CPU; on a GPU events in the stream of compute, so that
nothing is waited for that a step without a clock would not wait for. Of the ranks that run one list, the first stands
for all. A transfer lasts from when it is posted to when it is waited for: on both of its ranks, other than predicted.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardc.stages.places import STRIDE
from shardc.stages.program import Pipelined
from shardc.stages.timeline import Event, Timeline

Spans = dict[int, tuple[float, float]]  # by place


class StepClock(Protocol):
    """What `transfers.Clock` is, and what it has noted in the end."""

    def begin(self, place: int) -> None: ...
    def end(self, place: int) -> None: ...
    def spans(self) -> Spans: ...


class CpuClock:
    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        dist.barrier()
        self._zero = time.perf_counter()

    def begin(self, place: int) -> None:
        self._begun[place] = time.perf_counter() - self._zero

    def end(self, place: int) -> None:
        self._ended[place] = time.perf_counter() - self._zero

    def spans(self) -> Spans:
        return {place: (begun, self._ended[place]) for place, begun in self._begun.items()}


class GpuClock:
    def __init__(self, device: torch.device) -> None:
        self._begun: dict[int, torch.cuda.Event] = {}
        self._ended: dict[int, torch.cuda.Event] = {}
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        self._device, self._zero = device, _event()

    def begin(self, place: int) -> None:
        self._begun[place] = _event()

    def end(self, place: int) -> None:
        self._ended[place] = _event()

    def spans(self) -> Spans:
        torch.cuda.synchronize(self._device)
        return {place: (self._since(begun), self._since(self._ended[place])) for place, begun in self._begun.items()}

    def _since(self, event: torch.cuda.Event) -> float:
        return self._zero.elapsed_time(event) / 1e3


def started(device: torch.device) -> StepClock:
    """A clock that starts now; every rank must start one."""
    return GpuClock(device) if device.type == "cuda" else CpuClock()


def gathered(program: Pipelined, spans: Spans) -> Timeline:
    """The timeline of all ranks, given what this one's clock has noted; every rank must call it."""
    everyone: list[Any] = [None] * program.mesh.world_size
    dist.all_gather_object(everyone, spans)
    events: list[Event] = []
    for c, listed in enumerate(program.lists.ranks):
        found: Spans = everyone[program.rank_of(c, 0)]
        for at, instruction in enumerate(listed):
            events.append(Event(c, instruction, *found[at * STRIDE]))
    return Timeline(len(program.lists.ranks), tuple(events))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
