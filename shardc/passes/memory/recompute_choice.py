"""What to keep for backward and what to compute again: a minimum cut, and a knapsack over many of them.

A `Tradeoff` is one segment of the forward (a layer): calls, the storages they make, and which storages backward
reads. Every storage that backward needs is either kept, at its bytes, or its call is run again, at its cost in FLOPs
(those of products that take as long), from operands that are kept or computed again in turn. For a price of one FLOP
in bytes, the cheapest choice is a minimum cut between what exists (source) and what backward reads (sink):

    source --price * FLOPs--> call --> made --bytes--> kept --> calls that read it, backward (sink)

A cut edge of bytes is a storage kept, a cut edge of FLOPs a call run again; a call that may not run again hangs on
the source for ever. As the price falls from infinity to 0 the choices go from keeping all to keeping least, along
the convex hull of all (bytes, FLOPs): those are the steps that a budget is spent on, best first. Prices are ratios of
integers, so cuts are exact. Layers that are alike have equal tradeoffs, and are solved once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import networkx as nx

_FINEST = 5  # bisections of a hull: at most 2**5 points between its ends


@dataclass(frozen=True)
class Storage:
    """What a call makes and backward may want. Given ones (inputs, layer boundaries) are no storages here."""

    bytes: int
    needed: bool  # backward reads it


@dataclass(frozen=True)
class Call:
    """One call: positions of the storages that it reads and makes. FLOPs are None if it may not run again."""

    flops: int | None
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True)
class Tradeoff:
    calls: tuple[Call, ...]
    storages: tuple[Storage, ...]


@dataclass(frozen=True)
class Choice:
    """The storages that are not kept, the bytes that are kept, and the FLOPs of recomputation."""

    dropped: frozenset[int]
    bytes: int
    flops: int


def nothing_again(tradeoff: Tradeoff) -> Choice:
    """Keep whatever backward reads."""
    return Choice(frozenset(), sum(s.bytes for s in tradeoff.storages if s.needed), 0)


@lru_cache(maxsize=4096)
def fewest_bytes(tradeoff: Tradeoff) -> Choice:
    """Keep as little as can be, and among such choices run as little again."""
    return cheapest(tradeoff, 1, 0)


def cheapest(tradeoff: Tradeoff, byte: int, flop: int) -> Choice:
    """The choice of least `byte` * bytes kept + `flop` * FLOPs run again."""
    network = nx.DiGraph()
    network.add_nodes_from(("source", "sink"))
    for c, call in enumerate(tradeoff.calls):
        if call.flops is None:
            network.add_edge("source", ("call", c))  # an edge without a capacity is never cut
        else:
            network.add_edge("source", ("call", c), capacity=call.flops * flop)
        for s in call.makes:
            network.add_edge(("call", c), ("made", s))
            network.add_edge(("made", s), ("kept", s), capacity=tradeoff.storages[s].bytes * byte)
        for s in call.reads:
            network.add_edge(("kept", s), ("call", c))
    for s, storage in enumerate(tradeoff.storages):
        if storage.needed:
            network.add_edge(("kept", s), "sink")
    if not network.in_degree("sink"):
        return nothing_again(tradeoff)
    # Of equal cuts, networkx returns the one nearest to the sink.
    _, (_, sink_side) = nx.minimum_cut(network, "source", "sink")
    recomputed = {s for s in range(len(tradeoff.storages)) if ("made", s) in sink_side}
    kept = {s for s in range(len(tradeoff.storages)) if ("kept", s) in sink_side} - recomputed
    return Choice(
        frozenset(s for s in range(len(tradeoff.storages)) if s not in kept),
        sum(tradeoff.storages[s].bytes for s in kept),
        sum(call.flops or 0 for c, call in enumerate(tradeoff.calls) if ("call", c) in sink_side),
    )


@lru_cache(maxsize=4096)
def hull(tradeoff: Tradeoff) -> tuple[Choice, ...]:
    """The best choices for every price, from keeping all to keeping least."""
    most, least = nothing_again(tradeoff), fewest_bytes(tradeoff)
    if least.bytes >= most.bytes:
        return (most,)
    return (most, *_between(tradeoff, most, least, _FINEST), least)


def _between(tradeoff: Tradeoff, most: Choice, least: Choice, depth: int) -> tuple[Choice, ...]:
    """The points of the hull strictly between two of its points: at the price that makes these two equal."""
    byte, flop = least.flops - most.flops, most.bytes - least.bytes
    if depth == 0 or byte <= 0 or flop <= 0:
        return ()
    middle = cheapest(tradeoff, byte, flop)
    if byte * middle.bytes + flop * middle.flops >= byte * most.bytes + flop * most.flops:
        return ()
    upper = _between(tradeoff, most, middle, depth - 1)
    return (*upper, middle, *_between(tradeoff, middle, least, depth - 1))


def within(
    tradeoffs: Sequence[Tradeoff], budget: int, peak: Callable[[Sequence[Choice]], int]
) -> tuple[list[Choice], int]:
    """One choice per segment, of the fewest FLOPs whose `peak` fits the budget, and that peak; else the lowest peak.

    Steps along all hulls are taken best first (fewest FLOPs a byte freed), which is optimal for the knapsack up to its
    last item; how many it takes is searched by bisection, each time with the peak of the whole program.
    """
    hulls = [hull(t) for t in tradeoffs]
    steps: list[tuple[float, int, int]] = []
    for segment, points in enumerate(hulls):
        for index in range(1, len(points)):
            freed = points[index - 1].bytes - points[index].bytes
            steps.append(((points[index].flops - points[index - 1].flops) / max(freed, 1), segment, index))
    steps.sort()  # of equal layers the first: theirs is kept longest

    def choices_after(count: int) -> list[Choice]:
        reached = [0] * len(hulls)
        for _, segment, index in steps[:count]:
            reached[segment] = max(reached[segment], index)
        return [points[index] for points, index in zip(hulls, reached, strict=True)]

    peaks: dict[int, int] = {}

    def peak_after(count: int) -> int:
        if count not in peaks:
            peaks[count] = peak(choices_after(count))
        return peaks[count]

    low, high = 0, len(steps)
    if peak_after(0) > budget:
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (low, middle) if peak_after(middle) <= budget else (middle, high)
        peak_after(high)
    fitting = [count for count, size in peaks.items() if size <= budget]
    best = min(fitting) if fitting else min(peaks, key=lambda count: (peaks[count], count))
    return choices_after(best), peaks[best]
