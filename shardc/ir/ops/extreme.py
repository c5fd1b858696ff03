"""The greatest or least row of a dim and the first place where it is, where ranks have parts of the dim.

    extreme         x                  of a whole dim      3 1 4 1 5 5  ->  5 at 4
    run_extremes    x                  of each run         rank 0: 4 at 2         rank 1: 5 at 4
    extreme_of_runs values, indices    of all runs         5 at 4

What ranks have is gathered in between, a value and a place each. A NaN is greater and less than all others, as
`torch.max` has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.context import current
from shardc.ir.ops.cumulative import own_runs, runs_of_ranks
from shardc.ir.ops.local import AXES_READ


def _extreme(x: Tensor, dim: int, largest: bool) -> tuple[Tensor, Tensor]:
    values, indices = (torch.max if largest else torch.min)(x, dim, keepdim=True)
    return values.contiguous(), indices.contiguous()


def _one_row(x: Tensor, dim: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    shape = [*x.shape[:dim], rows, *x.shape[dim + 1 :]]
    return x.new_zeros(shape), x.new_zeros(shape, dtype=torch.int64)


def _run_extremes(
    x: Tensor, dim: int, largest: bool, source: str, axes: list[str], blocks: int
) -> tuple[Tensor, Tensor]:
    own, _ = own_runs(source, axes)
    values, indices = _one_row(x, dim, blocks)
    for i, run in enumerate(own):
        if run is not None:
            value, index = _extreme(x.narrow(dim, run.local, run.extent), dim, largest)
            values.narrow(dim, i, 1).copy_(value)
            indices.narrow(dim, i, 1).copy_(index + run.start)
    return values, indices


def _extreme_of_runs(
    values: Tensor, indices: Tensor, dim: int, largest: bool, source: str, axes: list[str]
) -> tuple[Tensor, Tensor]:
    every = [run for of_rank in runs_of_ranks(source, tuple(axes), current().mesh) for run in of_rank]
    placed = sorted((run.start, i) for i, run in enumerate(every) if run is not None)
    places = torch.tensor([i for _, i in placed], device=values.device)
    value, first = _extreme(values.index_select(dim, places), dim, largest)
    return value, indices.index_select(dim, places).gather(dim, first)


EXTREME = define(
    "extreme(Tensor x, int dim, bool largest) -> (Tensor, Tensor)", _extreme, lambda x, dim, largest: _one_row(x, dim)
)
RUN_EXTREMES = define(
    "run_extremes(Tensor x, int dim, bool largest, str source, str[] axes, int blocks) -> (Tensor, Tensor)",
    _run_extremes,
    lambda x, dim, largest, source, axes, blocks: _one_row(x, dim, blocks),
)
EXTREME_OF_RUNS = define(
    "extreme_of_runs(Tensor values, Tensor indices, int dim, bool largest, str source, str[] axes) -> (Tensor, Tensor)",
    _extreme_of_runs,
    lambda values, indices, dim, largest, source, axes: (_one_row(values, dim)[0], _one_row(indices, dim)[0]),
)
AXES_READ[RUN_EXTREMES] = lambda x, dim, largest, source, axes, blocks: axes
AXES_READ[EXTREME_OF_RUNS] = lambda values, indices, dim, largest, source, axes: axes
