"""GroupNorm of [batch, channels, ...]: statistics over a group of channels and all positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), of x [batch, channels, ...], weight and bias [channels] or None; statistics [batch, groups].

    Wu & He 2018, equations 1 to 7. Raises what torch does for groups that do not divide the channels.
    """
    channel, group = _shapes(x, groups)
    h = wide(x).reshape(group)
    mean = h.mean(-1)
    d = h - mean.unsqueeze(-1)
    rstd = torch.rsqrt(d.square().mean(-1) + eps)
    y = (d * rstd.unsqueeze(-1)).reshape(channel)
    if weight is not None:
        y = y * wide(weight).unsqueeze(-1)
    if bias is not None:
        y = y + wide(bias).unsqueeze(-1)
    return y.reshape(x.shape).to(x.dtype), mean, rstd


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), of dy and x [batch, channels, ...], weight [channels], mean and rstd [batch, groups].

    Raises what torch does for groups that do not divide the channels.
    """
    channel, group = _shapes(x, groups)
    xhat = (wide(x).reshape(group) - mean.unsqueeze(-1)) * rstd.unsqueeze(-1)
    g = wide(dy).reshape(channel)
    dweight = (g * xhat.reshape(g.shape)).sum((0, 2))
    dbias = g.sum((0, 2))
    if weight is not None:
        g = g * wide(weight).unsqueeze(-1)
    g = g.reshape(group)
    dx = rstd.unsqueeze(-1) * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    dtype = x.dtype if weight is None else weight.dtype
    return (
        dx.reshape(x.shape).to(x.dtype),
        None if weight is None else dweight.to(dtype),
        dbias.to(dtype) if with_bias else None,
    )


def _shapes(x: Tensor, groups: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """[batch, channels, positions] and [batch, groups, elements of a group]; any size may be 0."""
    batch, channels = x.shape[:2]
    space = math.prod(x.shape[2:])
    return (batch, channels, space), (batch, groups, channels // groups * space)
