"""LayerNorm and RMSNorm. Statistics come back in the dtype of computation, one a row."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import rows_sum, wide


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), of x [..., columns], weight and bias [columns] or None; statistics [...] (Ba et al. 2016).

    Raises nothing of its own.
    """
    h = wide(x)
    mean = h.mean(-1)
    d = h - mean.unsqueeze(-1)
    rstd = torch.rsqrt(d.square().mean(-1) + eps)
    return _affine(d * rstd.unsqueeze(-1), weight, bias).to(x.dtype), mean, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, rstd), of x [..., columns] and weight [columns] or None; rstd [...] (Zhang & Sennrich 2019, equation 4).

    Raises nothing of its own.
    """
    h = wide(x)
    rstd = torch.rsqrt(h.square().mean(-1) + eps)
    return _affine(h * rstd.unsqueeze(-1), weight, None).to(x.dtype), rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, sum, mean, rstd): `layer_norm` of x + residual [..., columns], rounded; weight and bias [columns] or None.

    x [..., columns] is of the residual's dtype. Raises nothing of its own.
    """
    total = (wide(x) + wide(residual)).to(x.dtype)
    y, mean, rstd = layer_norm(total, weight, bias, eps)
    return y, total, mean, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, rstd): `rms_norm` of x + residual [..., columns], rounded; weight [columns] or None.

    x [..., columns] is of the residual's dtype. Raises nothing of its own.
    """
    total = (wide(x) + wide(residual)).to(x.dtype)
    y, rstd = rms_norm(total, weight, eps)
    return y, total, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), of dy and x [..., columns], weight [columns] or None, mean and rstd [...].

    residual_grad [..., columns] or None is added to dx. Raises nothing of its own.
    """
    rstd = rstd.unsqueeze(-1)
    xhat = (wide(x) - mean.unsqueeze(-1)) * rstd
    g = wide(dy) if weight is None else wide(dy) * wide(weight)
    dx = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + wide(residual_grad)
    dtype = x.dtype if weight is None else weight.dtype
    dweight = None if weight is None else rows_sum(wide(dy) * xhat).to(dtype)
    return dx.to(x.dtype), dweight, rows_sum(wide(dy)).to(dtype) if with_bias else None


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dweight), of dy and x [..., columns], weight [columns] or None and rstd [...].

    residual_grad [..., columns] or None is added to dx. Raises nothing of its own.
    """
    rstd = rstd.unsqueeze(-1)
    xhat = wide(x) * rstd
    g = wide(dy) if weight is None else wide(dy) * wide(weight)
    dx = rstd * (g - xhat * (g * xhat).mean(-1, keepdim=True))
    if residual_grad is not None:
        dx = dx + wide(residual_grad)
    return dx.to(x.dtype), None if weight is None else rows_sum(wide(dy) * xhat).to(weight.dtype)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * wide(weight)
    return x if bias is None else x + wide(bias)
