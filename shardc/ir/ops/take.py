"""Rows of a dim that a tensor names, and their gradients back: which ranks have them is known when the step runs.

    take_rows    x[:, index]    rows 14 and 3 of 16 over 4 ranks: rank 3 yields the one, rank 0 the other
    add_rows     their gradients in 16 rows, of a row that is named twice their sum: each rank takes its own

Ranks' results of the first add up to the rows. `index` has as many dims as x; those of size 1 are for all of x. A call
with `rows` and `axes` is one rank's: so the dim lies, as `Blocks` print, a zigzag too. Truth values are put, not added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import Blocks
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, runs


def _own(index: Tensor, size: int, rows: str, axes: list[str]) -> Tensor:
    """Where a rank has each of the rows; `size` where it has not."""
    if not axes:
        return index
    context = current()
    found = torch.full_like(index, size)
    for run in runs(Blocks.parse(rows), context.mesh.resolve(axes), context.mesh, context.coordinate):
        inside = (index >= run.start) & (index < run.start + run.extent)
        found = torch.where(inside, index - run.start + run.local, found)
    return found


def _like(index: Tensor, x: Tensor, dim: int) -> list[int]:
    return [*x.shape[:dim], index.shape[dim], *x.shape[dim + 1 :]]


def _take_rows(x: Tensor, dim: int, index: Tensor, rows: str = "", axes: list[str] | None = None) -> Tensor:
    size = x.shape[dim]
    own = _own(index, size, rows, axes or []).expand(_like(index, x, dim))
    taken = x.gather(dim, own.clamp(max=size - 1))
    return torch.where(own < size, taken, 0) if axes else taken


def _add_rows(g: Tensor, dim: int, index: Tensor, size: int, rows: str = "", axes: list[str] | None = None) -> Tensor:
    own = _own(index, size, rows, axes or []).expand(g.shape)
    y = g.new_zeros([*g.shape[:dim], size + 1, *g.shape[dim + 1 :]])  # the last row is that of others
    y = y.scatter_(dim, own, g) if g.dtype == torch.bool else y.scatter_add_(dim, own, g)
    return y.narrow(dim, 0, size).contiguous()


TAKE_ROWS = define(
    'take_rows(Tensor x, int dim, Tensor index, str rows="", str[]? axes=None) -> Tensor',
    _take_rows,
    lambda x, dim, index, rows="", axes=None: x.new_empty(_like(index, x, dim)),
)
ADD_ROWS = define(
    'add_rows(Tensor g, int dim, Tensor index, int size, str rows="", str[]? axes=None) -> Tensor',
    _add_rows,
    lambda g, dim, index, size, rows="", axes=None: g.new_empty([*g.shape[:dim], size, *g.shape[dim + 1 :]]),
)
AXES_READ[TAKE_ROWS] = lambda x, dim, index, rows="", axes=None: axes or []
AXES_READ[ADD_ROWS] = lambda g, dim, index, size, rows="", axes=None: axes or []
