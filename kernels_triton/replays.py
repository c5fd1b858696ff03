"""Times of calls on a GPU, side by side: CUDA graphs, replayed in turns, the L2 cache flushed before every replay.

A round replays every call once, in another order each time, so that a clock that drifts favours none. Where outputs lie
in memory alone can make 5 % of a difference: all calls write to the same place (their graphs share a pool), and the
rounds are repeated in three places, of which the median of medians counts.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

FLUSHED = 256 << 20  # bytes: a multiple of the L2 cache
PLACES = (0, 34, 70)  # mebibytes that are taken before
AHEAD = 8  # flushes before the first replay: the CPU is that far ahead, and the GPU never waits for it

Name = TypeVar("Name")


@functools.cache
def stream() -> torch.cuda.Stream:
    """Where calls are made, warmed and captured: backward runs on the stream of its forward."""
    return torch.cuda.Stream()


def captured(call: Callable[[], Any], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """The call, which writes where the graph `beside` does."""
    side, graph = stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()  # what is made lazily must be made before the capture
        torch.cuda.synchronize()
        # Autograd and Inductor have threads of their own, whose allocations are not the captured work's.
        pool = () if beside is None else (beside.pool(),)
        graph.capture_begin(*pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    return graph


def times(calls: Mapping[Name, Callable[[], Any]], rounds: int) -> tuple[dict[Name, float], dict[Name, Exception]]:
    """Milliseconds of each call; and of those that could not be captured, why."""
    found: dict[Name, list[float]] = {}
    failed: dict[Name, Exception] = {}
    pads: list[torch.Tensor] = []
    for mebibytes in PLACES:
        pads.append(torch.empty(mebibytes << 20, dtype=torch.int8, device="cuda"))
        graphs: dict[Name, torch.cuda.CUDAGraph] = {}
        for name, call in calls.items():
            if name not in failed:
                try:
                    graphs[name] = captured(call, next(iter(graphs.values()), None))
                except Exception as why:
                    failed[name] = why
                    torch.cuda.synchronize()
        for name, spent in in_turns({name: graph.replay for name, graph in graphs.items()}, rounds).items():
            found.setdefault(name, []).append(spent)
        del graphs
        torch.cuda.empty_cache()
    return {name: statistics.median(spent) for name, spent in found.items() if name not in failed}, failed


def in_turns(replays: Mapping[Name, Callable[[], Any]], rounds: int) -> dict[Name, float]:
    """The median milliseconds of each."""
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    names, order = list(replays), random.Random(0)
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    pairs = {name: [(event(), event()) for _ in range(rounds)] for name in names}
    for _ in range(AHEAD):
        flush.zero_()
    for turn in range(rounds):
        order.shuffle(names)
        for name in names:
            start, end = pairs[name][turn]
            flush.zero_()
            start.record()
            replays[name]()
            end.record()
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in pairs[name]) for name in replays}
