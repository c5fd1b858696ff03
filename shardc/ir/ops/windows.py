"""What pooling over a sharded dim does beside exchanging rows: positions of maxima, and means at the outer ends.

    widen             an uninitialised tensor with rows more before and behind: of it only the shape is read
    shift_positions   positions within a plane, of which one dim is a rank's rows, counted in the whole dim, or back
    mean_anew         means of windows that a rank took to be full, as those of what there is of each

    rows 4 to 7 of 8, one more before, 5 columns     position 6, in row 1: row 4 of all, position 21

A rank that has a row less than a neighbour holds positions of padding: they are brought within its own plane.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ


def _widen(x: Tensor, lead: int, tail: int, dim: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], lead + x.shape[dim] + tail, *x.shape[dim + 1 :]])


def _shift_positions(
    x: Tensor, size: int, new_size: int, inner: int, rows: int, lead: int, dilation: int, back: bool, axes: list[str]
) -> Tensor:
    """`size` rows of `inner` elements each become `new_size`; a rank's own are `rows`, behind `lead` of others."""
    shift = current().index(tuple(axes)) * rows - lead
    rest, row = x % inner, x // inner
    outer, row = row // size, row % size
    row = row - shift if back else row + shift
    # A window that holds nothing larger than the fill before the first row has its maximum at its first real row.
    row = row.clamp(0, new_size - 1) if back else torch.where(row < 0, row % dilation, row)
    return (outer * new_size + row) * inner + rest


def _mean_anew(
    x: Tensor, dim: int, size: int, extent: int, stride: int, padding: int, counts_padding: bool, axes: list[str]
) -> Tensor:
    """`size` elements of the whole dim; `counts_padding` within a window as elements."""
    rows = x.shape[dim]
    first = (torch.arange(rows, device=x.device) + current().index(tuple(axes)) * rows) * stride - padding
    beyond = padding if counts_padding else 0
    count = (first + extent).clamp(max=size + beyond) - first.clamp(min=-beyond)
    scale = extent / count.clamp(min=1).to(torch.promote_types(x.dtype, torch.float32))
    return (x * scale.view([-1 if d == dim else 1 for d in range(x.ndim)])).to(x.dtype)


WIDEN = define("widen(Tensor x, int lead, int tail, int dim) -> Tensor", _widen, _widen)
SHIFT_POSITIONS = define(
    "shift_positions(Tensor x, int size, int new_size, int inner, int rows, int lead, int dilation, bool back, "
    "str[] axes) -> Tensor",
    _shift_positions,
    lambda x, *rest: torch.empty_like(x),
)
MEAN_ANEW = define(
    "mean_anew(Tensor x, int dim, int size, int extent, int stride, int padding, bool counts_padding, str[] axes) "
    "-> Tensor",
    _mean_anew,
    lambda x, *rest: torch.empty_like(x),
)
AXES_READ[SHIFT_POSITIONS] = lambda *args: args[-1]
AXES_READ[MEAN_ANEW] = lambda *args: args[-1]
