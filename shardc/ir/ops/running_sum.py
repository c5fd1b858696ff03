"""Sums of all rows up to each, or from each on, along a dim of which ranks have parts.

    running_sum   x                of a whole dim              1 2 3 4 5 6 7 8  ->  1 3 6 10 15 21 28 36
    part_sums     x                within each run of rows     rank 1: 5 6 7 8  ->  5 11 18 26
    part_totals   x                of each run                 rank 0: 10       rank 1: 26
    sums_behind   parts, totals    with those of all runs before                rank 1: 15 21 28 36

The totals of all ranks are gathered in between: a number for each run, of which a rank has one, or one of each block
of a zigzag. Which runs come before is a matter of the layout of the dim (`ir.blocks`). All but the first op read the
coordinate.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import blocks_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, Run, runs
from shardc.ir.ops.shift import size_of


@lru_cache(maxsize=4096)
def runs_of_ranks(source: str, axes: tuple[str, ...], mesh: Mesh) -> tuple[tuple[Run | None, ...], ...]:
    """For each rank along the axes, its run of each block; None where it has none."""
    names, size = mesh.resolve(axes), size_of(source)
    starts = [0]
    for block in blocks_of(size):
        starts.append(starts[-1] + block.size)
    found: list[tuple[Run | None, ...]] = []
    for at in product(*(range(mesh.size(name)) for name in names)):
        held = [r for r in runs(size, names, mesh, dict(zip(names, at, strict=True))) if r.extent]
        of_block = {next(i for i in range(len(starts)) if r.start < starts[i + 1]): r for r in held}
        found.append(tuple(of_block.get(i) for i in range(len(starts) - 1)))
    return tuple(found)


def _summed(x: Tensor, dim: int, reverse: bool) -> Tensor:
    total = x.flip(dim).cumsum(dim).flip(dim) if reverse else x.cumsum(dim)
    return total.to(x.dtype)


def own_runs(source: str, axes: list[str]) -> tuple[tuple[Run | None, ...], tuple[tuple[Run | None, ...], ...]]:
    """A rank's run of each block, and those of all ranks."""
    context = current()
    of_ranks = runs_of_ranks(source, tuple(axes), context.mesh)
    return of_ranks[context.index(tuple(axes))], of_ranks


def _part_sums(x: Tensor, dim: int, source: str, axes: list[str], reverse: bool) -> Tensor:
    own, _ = own_runs(source, axes)
    y = x.new_zeros(x.shape)
    for run in own:
        if run is not None:
            y.narrow(dim, run.local, run.extent).copy_(_summed(x.narrow(dim, run.local, run.extent), dim, reverse))
    return y


def _part_totals(x: Tensor, dim: int, source: str, axes: list[str], blocks: int) -> Tensor:
    own, _ = own_runs(source, axes)
    y = x.new_zeros([*x.shape[:dim], blocks, *x.shape[dim + 1 :]])
    for i, run in enumerate(own):
        if run is not None:
            y.narrow(dim, i, 1).copy_(x.narrow(dim, run.local, run.extent).sum(dim, keepdim=True))
    return y


def _sums_behind(x: Tensor, totals: Tensor, dim: int, source: str, axes: list[str], reverse: bool) -> Tensor:
    own, of_ranks = own_runs(source, axes)
    y = x.clone().contiguous()
    starts = [(run.start, i) for i, run in enumerate(r for of_rank in of_ranks for r in of_rank) if run is not None]
    for run in own:
        if run is None:
            continue
        for start, i in starts:
            if start > run.start if reverse else start < run.start:
                y.narrow(dim, run.local, run.extent).add_(totals.narrow(dim, i, 1))
    return y


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


RUNNING_SUM = define(
    "running_sum(Tensor x, int dim, bool reverse) -> Tensor", lambda *a: _summed(*a).contiguous(), _like
)
PART_SUMS = define("part_sums(Tensor x, int dim, str source, str[] axes, bool reverse) -> Tensor", _part_sums, _like)
PART_TOTALS = define(
    "part_totals(Tensor x, int dim, str source, str[] axes, int blocks) -> Tensor",
    _part_totals,
    lambda x, dim, source, axes, blocks: x.new_empty([*x.shape[:dim], blocks, *x.shape[dim + 1 :]]),
)
SUMS_BEHIND = define(
    "sums_behind(Tensor x, Tensor totals, int dim, str source, str[] axes, bool reverse) -> Tensor", _sums_behind, _like
)
AXES_READ[PART_SUMS] = lambda x, dim, source, axes, reverse: axes
AXES_READ[PART_TOTALS] = lambda x, dim, source, axes, blocks: axes
AXES_READ[SUMS_BEHIND] = lambda x, totals, dim, source, axes, reverse: axes
