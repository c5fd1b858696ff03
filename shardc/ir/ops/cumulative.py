"""Prefix sums, products and log-sum-exps along a dim of which ranks have parts.

    cumulative         x            of a whole dim               1 2 3 4 5 6 7 8  ->  1 3 6 10 15 21 28 36
    cumulative_totals  x            of each run of rows          rank 0: 10       rank 1: 26
    cumulative_part    x, totals    from all runs before on      rank 1: 15 21 28 36

The totals of all ranks are gathered in between: one for each run, of which a rank has one, or one of each block of a
zigzag. Which runs come before is a matter of the layout of the dim (`ir.blocks`). All but the first op read the
coordinate. `kind` is "sum", "prod" or "logsumexp"; `reverse`: from the last row on.

Of halves, totals are in float32, and a rank's rows are rounded once. The product of many factors under- or overflows
where that of all rows before it does not: its total is two rows, m and e, and stands for m * 2**e.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import blocks_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, Run, runs
from shardc.ir.ops.shift import size_of

Runs = tuple[Run | None, ...]
KINDS = ("sum", "prod", "logsumexp")


@lru_cache(maxsize=4096)
def runs_of_ranks(source: str, axes: tuple[str, ...], mesh: Mesh) -> tuple[Runs, ...]:
    """For each rank along the axes, its run of each block; None where it has none."""
    names, size = mesh.resolve(axes), size_of(source)
    starts = [0]
    for block in blocks_of(size):
        starts.append(starts[-1] + block.size)
    found: list[Runs] = []
    for at in product(*(range(mesh.size(name)) for name in names)):
        held = [r for r in runs(size, names, mesh, dict(zip(names, at, strict=True))) if r.extent]
        of_block = {next(i for i in range(len(starts)) if r.start < starts[i + 1]): r for r in held}
        found.append(tuple(of_block.get(i) for i in range(len(starts) - 1)))
    return tuple(found)


def own_runs(source: str, axes: list[str]) -> tuple[Runs, tuple[Runs, ...]]:
    """A rank's run of each block, and those of all ranks."""
    context = current()
    of_ranks = runs_of_ranks(source, tuple(axes), context.mesh)
    return of_ranks[context.index(tuple(axes))], of_ranks


def places_before(run: Run, of_ranks: tuple[Runs, ...], reverse: bool = False) -> list[int]:
    """Where among the gathered totals those of the runs before one are, in order; with `reverse` those behind it."""
    every = enumerate(r for of_rank in of_ranks for r in of_rank)
    placed = sorted((r.start, i) for i, r in every if r is not None)
    if reverse:
        return [i for start, i in reversed(placed) if start > run.start]
    return [i for start, i in placed if start < run.start]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What totals are in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def total_rows(kind: str, dtype: torch.dtype) -> int:
    """How many rows tell the total of one run."""
    return 2 if kind == "prod" and dtype.is_floating_point else 1


def _cumulative(x: Tensor, dim: int, kind: str, reverse: bool) -> Tensor:
    x = x.flip(dim) if reverse else x
    y = {"sum": torch.cumsum, "prod": torch.cumprod, "logsumexp": torch.logcumsumexp}[kind](x, dim).to(x.dtype)
    return (y.flip(dim) if reverse else y).contiguous()


def _normal(m: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """A number m * 2**e with m in [0.5, 1), or one that is 0 or not finite, with an exponent in reach."""
    fraction, exponent = torch.frexp(m)
    return fraction, torch.where(torch.isfinite(m) & (m != 0), e + exponent, 0)


def _scaled_product(x: Tensor, dim: int) -> Tensor:
    """The product of all rows, pair by pair, as two rows: m and e of m * 2**e."""
    m, e = _normal(x, torch.zeros_like(x))
    while (rows := m.shape[dim]) > 1:
        sizes = [rows // 2, rows // 2, rows % 2]
        (m, factor, last), (e, more, rest) = m.split(sizes, dim), e.split(sizes, dim)
        m, e = _normal(m * factor, e + more)
        m, e = torch.cat([m, last], dim), torch.cat([e, rest], dim)
    return torch.cat([m, e], dim)


def _times(y: Tensor, total: Tensor, dim: int) -> Tensor:
    """`y` times a total, by its power of two in three steps, none of which is out of reach where the result is not."""
    m, e = total.split(1, dim)
    m, e = torch.where(e > 0, 2 * m, m), torch.where(e > 0, e - 1, e)  # least numbers stay what they are
    most = 300 if y.dtype == torch.float32 else 2400
    e = e.clamp(-most, most)
    third, y = torch.trunc(e / 3), y * m
    for step in (third, third, e - 2 * third):
        y = y * torch.exp2(step)
    return y


def _total(x: Tensor, dim: int, kind: str) -> Tensor:
    x = x.to(wide(x.dtype))
    if kind == "logsumexp":
        return torch.logsumexp(x, dim, keepdim=True)
    if kind == "sum":
        return x.sum(dim, keepdim=True).to(x.dtype)
    return _scaled_product(x, dim) if x.dtype.is_floating_point else x.prod(dim, keepdim=True).to(x.dtype)


def _joined(totals: list[Tensor], dim: int, kind: str) -> Tensor:
    """All totals as one."""
    scaled = kind == "prod" and totals[0].dtype.is_floating_point
    y = _times(torch.ones_like(totals[0].narrow(dim, 0, 1)), totals[0], dim) if scaled else totals[0]
    for total in totals[1:]:
        if kind == "logsumexp":
            y = torch.logaddexp(y, total)
        else:
            y = y + total if kind == "sum" else _times(y, total, dim) if scaled else y * total
    return y


def _totals(x: Tensor, dim: int, kind: str, source: str, axes: list[str], blocks: int) -> Tensor:
    own, _ = own_runs(source, axes)
    rows = total_rows(kind, x.dtype)
    y = x.new_zeros([*x.shape[:dim], blocks * rows, *x.shape[dim + 1 :]], dtype=wide(x.dtype))
    for i, run in enumerate(own):
        if run is not None:
            y.narrow(dim, i * rows, rows).copy_(_total(x.narrow(dim, run.local, run.extent), dim, kind))
    return y


def _part(x: Tensor, totals: Tensor, dim: int, kind: str, reverse: bool, source: str, axes: list[str]) -> Tensor:
    own, of_ranks = own_runs(source, axes)
    rows = total_rows(kind, x.dtype)
    y = x.new_zeros(x.shape)
    for run in own:
        if run is None:
            continue
        part = x.narrow(dim, run.local, run.extent)
        before = [totals.narrow(dim, i * rows, rows) for i in places_before(run, of_ranks, reverse)]
        if before:
            joined, part = _joined(before, dim, kind), part.to(totals.dtype)
            parts = [part, joined] if reverse else [joined, part]
            found = _cumulative(torch.cat(parts, dim), dim, kind, reverse).narrow(dim, 0 if reverse else 1, run.extent)
        else:
            found = _cumulative(part, dim, kind, reverse)
        y.narrow(dim, run.local, run.extent).copy_(found)
    return y


CUMULATIVE = define(
    "cumulative(Tensor x, int dim, str kind, bool reverse) -> Tensor",
    _cumulative,
    lambda x, dim, kind, reverse: x.new_empty(x.shape),
)
CUMULATIVE_TOTALS = define(
    "cumulative_totals(Tensor x, int dim, str kind, str source, str[] axes, int blocks) -> Tensor",
    _totals,
    lambda x, dim, kind, source, axes, blocks: x.new_empty(
        [*x.shape[:dim], blocks * total_rows(kind, x.dtype), *x.shape[dim + 1 :]], dtype=wide(x.dtype)
    ),
)
CUMULATIVE_PART = define(
    "cumulative_part(Tensor x, Tensor totals, int dim, str kind, bool reverse, str source, str[] axes) -> Tensor",
    _part,
    lambda x, totals, dim, kind, reverse, source, axes: x.new_empty(x.shape),
)
AXES_READ[CUMULATIVE_TOTALS] = lambda x, dim, kind, source, axes, blocks: axes
AXES_READ[CUMULATIVE_PART] = lambda x, totals, dim, kind, reverse, source, axes: axes
