"""Seconds by size, as a table: T = latency + bytes / bandwidth, whose two figures change from one knot to the next.

    points = ((0, 20e-6), (2**20, 20e-6 + 2**20 / 4e11))      T = 20 us + bytes / 400 GB/s, at every size
    seconds_at(points, 2**30)                                 2.7 ms: beyond the last knot its slope goes on

Between two knots T is linear in the size. So it goes through each knot, never falls as sizes grow, and a table of
latency and bandwidth alone is one with two knots.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BeforeValidator, Field

Knot = tuple[Annotated[float, Field(ge=0, le=2**70)], Annotated[float, Field(gt=0, le=1e9)]]


def _read(written: Any) -> Any:
    """A mapping of sizes to seconds, as files have it, or a list of pairs."""
    return tuple(cast(Mapping[Any, Any], written).items()) if isinstance(written, Mapping) else written


def _check(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    for (size, seconds), (larger, longer) in pairwise(points):
        if larger <= size:
            raise ValueError(f"sizes have to grow: {larger:g} follows {size:g}")
        if longer < seconds:
            raise ValueError(f"{larger:g} takes less than {size:g}: {longer:g} against {seconds:g} seconds")
    return points


Points = Annotated[tuple[Knot, ...], BeforeValidator(_read), Field(min_length=1), AfterValidator(_check)]
"""Sizes and seconds, both growing: at least one pair."""


def seconds_at(points: Sequence[tuple[float, float]], size: float) -> float:
    """T of a size. Below the first knot that knot's; beyond the last at the slope of its segment, or of the whole table
    if that is steeper (the last knots may be level); of a level table at the last knot's bytes a second."""
    after = bisect_right(points, size, key=itemgetter(0))
    if after == 0:
        return points[0][1]
    x0, y0 = points[after - 1]
    if after < len(points):
        x1, y1 = points[after]
        return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    slopes = [(y0 - y) / (x0 - x) for x, y in (points[0], points[-2]) if x < x0] if len(points) > 1 else []
    return y0 + (max(slopes, default=0.0) or (y0 / x0 if x0 else 0.0)) * (size - x0)


def latency_and_rate(latency: float, rate: float, share: float = 1.0) -> tuple[tuple[float, float], ...]:
    """The two knots of T = latency + share * bytes / rate."""
    return ((0.0, latency), (float(2**30), latency + share * 2**30 / rate))


def rising(pairs: Iterable[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The nearest knots that never fall: neighbours that do are given their geometric mean, until none does.

    (Pool adjacent violators: Ayer et al. 1955, in the logarithm of the seconds.) Measured times of small messages
    vary by tens of percent; of a size that was measured several times, each counts.
    """
    pools: list[tuple[list[float], float, int]] = []  # sizes, product of seconds' powers as a mean, count
    for size, seconds in sorted(pairs):
        pools.append(([size], seconds, 1))
        while len(pools) > 1 and (pools[-2][1] > pools[-1][1] or pools[-2][0][-1] == pools[-1][0][0]):
            sizes, later, more = pools.pop()
            before, earlier, count = pools.pop()
            total = count + more
            pools.append((before + sizes, earlier ** (count / total) * later ** (more / total), total))
    return tuple((size, seconds) for sizes, seconds, _ in pools for size in dict.fromkeys(sizes))
