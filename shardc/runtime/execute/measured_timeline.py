"""The measured timeline of a step: a clock on every instruction of every rank, with a common origin.

Ranks meet at a barrier and measure from there: seconds on a CPU; on a GPU, events in the compute stream, so that the
clock adds no waits to the step. The first of the ranks that run one list represents them. A measured transfer lasts
from its posting to its wait, on both ranks; in a predicted timeline it is an event of the sender alone.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardc.partition.program_counter import STRIDE
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.timeline import Timeline, TimelineEvent

CounterSpans = dict[int, tuple[float, float]]  # by program counter


class StepClock(Protocol):
    """A `transfers.Clock` that returns what it has recorded."""

    def begin(self, counter: int) -> None: ...
    def end(self, counter: int) -> None: ...
    def spans(self) -> CounterSpans: ...


class CpuClock:
    def __init__(self) -> None:
        self._begun: dict[int, float] = {}
        self._ended: dict[int, float] = {}
        dist.barrier()
        self._zero = time.perf_counter()

    def begin(self, counter: int) -> None:
        self._begun[counter] = time.perf_counter() - self._zero

    def end(self, counter: int) -> None:
        self._ended[counter] = time.perf_counter() - self._zero

    def spans(self) -> CounterSpans:
        return {counter: (begun, self._ended[counter]) for counter, begun in self._begun.items()}


class GpuClock:
    def __init__(self, device: torch.device) -> None:
        self._begun: dict[int, torch.cuda.Event] = {}
        self._ended: dict[int, torch.cuda.Event] = {}
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)
        self._device, self._zero = device, timing_event()

    def begin(self, counter: int) -> None:
        self._begun[counter] = timing_event()

    def end(self, counter: int) -> None:
        self._ended[counter] = timing_event()

    def spans(self) -> CounterSpans:
        torch.cuda.synchronize(self._device)
        return {
            counter: (self._since(begun), self._since(self._ended[counter])) for counter, begun in self._begun.items()
        }

    def _since(self, event: torch.cuda.Event) -> float:
        return self._zero.elapsed_time(event) / 1e3


def start_clock(device: torch.device) -> StepClock:
    """A clock that starts now; every rank must start one."""
    return GpuClock(device) if device.type == "cuda" else CpuClock()


def gather_timeline(program: StagedProgram, spans: CounterSpans) -> Timeline:
    """The timeline of all ranks, from the spans of this rank's clock. Every rank must call it."""
    spans_of_ranks: list[Any] = [None] * program.mesh.world_size
    dist.all_gather_object(spans_of_ranks, spans)
    events: list[TimelineEvent] = []
    for c, instructions in enumerate(program.lists.ranks):
        rank_spans: CounterSpans = spans_of_ranks[program.rank_of(c, 0)]
        for index, instruction in enumerate(instructions):
            events.append(TimelineEvent(c, instruction, *rank_spans[index * STRIDE]))
    return Timeline(len(program.lists.ranks), tuple(events))


def timing_event() -> torch.cuda.Event:
    """An event in the compute stream, now."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
