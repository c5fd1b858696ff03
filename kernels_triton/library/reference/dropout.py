"""`residual + dropout(x + bias)` with the numbers of `shardc::random_uniform`, and the mask of kept elements as
bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.random import RANDOM_UNIFORM
from kernels_triton.library.reference.wide import rows_sum, wide


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: Tensor,
    op_id: int,
    strides: Sequence[int] | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, keep), of x [..., columns], bias [columns] or None and residual [..., columns] or None.

    keep is uint8 [..., ceil(columns / 8)], the first column in the lowest bit. The numbers are Philox's (Salmon et al.
    2011), by seed [] and op_id; `strides` and offset [] (int64 each) place x in the whole tensor, as `random_uniform`
    says; by default x is whole. Raises ValueError for as many strides as x has no dims.
    """
    strides = whole_strides(x) if strides is None else strides
    first = torch.zeros((), dtype=torch.int64, device=x.device) if offset is None else offset
    keep = RANDOM_UNIFORM(seed, op_id, list(x.shape), list(strides), first) >= p
    value = wide(x) if bias is None else wide(x) + wide(bias)
    value = torch.where(keep, value * scale_of(p), 0.0)
    if residual is not None:
        value = value + wide(residual)
    return value.to(x.dtype), packed(keep)


def bias_dropout_residual_backward(
    dy: Tensor, keep: Tensor, p: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias), of dy [..., columns] and keep [..., ceil(columns / 8)]; the residual's gradient is dy.

    bias [columns] is read for its dtype alone. Raises nothing of its own.
    """
    dx = torch.where(unpacked(keep, dy.shape[-1]), wide(dy) * scale_of(p), 0.0)
    return dx.to(dy.dtype), None if bias is None else rows_sum(dx).to(bias.dtype)


def scale_of(p: float) -> float:
    return 0.0 if p == 1.0 else 1.0 / (1.0 - p)


def whole_strides(x: Tensor) -> tuple[int, ...]:
    """The strides of a contiguous tensor of x's shape."""
    strides: list[int] = []
    step = 1
    for size in reversed(x.shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def packed(keep: Tensor) -> Tensor:
    cols = keep.shape[-1]
    bits = torch.nn.functional.pad(keep.to(torch.uint8), (0, -cols % 8))
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=keep.device)
    return (bits.unflatten(-1, (-(-cols // 8), 8)) * weights).sum(-1, dtype=torch.uint8)


def unpacked(keep: Tensor, cols: int) -> Tensor:
    bits = keep.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=keep.device)
    return (bits & 1).bool().flatten(-2)[..., :cols]
