"""Times of calls on a GPU, compared fairly: CUDA graphs, replayed in turns, with the L2 cache flushed before every
replay.

A round replays every call once, in a new random order, so that clock drift favours none. The placement of outputs in
memory alone can change times by 5 %. So all calls write to the same memory (their graphs share a pool), and the rounds
are repeated at three placements. The result is the median over placements of the median times.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

FLUSHED = 256 << 20  # bytes: a multiple of the L2 cache
PLACES = (0, 34, 70)  # mebibytes that are allocated before, to shift the placement
FLUSHES_AHEAD = 8  # flushes before the first replay: the CPU runs ahead, and the GPU never waits for it

Name = TypeVar("Name")


@functools.cache
def stream() -> torch.cuda.Stream:
    """The stream on which calls are made, warmed up and captured. Backward runs on the stream of its forward."""
    return torch.cuda.Stream()


def capture_graph(call: Callable[[], Any], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, which writes where the graph `beside` does."""
    side, graph = stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        call()  # lazy initialisation must precede the capture
        torch.cuda.synchronize()
        # Autograd and Inductor have threads of their own, whose allocations are not the captured work's.
        pool = () if beside is None else (beside.pool(),)
        graph.capture_begin(*pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()
    return graph


def time_calls(calls: Mapping[Name, Callable[[], Any]], rounds: int) -> tuple[dict[Name, float], dict[Name, Exception]]:
    """Milliseconds of each call, and the exceptions of the calls that could not be captured."""
    medians: dict[Name, list[float]] = {}
    failed: dict[Name, Exception] = {}
    pads: list[torch.Tensor] = []
    for mebibytes in PLACES:
        pads.append(torch.empty(mebibytes << 20, dtype=torch.int8, device="cuda"))
        graphs: dict[Name, torch.cuda.CUDAGraph] = {}
        for name, call in calls.items():
            if name not in failed:
                try:
                    graphs[name] = capture_graph(call, next(iter(graphs.values()), None))
                except Exception as why:
                    failed[name] = why
                    torch.cuda.synchronize()
        for name, spent in time_in_turns({name: graph.replay for name, graph in graphs.items()}, rounds).items():
            medians.setdefault(name, []).append(spent)
        del graphs
        torch.cuda.empty_cache()
    return {name: statistics.median(spent) for name, spent in medians.items() if name not in failed}, failed


def time_in_turns(replays: Mapping[Name, Callable[[], Any]], rounds: int) -> dict[Name, float]:
    """The median milliseconds of each replay."""
    flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    names, order = list(replays), random.Random(0)
    event = functools.partial(torch.cuda.Event, enable_timing=True)
    pairs = {name: [(event(), event()) for _ in range(rounds)] for name in names}
    for _ in range(FLUSHES_AHEAD):
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
