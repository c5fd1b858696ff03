"""Seconds of calls: on a CPU by its clock, on a GPU by events, issued one by one or replayed from a CUDA graph.

A sample is several calls in a row where one is short: on a CPU longer than its scheduler's slices, so that what ranks
that share cores wait for each other is in it, and of small collectives so many that leaving the barrier at different
times does not count. What runs before each call, outside of its time, may leave the caches as a step does. Ranks that
measure together agree beforehand on how many samples they take, begin each at a
barrier, and the slowest rank's time counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist

Call = Callable[[], Any]
T = TypeVar("T")
SHORT = {"cpu": 1e-2, "cuda": 5e-4}  # seconds of a sample at the least
MOST_CALLS = 20_000  # of a sample
MOST_SAMPLES = 100
LEAST_SAMPLES = 3
CAPTURED = 10  # calls in a CUDA graph


@dataclass(frozen=True)
class Times:
    """Samples of one call, in seconds."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.samples)

    def row(self, unit: float = 1e-6, name: str = "us") -> dict[str, float]:
        """As a measurement has them: the median and the spread, in microseconds or so."""
        numbers = {"": self.median, "_min": min(self.samples), "_max": max(self.samples)}
        return {name + suffix: float(f"{t / unit:.5g}") for suffix, t in numbers.items()} | {"n": len(self.samples)}


class Together:
    """The ranks that time a call at once; alone, a rank agrees with itself. `group` is of gloo, on any device. `align`
    is issued before the first call of a sample: a small collective, which ends on all GPUs at the same time."""

    def __init__(self, group: Any = None, align: Call | None = None) -> None:
        self.group, self.align = group, align

    def barrier(self) -> None:
        if self.group is not None:
            dist.barrier(self.group)

    def slowest(self, seconds: list[float]) -> list[float]:
        """Each sample's longest time among the ranks."""
        if self.group is None:
            return seconds
        values = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values.tolist()


ALONE = Together()


def coarse_first(items: Sequence[T]) -> list[T]:
    """Every third item, then those between: where time runs out, the whole range has been measured."""
    return [item for begin in range(3) for item in items[begin::3]]


def timed(call: Call, budget: float, device: str, together: Together = ALONE, before: Call | None = None) -> Times:
    """Samples of a call for about `budget` seconds, three at the least; on a CPU with another call `before` each, whose
    time is not in it."""
    on_cpu = once_on_cpu if before is None else partial(once_after, before)
    once = once_on_gpu if device == "cuda" else on_cpu
    call()  # compiles, allocates, opens connections
    probes = together.slowest([once(call, 1, together), once(call, 1, together)])
    between = 0.0 if before is None else together.slowest([once_on_cpu(before, 3, together)])[0]
    typical = max(min(probes), 1e-9)
    calls = max(1, min(MOST_CALLS, round(SHORT[device] / (typical + between))))
    # A whole sample tells what one takes where cores are shared: a single call may run in between.
    (typical,) = together.slowest([once(call, calls, together)])
    count = int(max(LEAST_SAMPLES, min(MOST_SAMPLES, budget / ((typical + between) * calls))))
    return Times(tuple(together.slowest([once(call, calls, together) for _ in range(count)])))


def once_after(before: Call, call: Call, calls: int, together: Together = ALONE) -> float:
    """The mean of calls on a CPU, each with another before it that does not count."""
    together.barrier()
    seconds = 0.0
    for _ in range(calls):
        before()
        begin = time.perf_counter()
        call()
        seconds += time.perf_counter() - begin
    return seconds / calls


def once_on_cpu(call: Call, calls: int, together: Together = ALONE) -> float:
    together.barrier()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - begin) / calls


def once_on_gpu(call: Call, calls: int, together: Together = ALONE) -> float:
    """From the issue of the first call to the end of the last, on the current stream, which is idle before."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    together.barrier()
    if together.align is not None:
        together.align()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / calls


def replayed(call: Call, budget: float, together: Together = ALONE) -> Times:
    """The same of a call that is captured into a CUDA graph several times and replayed: what the CPU takes to issue it
    is not in it. All ranks of a collective capture and replay at once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    together.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CAPTURED):
            call()
    together.barrier()
    times = timed(graph.replay, budget, "cuda", together)
    return Times(tuple(t / CAPTURED for t in times.samples))
