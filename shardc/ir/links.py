"""How groups of ranks lie in a network of several levels, and what collectives take in them.

    Group((8,))       8 ranks of a node             Group((8, 4))     8 in each of 4 nodes
    Group((1, 16))    one in each of 16 nodes       Group((8, 32, 2)) 8 in each of 32 nodes of 2 racks

A level has a table a kind of collective and group size, with CUDA graphs and without. Between two group sizes that were
measured T is interpolated, in the logarithm of the group, at messages of which a rank sends as many bytes; beyond the
largest its bandwidth stays, and latency grows with each doubling.

In a group that spans nodes, the accelerators of a node share the work: of a whole tensor of n bytes each sends its part
of n / 8 to other nodes, while all exchange n inside. The levels work at the same time, so the slowest one counts, and
the latencies of all:

    T = sum of T_level(0) + max of (T_level(n_level) - T_level(0))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import Field, model_validator

from shardc.ir.curve import Points, latency_and_rate, seconds_at
from shardc.ir.device_rates import Delay, Table
from shardc.ir.mesh import Mesh

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "send"]
Knots = tuple[tuple[float, float], ...]
# A kind that a level has no table of takes as long as another that sends as much in the same pattern.
LIKE = {
    "send": ("permute",),
    "permute": ("send",),
    "all_gather": ("reduce_scatter", "all_reduce"),
    "reduce_scatter": ("all_gather", "all_reduce"),
    "all_to_all": ("all_gather", "reduce_scatter", "all_reduce"),
    "all_reduce": ("all_gather", "reduce_scatter"),
}


class Group(NamedTuple):
    """How a group of ranks lies in the network, the innermost level first."""

    extents: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.extents)


def sent_share(kind: str, group: int) -> float:
    """Bytes that a rank sends, of those of a message: see `ir.collectives`. A `send` is a permute of two."""
    return {"permute": 1.0, "send": 1.0, "all_reduce": 2 * (group - 1) / group}.get(kind, (group - 1) / group)


class Series(Table):
    """T of one kind in groups of one size, by bytes of the message; or `latency_seconds` and the `bytes_per_second`
    that a rank sends."""

    kind: Kind
    group: Annotated[int, Field(ge=2, le=2**20)]
    graph: bool = False
    seconds: Points

    @model_validator(mode="before")
    @classmethod
    def _from_latency(cls, written: Any) -> Any:
        if not isinstance(written, dict) or "seconds" in written:
            return cast(object, written)
        figures = dict(cast(dict[str, Any], written))
        latency, rate = figures.pop("latency_seconds", None), figures.pop("bytes_per_second", None)
        if not (isinstance(latency, int | float) and isinstance(rate, int | float) and latency > 0 and rate > 0):
            raise ValueError("a series has seconds, or latency_seconds and bytes_per_second")
        kind, group = str(figures.get("kind")), figures.get("group")
        share = sent_share(kind, group) if isinstance(group, int) and group > 1 else 1.0
        return {**figures, "seconds": latency_and_rate(float(latency), float(rate), share)}


class Level(Table):
    """The links that join `ranks` accelerators, units of the level below among each other; 0 of the last level, which
    joins all. The first level joins those of a node. `doubling_seconds` is what a group takes longer that is twice as
    large as the largest that has a table."""

    name: str
    ranks: Annotated[int, Field(ge=0, le=2**20)] = 0
    doubling_seconds: Delay = 0.0
    series: tuple[Series, ...] = ()

    def seconds(self, kind: str, size: float, group: int, graph: bool) -> float | None:
        """T in a group of this level; None where no table tells."""
        for other in (kind, *LIKE.get(kind, ())):
            for captured in (True, False) if graph else (False, True):
                if tables := self._by_group.get((other, captured)):
                    # An all-reduce is two of the others, one after the other.
                    twice = (2.0 if kind == "all_reduce" else 1.0) / (2.0 if other == "all_reduce" else 1.0)
                    return twice * self._between(tables, other, size, group)
        return None

    @cached_property
    def _by_group(self) -> dict[tuple[str, bool], list[tuple[int, Knots]]]:
        """Group sizes and their points, of each kind with graphs and without."""
        tables: dict[tuple[str, bool], list[tuple[int, Knots]]] = {}
        for one in sorted(self.series, key=lambda one: one.group):
            tables.setdefault((one.kind, one.graph), []).append((one.group, one.seconds))
        return tables

    def _between(self, tables: list[tuple[int, Knots]], kind: str, size: float, group: int) -> float:
        def of(index: int) -> float:
            known, points = tables[index]
            return seconds_at(points, size * sent_share(kind, group) / sent_share(kind, known))

        after = next((index for index, (known, _) in enumerate(tables) if known >= group), len(tables))
        if after == len(tables):
            return of(-1) + self.doubling_seconds * math.log2(group / tables[-1][0])
        if after == 0 or tables[after][0] == group:
            return of(after)
        fewer, more = tables[after - 1][0], tables[after][0]
        weight = math.log(group / fewer) / math.log(more / fewer)
        return (1 - weight) * of(after - 1) + weight * of(after)


def collective_seconds(
    levels: tuple[Level, ...],
    kind: str,
    size: float,
    group: Group,
    graph: bool,
    flat: Callable[[int, str, float, int], float],
) -> float:
    """T in a group that may span levels. `flat` tells it of (level, kind, bytes, group) where a level has no table."""

    def level_seconds(level: int, sent: float, members: int) -> float:
        table = levels[level] if level < len(levels) else None
        seconds = None if table is None else table.seconds(kind, sent, members, graph)
        return flat(level, kind, sent, members) if seconds is None else seconds

    inside, outside = group.extents[0], math.prod(group.extents[1:])
    whole = kind in ("all_reduce", "all_gather", "reduce_scatter")
    # What each level moves, in how large a group of its own.
    parts = [(0, size if whole or kind != "all_to_all" else size / outside, inside)]
    parts += [
        (level, size / inside if whole else size, outside)
        for level, extent in enumerate(group.extents[1:], start=1)
        if extent > 1
    ]
    parts = [part for part in parts if part[2] > 1]
    latencies = [level_seconds(level, 0, members) for level, _, members in parts]
    if not parts:
        return 0.0
    bodies = [level_seconds(*part) - latency for part, latency in zip(parts, latencies, strict=True)]
    return sum(latencies) + max(bodies)


@lru_cache(maxsize=4096)
def extents_of(mesh: Mesh, axes: tuple[str, ...], units: tuple[int, ...]) -> tuple[int, ...]:
    """The extents of a group along these axes, of the group that spans most. `units` are the ranks that a unit of each
    level has, the innermost first: (8, 256) of nodes of 8 ranks and racks of 256. Ranks fill one after another."""
    counts = [mesh.size(axes), *(_spanned(mesh, mesh.resolve(axes), unit) for unit in units)]
    extents = [-(-fewer // more) for fewer, more in pairwise(counts)] + [counts[-1]]
    while len(extents) > 1 and extents[-1] == 1:
        extents.pop()
    return tuple(extents)


def _spanned(mesh: Mesh, axes: tuple[str, ...], unit: int) -> int:
    """How many units have ranks of one group, at the most."""
    stride, spanned = 1, 1
    for name, size in reversed(mesh.axes):
        inside = max(1, unit // stride)  # ranks along this axis that one unit holds, of whole rows of later axes
        if max(unit, stride) % min(unit, stride) or max(inside, size) % min(inside, size):
            # Groups begin in one unit and end in another.
            return max(len({rank // unit for rank in group}) for group in mesh.groups(axes))
        if name in axes:
            spanned *= size // min(inside, size)
        stride *= size
    return spanned
