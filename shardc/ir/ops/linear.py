"""`linear` kept whole: `[..., K] x [N, K] -> [..., N]`, with its two gradients as ops of their own.

ATen flattens `[B, S, K]` to `[B*S, K]` before the product, which ties batch and sequence into one dim and so
gets in the way of sharding the sequence. Whole, the three products are one line of factor notation each:

    linear        ... k, n k -> ... n      sums k
    linear_dgrad  ... n, n k -> ... k      sums n
    linear_wgrad  ... n, ... k -> n k      sums every leading dim

The bias is an `aten.add` after the product: a product over a sharded K is a pending sum, and a bias inside would be
added once a shard. The pass `bias_products` makes `linear_bias` of a product that is none, and of its bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define


def _linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, w).contiguous()


def _linear_fake(x: Tensor, w: Tensor) -> Tensor:
    _check(x.shape[-1] == w.shape[1], "linear", x, w)
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _linear_bias(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    if x.dim() > 1 and x.is_contiguous():
        return torch.nn.functional.linear(x, w, b)  # the same `addmm`, and one call of Python's
    return torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t()).view(*x.shape[:-1], w.shape[0])


def write_linear_bias(x: Tensor, w: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    """The product with its bias, written to `out`, which is contiguous."""
    torch.addmm(b, x.reshape(-1, x.shape[-1]), w.t(), out=out.view(-1, w.shape[0]))
    return out


def _linear_bias_fake(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    _check(b.shape == w.shape[:1], "linear_bias", w, b)
    return _linear_fake(x, w)


def _dgrad(g: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(g, w).contiguous()


def _dgrad_fake(g: Tensor, w: Tensor) -> Tensor:
    _check(g.shape[-1] == w.shape[0], "linear_dgrad", g, w)
    return g.new_empty((*g.shape[:-1], w.shape[1]))


def _wgrad(g: Tensor, x: Tensor) -> Tensor:
    return g.reshape(-1, g.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1])).contiguous()


def _wgrad_fake(g: Tensor, x: Tensor) -> Tensor:
    _check(g.shape[:-1] == x.shape[:-1], "linear_wgrad", g, x)
    return g.new_empty((g.shape[-1], x.shape[-1]))


def _check(ok: bool, op: str, a: Tensor, b: Tensor) -> None:
    if not ok:
        raise RuntimeError(f"{op}: shapes {tuple(a.shape)} and {tuple(b.shape)} do not fit")


LINEAR = define("linear(Tensor x, Tensor w) -> Tensor", _linear, _linear_fake)
LINEAR_BIAS = define("linear_bias(Tensor x, Tensor w, Tensor b) -> Tensor", _linear_bias, _linear_bias_fake)
LINEAR_DGRAD = define("linear_dgrad(Tensor g, Tensor w) -> Tensor", _dgrad, _dgrad_fake)
LINEAR_WGRAD = define("linear_wgrad(Tensor g, Tensor x) -> Tensor", _wgrad, _wgrad_fake)


class _Linear(torch.autograd.Function):
    """`x w^T + b`; below, its two gradients. The gradients of each of the three are the other two, to any order.

    With y = x w^T, dgrad(g, w) = g w and wgrad(g, x) = g^T x, and h the gradient of a result:

        linear(x, w)    x: dgrad(h, w)     w: wgrad(h, x)
        dgrad(g, w)     g: linear(h, w)    w: wgrad(g, h)
        wgrad(g, x)     g: linear(x, h)    x: dgrad(g, h)
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        y = LINEAR(x, w)
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), (x, w), (need_x, need_w, need_b) = grads, ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Dgrad.apply(h, w) if need_x else None,
            _Wgrad.apply(h, x) if need_w else None,
            h.sum(list(range(h.dim() - 1))) if need_b and h.dim() > 1 else h if need_b else None,
        )


class _Dgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(g, w)
        return LINEAR_DGRAD(g, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), (g, w), (need_g, need_w) = grads, ctx.saved_tensors, ctx.needs_input_grad
        return _Linear.apply(h, w, None) if need_g else None, _Wgrad.apply(g, h) if need_w else None


class _Wgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(g, x)
        return LINEAR_WGRAD(g, x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (h,), (g, x), (need_g, need_x) = grads, ctx.saved_tensors, ctx.needs_input_grad
        return _Linear.apply(x, h, None) if need_g else None, _Dgrad.apply(g, h) if need_x else None


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Differentiable `x @ w.T + b` out of the ops above; what a trace sees in place of `aten.linear`."""
    if w.dim() == 1:  # F.linear accepts a vector: a dot product, without the N dim
        y = linear(x, w[None]).squeeze(-1)
        return y if b is None else y + b
    return _Linear.apply(x, w, b)  # type: ignore[return-value]
