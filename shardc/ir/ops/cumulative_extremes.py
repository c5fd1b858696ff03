"""Greatest or least rows so far, and where they are, along a dim of which ranks have parts; and their gradient.

    cumulative_extreme        x                       of a whole dim               3 1 4 1  ->  3 3 4 4, at 0 0 2 2
    extreme_totals            x                       of each run of rows          rank 0: 4, at 2       rank 1: 5, at 4
    cumulative_extreme_part   x, totals of all runs   from the runs before on

    extreme_gradient          g, indices              each row's to where it points
    extreme_spills            g, indices              what rows leave to a run before, all to one row of it
    extreme_gradient_part     g, indices, spills      of own rows, and what later runs leave to them

Of equal rows the last one counts, and a NaN is greater and less than all: as `torch.cummax` has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.cumulative import own_runs, places_before, wide
from shardc.ir.ops.local import AXES_READ


def _extreme(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, indices = (torch.cummax if largest else torch.cummin)(x, dim)
    return values.contiguous(), indices.contiguous()


def _rows(x: Tensor, dim: int, rows: int, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_zeros([*x.shape[:dim], rows, *x.shape[dim + 1 :]], dtype=dtype)


def _totals(x: Tensor, dim: int, largest: bool, source: str, axes: list[str], blocks: int) -> tuple[Tensor, Tensor]:
    own, _ = own_runs(source, axes)
    values, indices = _rows(x, dim, blocks), _rows(x, dim, blocks, torch.int64)
    for i, run in enumerate(own):
        if run is not None:
            of_run = _extreme(x.narrow(dim, run.local, run.extent), dim, largest)
            value, index = (found.narrow(dim, run.extent - 1, 1) for found in of_run)
            values.narrow(dim, i, 1).copy_(value)
            indices.narrow(dim, i, 1).copy_(index + run.start)
    return values, indices


def _part(
    x: Tensor, values: Tensor, indices: Tensor, dim: int, largest: bool, source: str, axes: list[str]
) -> tuple[Tensor, Tensor]:
    own, of_ranks = own_runs(source, axes)
    y, where = _rows(x, dim, x.shape[dim]), _rows(x, dim, x.shape[dim], torch.int64)
    for run in own:
        if run is None:
            continue
        places = torch.tensor(places_before(run, of_ranks), dtype=torch.int64, device=x.device)
        before = values.index_select(dim, places)
        found, at = _extreme(torch.cat([before, x.narrow(dim, run.local, run.extent)], dim), dim, largest)
        found, at = (value.narrow(dim, len(places), run.extent) for value in (found, at))
        rows = torch.arange(run.start, run.start + run.extent, device=x.device)
        rows = rows.view([-1, *(1 for _ in x.shape[dim + 1 :])]).expand(x.narrow(dim, run.local, run.extent).shape)
        every = torch.cat([indices.index_select(dim, places), rows], dim)
        y.narrow(dim, run.local, run.extent).copy_(found)
        where.narrow(dim, run.local, run.extent).copy_(every.gather(dim, at))
    return y, where


def _gradient(g: Tensor, indices: Tensor, dim: int) -> Tensor:
    return torch.zeros_like(g, memory_format=torch.contiguous_format).scatter_add(dim, indices, g)


def _spills(g: Tensor, indices: Tensor, dim: int, source: str, axes: list[str], blocks: int) -> tuple[Tensor, Tensor]:
    own, _ = own_runs(source, axes)
    spilled, rows = _rows(g, dim, blocks, wide(g.dtype)), _rows(g, dim, blocks, torch.int64)
    for i, run in enumerate(own):
        if run is not None:
            at, part = (value.narrow(dim, run.local, run.extent) for value in (indices, g))
            of_others = torch.where(at < run.start, part, 0).to(spilled.dtype)
            spilled.narrow(dim, i, 1).copy_(of_others.sum(dim, keepdim=True))
            rows.narrow(dim, i, 1).copy_(at.narrow(dim, 0, 1))
    return spilled, rows


def _gradient_part(
    g: Tensor, indices: Tensor, spilled: Tensor, rows: Tensor, dim: int, source: str, axes: list[str]
) -> Tensor:
    own, of_ranks = own_runs(source, axes)
    y = _rows(g, dim, g.shape[dim])
    for run in own:
        if run is None:
            continue
        places = torch.tensor(places_before(run, of_ranks, reverse=True), dtype=torch.int64, device=g.device)
        at, part = (value.narrow(dim, run.local, run.extent) for value in (indices, g))
        at, part = (torch.cat([of_all.index_select(dim, places), of_run], dim)
                    for of_all, of_run in ((rows, at), (spilled, part.to(spilled.dtype))))  # fmt: skip
        own_rows = (at >= run.start) & (at < run.start + run.extent)
        found = _rows(part, dim, run.extent)
        found.scatter_add_(dim, torch.where(own_rows, at - run.start, 0), torch.where(own_rows, part, 0))
        y.narrow(dim, run.local, run.extent).copy_(found)
    return y


def _pair(x: Tensor, dim: int, rows: int, dtypes: tuple[torch.dtype, torch.dtype]) -> tuple[Tensor, Tensor]:
    shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
    return x.new_empty(shape, dtype=dtypes[0]), x.new_empty(shape, dtype=dtypes[1])


CUMULATIVE_EXTREME = define(
    "cumulative_extreme(Tensor x, int dim, bool largest) -> (Tensor, Tensor)",
    _extreme,
    lambda x, dim, largest: _pair(x, dim, x.shape[dim], (x.dtype, torch.int64)),
)
EXTREME_TOTALS = define(
    "extreme_totals(Tensor x, int dim, bool largest, str source, str[] axes, int blocks) -> (Tensor, Tensor)",
    _totals,
    lambda x, dim, largest, source, axes, blocks: _pair(x, dim, blocks, (x.dtype, torch.int64)),
)
CUMULATIVE_EXTREME_PART = define(
    "cumulative_extreme_part(Tensor x, Tensor values, Tensor indices, int dim, bool largest, str source, str[] axes)"
    " -> (Tensor, Tensor)",
    _part,
    lambda x, values, indices, dim, largest, source, axes: _pair(x, dim, x.shape[dim], (x.dtype, torch.int64)),
)
EXTREME_GRADIENT = define(
    "extreme_gradient(Tensor g, Tensor indices, int dim) -> Tensor",
    _gradient,
    lambda g, indices, dim: g.new_empty(g.shape),
)
EXTREME_SPILLS = define(
    "extreme_spills(Tensor g, Tensor indices, int dim, str source, str[] axes, int blocks) -> (Tensor, Tensor)",
    _spills,
    lambda g, indices, dim, source, axes, blocks: _pair(g, dim, blocks, (wide(g.dtype), torch.int64)),
)
EXTREME_GRADIENT_PART = define(
    "extreme_gradient_part(Tensor g, Tensor indices, Tensor spilled, Tensor rows, int dim, str source, str[] axes)"
    " -> Tensor",
    _gradient_part,
    lambda g, indices, spilled, rows, dim, source, axes: g.new_empty(g.shape),
)
AXES_READ[EXTREME_TOTALS] = lambda x, dim, largest, source, axes, blocks: axes
AXES_READ[CUMULATIVE_EXTREME_PART] = lambda x, values, indices, dim, largest, source, axes: axes
AXES_READ[EXTREME_SPILLS] = lambda g, indices, dim, source, axes, blocks: axes
AXES_READ[EXTREME_GRADIENT_PART] = lambda g, indices, spilled, rows, dim, source, axes: axes
