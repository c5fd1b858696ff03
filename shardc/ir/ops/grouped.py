"""Grouped matrix products, for mixtures of experts: each group of consecutive rows meets its own matrix.

`offs[e]` is the row at which group e ends; rows after the last group yield zeros.

    grouped_mm        s k, e k n -> s n
    grouped_mm_wgrad  s k, s n -> e k n
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define


def grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(a.shape[0], b.shape[-1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[start:end] = a[start:end] @ b[group]
        start = end
    return out


def grouped_product_fake(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[-1]))


def grouped_wgrad(a: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    out = a.new_zeros(offs.shape[0], a.shape[1], g.shape[1])
    start = 0
    for group, end in enumerate(offs.tolist()):
        out[group] = a[start:end].t() @ g[start:end]
        start = end
    return out


def grouped_wgrad_fake(a: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    return a.new_empty((offs.shape[0], a.shape[1], g.shape[1]))


GROUPED_MM = define("grouped_mm(Tensor a, Tensor b, Tensor offs) -> Tensor", grouped_product, grouped_product_fake)
GROUPED_MM_WGRAD = define(
    "grouped_mm_wgrad(Tensor a, Tensor g, Tensor offs) -> Tensor", grouped_wgrad, grouped_wgrad_fake
)


class _GroupedMM(torch.autograd.Function):
    """The product of each group; its gradients are products of groups again, and so are theirs."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(a, b, offs)
        return GROUPED_MM(a, b, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), (a, b, offs), (need_a, need_b, _) = grads, ctx.saved_tensors, ctx.needs_input_grad
        da = _GroupedMM.apply(h, b.transpose(-2, -1), offs) if need_a else None
        return da, _GroupedWgrad.apply(a, h, offs) if need_b else None, None


class _GroupedWgrad(torch.autograd.Function):
    """`a^T g` of each group: [S, K] and [S, N] to [E, K, N]."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, g: Tensor, offs: Tensor) -> Tensor:
        ctx.save_for_backward(a, g, offs)
        return GROUPED_MM_WGRAD(a, g, offs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), (a, g, offs), (need_a, need_g, _) = grads, ctx.saved_tensors, ctx.needs_input_grad
        da = _GroupedMM.apply(g, h.transpose(-2, -1), offs) if need_a else None
        return da, _GroupedMM.apply(a, h, offs) if need_g else None, None


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Differentiable stand-in for `aten._grouped_mm` in the form that experts use it: 2-d rows, 3-d weights."""
    if a.dim() != 2 or b.dim() != 3 or offs is None or bias is not None:
        raise NotImplementedError(
            f"grouped_mm of a {a.dim()}-d and a {b.dim()}-d tensor, offsets {offs is not None}, bias {bias is not None}"
        )
    out: Tensor = _GroupedMM.apply(a, b, offs)  # type: ignore[assignment]
    return out if out_dtype is None else out.to(out_dtype)
