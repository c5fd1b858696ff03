"""Rows of the neighbours: a rank's rows of a dim with those that lie before and behind them on other ranks.

    rank 0   0 1 2 3        one row before, two behind        rank 0   . 0 1 2 3 4 5
    rank 1   4 5 6 7                                          rank 1   3 4 5 6 7 . .

    neighbour_rows   x -> the rows [start, start + length) of the rank that is `shift` ranks before, in a circle
    halo             x, rows before, rows behind -> all of them; `fill` in the place of those from beyond an end
    halo_sum         its transpose: the gradient of `halo`, and the rows that the neighbours have sent back

    halo_sum of 3 + 4 + 2 rows, where `lead` is 3 and `tail` 2: the 4 in the middle, the last 3 of which get `behind`
    added (the leading rows of the rank behind), and the first 2 `before`

The two last read the coordinate, to leave out what came round the circle.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload

from kernels_triton.base.library import define
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ


def _neighbour_rows(x: Tensor, axes: list[str], dim: int, start: int, length: int, shift: int) -> Steps:
    group = current().mesh.size(axes)
    rows = x.narrow(dim, start, length).clone(memory_format=torch.contiguous_format)
    source = tuple((rank - shift) % group for rank in range(group))
    received = yield Exchange("permute", rows, tuple(axes), source=source)
    return received


def _rows(x: Tensor, dim: int, length: int) -> Tensor:
    return x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]])


def _ends(axes: list[str]) -> tuple[bool, bool]:
    """Whether a rank is the first and whether it is the last along the axes."""
    context = current()
    index = context.index(tuple(axes))
    return index == 0, index == context.mesh.size(axes) - 1


def _halo(
    x: Tensor, before: Tensor | None, behind: Tensor | None, dim: int, axes: list[str], fill: float = 0.0
) -> Tensor:
    first, last = _ends(axes)
    parts = [torch.full_like(before, fill) if first else before] if before is not None else []
    parts += [x]
    parts += [torch.full_like(behind, fill) if last else behind] if behind is not None else []
    return torch.cat(parts, dim).contiguous()


def _halo_fake(
    x: Tensor, before: Tensor | None, behind: Tensor | None, dim: int, axes: list[str], fill: float = 0.0
) -> Tensor:
    return _rows(x, dim, sum(part.shape[dim] for part in (before, x, behind) if part is not None))


def _halo_sum(
    x: Tensor, before: Tensor | None, behind: Tensor | None, lead: int, tail: int, dim: int, axes: list[str]
) -> Tensor:
    first, last = _ends(axes)
    rows = x.shape[dim] - lead - tail
    total = x.narrow(dim, lead, rows).clone(memory_format=torch.contiguous_format)
    if behind is not None and not last:
        total.narrow(dim, rows - lead, lead).add_(behind)
    if before is not None and not first:
        total.narrow(dim, 0, tail).add_(before)
    return total


def _halo_sum_fake(
    x: Tensor, before: Tensor | None, behind: Tensor | None, lead: int, tail: int, dim: int, axes: list[str]
) -> Tensor:
    return _rows(x, dim, x.shape[dim] - lead - tail)


def _collective(schema: str, steps: Callable[..., Steps], fake: Callable[..., Tensor]) -> OpOverload:
    op = define(schema, partial(run_collective, steps), fake)
    COLLECTIVES[op] = steps
    return op


NEIGHBOUR_ROWS = _collective(
    "neighbour_rows(Tensor x, str[] axes, int dim, int start, int length, int shift) -> Tensor",
    _neighbour_rows,
    lambda x, axes, dim, start, length, shift: _rows(x, dim, length),
)
HALO = define(
    "halo(Tensor x, Tensor? before, Tensor? behind, int dim, str[] axes, float fill=0.) -> Tensor", _halo, _halo_fake
)
HALO_SUM = define(
    "halo_sum(Tensor x, Tensor? before, Tensor? behind, int lead, int tail, int dim, str[] axes) -> Tensor",
    _halo_sum,
    _halo_sum_fake,
)
AXES_READ[HALO] = lambda x, before, behind, dim, axes, fill=0.0: axes
AXES_READ[HALO_SUM] = lambda x, before, behind, lead, tail, dim, axes: axes
