"""Rows moved along a dim: `y[i] = x[i + offset]`, and a fill where `x` has no such row. Over ranks, few rows travel.

    shift       x, offset 1, of a whole dim            0 1 2 3 4 5 6 7  ->  1 2 3 4 5 6 7 .
    shift_rows  those that the rank `hop` before needs of a rank's own      rank 1: 4
    shift_join  own rows, and those that came                               rank 0: 1 2 3 | 4

Which rank has a row is a matter of the dim's layout alone (`ir.blocks`): uneven shards, a zigzag, and two axes are all
one case. `routes` finds from the layouts of `x` and of `y` which runs of rows each rank reads, and of whom. Between the
two ops the rows of each hop travel by `neighbour_rows`. Both read the coordinate.

    regroup     the rows of a dim in chunks, of which a rank has whole ones, or of such a dim not in chunks (`join`);
                moved by an offset as well; what there is no row for is 0
                                       0 1 2 3 4 5  ->  0 1 2 3, 4 5 . .
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, runs
from shardc.ir.types import Atom


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of a result, from `place` on, that the rank `hop` behind has, in its own rows from `start` on."""

    place: int
    hop: int
    start: int
    length: int


def size_of(text: str) -> int:
    """The size of an atom, as a call tells it."""
    return int(text) if text.isdigit() else Blocks.parse(text)


@lru_cache(maxsize=4096)
def routes(
    source: str, target: str, axes: tuple[str, ...], mesh: Mesh, offset: int, wrap: bool, mirror: bool = False
) -> tuple[tuple[Segment, ...], ...]:
    """For each rank along the axes, what its rows of the result are made of; with `mirror` of all rows in the other
    order, of which each rank has its own in the other order."""
    names = mesh.resolve(axes)
    coordinates = [
        dict(zip(names, at, strict=True)) for at in product(*(range(mesh.size(name)) for name in names))
    ]  # in the order of `mesh.index`
    size, result_size = size_of(source), size_of(target)
    owner, place = torch.zeros(int(size), dtype=torch.int64), torch.zeros(int(size), dtype=torch.int64)
    local = Atom(size, names).local(mesh)
    for rank, coordinate in enumerate(coordinates):
        for run in runs(size, names, mesh, coordinate):
            owner[run.start : run.start + run.extent] = rank
            places = torch.arange(run.local, run.local + run.extent)
            place[run.start : run.start + run.extent] = local - 1 - places if mirror else places
    if mirror:
        owner, place = owner.flip(0), place.flip(0)
    found: list[tuple[Segment, ...]] = []
    for rank, coordinate in enumerate(coordinates):
        segments: list[Segment] = []
        for run in runs(result_size, names, mesh, coordinate):
            wanted = torch.arange(run.start, run.start + run.extent) + offset
            wanted = wanted % int(size) if wrap else wanted
            first, last = int((wanted < 0).sum()), int((wanted < int(size)).sum())  # it counts up, but in a circle
            if last <= first:
                continue
            rows = wanted[first:last]
            of, at = owner[rows], place[rows]
            cuts = ((of[1:] != of[:-1]) | (at[1:] != at[:-1] + 1)).nonzero().flatten().tolist()
            bounds = [0, *(cut + 1 for cut in cuts), len(rows)]
            for a, b in pairwise(bounds):
                hop = (int(of[a]) - rank) % len(coordinates)
                segments.append(Segment(run.local + first + a, hop, int(at[a]), b - a))
        found.append(tuple(segments))
    return tuple(found)


def rows_by_hop(routed: Sequence[Sequence[Segment]]) -> dict[int, int]:
    """For each distance that rows travel, of how many rows a rank receives at most."""
    most: dict[int, int] = {}
    for segments in routed:
        for hop in {s.hop for s in segments if s.hop}:
            most[hop] = max(most.get(hop, 0), sum(s.length for s in segments if s.hop == hop))
    return dict(sorted(most.items()))


def _shift(x: Tensor, dim: int, offset: int, length: int, fill: float, wrap: bool) -> Tensor:
    size = x.shape[dim]
    if wrap:
        return x.roll(-offset, dim)
    y = x.new_full([*x.shape[:dim], length, *x.shape[dim + 1 :]], fill)
    first, last = max(0, -offset), min(length, size - offset)
    if last > first:
        y.narrow(dim, first, last - first).copy_(x.narrow(dim, first + offset, last - first))
    return y


def _routed(
    source: str, target: str, axes: list[str], offset: int, wrap: bool, mirror: bool
) -> tuple[int, tuple[tuple[Segment, ...], ...]]:
    context = current()
    return context.index(tuple(axes)), routes(source, target, tuple(axes), context.mesh, offset, wrap, mirror)


def _shift_rows(
    x: Tensor,
    dim: int,
    source: str,
    target: str,
    axes: list[str],
    offset: int,
    wrap: bool,
    hop: int,
    rows: int,
    mirror: bool = False,
) -> Tensor:
    own, routed = _routed(source, target, axes, offset, wrap, mirror)
    x = x.flip(dim) if mirror else x
    sent, start = x.new_zeros([*x.shape[:dim], rows, *x.shape[dim + 1 :]]), 0
    for segment in routed[(own - hop) % len(routed)]:
        if segment.hop == hop:
            sent.narrow(dim, start, segment.length).copy_(x.narrow(dim, segment.start, segment.length))
            start += segment.length
    return sent


def _shift_join(
    x: Tensor,
    received: list[Tensor],
    dim: int,
    source: str,
    target: str,
    axes: list[str],
    offset: int,
    wrap: bool,
    hops: list[int],
    rows: int,
    fill: float,
    mirror: bool = False,
) -> Tensor:
    own, routed = _routed(source, target, axes, offset, wrap, mirror)
    x = x.flip(dim) if mirror else x
    y = x.new_full([*x.shape[:dim], rows, *x.shape[dim + 1 :]], fill)
    taken = dict.fromkeys(hops, 0)
    for segment in routed[own]:
        if segment.hop:
            part = received[hops.index(segment.hop)].narrow(dim, taken[segment.hop], segment.length)
            taken[segment.hop] += segment.length
        else:
            part = x.narrow(dim, segment.start, segment.length)
        y.narrow(dim, segment.place, segment.length).copy_(part)
    return y


def _rows(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


SHIFT = define(
    "shift(Tensor x, int dim, int offset, int length, float fill, bool wrap) -> Tensor",
    lambda *args: _shift(*args).contiguous(),
    lambda x, dim, offset, length, fill, wrap: _rows(x, dim, length),
)
SHIFT_ROWS = define(
    "shift_rows(Tensor x, int dim, str source, str target, str[] axes, int offset, bool wrap, int hop, int rows,"
    " bool mirror=False) -> Tensor",
    _shift_rows,
    lambda x, dim, source, target, axes, offset, wrap, hop, rows, mirror=False: _rows(x, dim, rows),
)
SHIFT_JOIN = define(
    "shift_join(Tensor x, Tensor[] received, int dim, str source, str target, str[] axes, int offset, bool wrap,"
    " int[] hops, int rows, float fill, bool mirror=False) -> Tensor",
    _shift_join,
    lambda x, received, dim, source, target, axes, offset, wrap, hops, rows, fill, mirror=False: _rows(x, dim, rows),
)
REGROUP = define(
    "regroup(Tensor x, int dim, int length, int chunk, bool join, int offset=0) -> Tensor",
    lambda x, dim, length, chunk, join, offset=0: _shift(x, dim, offset, length, 0.0, False).contiguous(),
    lambda x, dim, length, chunk, join, offset=0: _rows(x, dim, length),
)
AXES_READ[SHIFT_ROWS] = lambda x, dim, source, target, axes, offset, wrap, hop, rows, mirror=False: axes
AXES_READ[SHIFT_JOIN] = lambda x, received, dim, source, target, axes, offset, wrap, hops, rows, fill, mirror=False: (
    axes
)
