"""GroupNorm of [batch, channels, ...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import expect, shaped
from kernels_triton.ops.sums import partials, summed

TILE = 4096


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd), statistics [batch, groups]."""
    _check("group_norm", x, groups, weight, bias)
    if not launch.on_triton(x):
        return reference.group_norm(x, groups, weight, bias, eps)
    flat = x.contiguous()
    batch = x.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    mean, rstd = (launch.empty((batch, groups), torch.float32, x) for _ in range(2))
    launch.run(
        "group_norm.group_norm_forward",
        (batch * groups,),
        *(flat, *(None if t is None else t.contiguous() for t in (weight, bias)), y, mean, rstd, eps, groups),
        **_tile(x, groups),
    )
    return y, mean, rstd


def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias)."""
    op = "group_norm_backward"
    _check(op, x, groups, weight, None)
    shaped(op, "dy", dy, x.shape, x)
    shaped(op, "mean", mean, (x.shape[0], groups), x)
    shaped(op, "rstd", rstd, (x.shape[0], groups), x)
    if not launch.on_triton(x):
        return reference.group_norm_backward(dy, x, groups, weight, mean, rstd, with_bias)
    batch, channels = x.shape[:2]
    dx = launch.empty(x.shape, x.dtype, x)
    dw, db = partials(batch, channels, x), partials(batch, channels, x)
    operands = (t.contiguous() for t in (dy, x))
    launch.run(
        "group_norm.group_norm_backward",
        (batch * groups,),
        *(*operands, None if weight is None else weight.contiguous(), mean.contiguous(), rstd.contiguous()),
        *(dx, dw, db, groups),
        **_tile(x, groups),
    )
    dtype = x.dtype if weight is None else weight.dtype
    return dx, *summed(dw if weight is not None else None, db if with_bias else None, dtype, x)


def _tile(x: Tensor, groups: int) -> dict[str, int]:
    of_group, space = x.shape[1] // groups, math.prod(x.shape[2:])
    block = min(rows.power_of_two(space), TILE)
    channels = max(1, min(rows.power_of_two(of_group), TILE // block))
    shape = {"OF_GROUP": of_group, "SPACE": space, "CHANNELS": channels, "BLOCK": block}
    return {**shape, "warps": max(1, min(8, channels * block // 512))}


def _check(op: str, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    expect(x.dim() >= 2, op, f"x is {list(x.shape)}, expected [batch, channels, ...]")
    expect(x.shape[1] % groups == 0, op, f"{x.shape[1]} channels in {groups} groups")
    for name, value in (("weight", weight), ("bias", bias)):
        shaped(op, name, value, (x.shape[1],), x)
