"""GroupNorm of [batch, channels, ...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import checked, expect, floats, shaped
from kernels_triton.ops.sums import partials, summed

TILE = {"group_norm": 8192, "group_norm_backward": 4096}  # elements
WARPS = 16  # a program, at most: with many small programs their groups would not stay in the L2 cache
HELD = 64  # bytes of x that a thread keeps at most


@checked
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of x [batch, channels, ...], weight and bias [channels] or None; statistics float32
    [batch, groups]."""
    _check("group_norm", x, groups, weight, bias)
    if not launch.on_triton(x):
        return reference.group_norm(x, groups, weight, bias, eps)
    flat = x.contiguous()
    batch = x.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    mean, rstd = (launch.empty((batch, groups), torch.float32, x) for _ in range(2))
    name, tile = _tile("group_norm", x, groups)
    launch.run(
        f"group_norm.group_norm_forward{name}",
        (batch * groups,),
        *(flat, *(None if t is None else t.contiguous() for t in (weight, bias)), y, mean, rstd, eps, groups),
        **tile,
    )
    return y, mean, rstd


@checked
def group_norm_backward(
    dy: Tensor,
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias), each None where its operand is (`with_bias` for the last)."""
    op = "group_norm_backward"
    _check(op, x, groups, weight, None)
    floats(op, x, dy=dy, mean=mean, rstd=rstd)
    shaped(op, "dy", dy, x.shape, x)
    shaped(op, "mean", mean, (x.shape[0], groups), x)
    shaped(op, "rstd", rstd, (x.shape[0], groups), x)
    if not launch.on_triton(x):
        return reference.group_norm_backward(dy, x, groups, weight, mean, rstd, with_bias)
    batch, channels = x.shape[:2]
    dx = launch.empty(x.shape, x.dtype, x)
    dw, db = partials(batch, channels, x), partials(batch, channels, x)
    operands = (t.contiguous() for t in (dy, x))
    name, tile = _tile(op, x, groups)
    launch.run(
        f"group_norm.group_norm_backward{name}",
        (batch * groups,),
        *(*operands, None if weight is None else weight.contiguous(), mean.contiguous(), rstd.contiguous()),
        *(dx, dw, db, groups),
        **tile,
    )
    dtype = x.dtype if weight is None else weight.dtype
    return dx, *summed(dw if weight is not None else None, db if with_bias else None, dtype, x)


def _tile(op: str, x: Tensor, groups: int) -> tuple[str, dict[str, int]]:
    """Which kernel, by the end of its name, and its tile."""
    of_group, space = x.shape[1] // groups, math.prod(x.shape[2:])
    high, wide = rows.power_of_two(of_group), rows.power_of_two(space)
    held = high * wide * x.element_size() <= HELD * 32 * WARPS
    size = TILE[op] // (2 if op.endswith("backward") and x.element_size() > 2 else 1)  # of float32 both fill registers
    # A warp's 16 bytes a thread wide, but of few channels as wide as makes a tile.
    channels = max(1, min(high, size // min(wide, 512 // x.element_size())))
    block = min(wide, max(512 // x.element_size(), (2048 if held else size) // channels))
    warps = max(1, min(WARPS, channels * block // 256, high * wide // 1024 if held else WARPS))
    guess = rows.Schedule(block, int(held), channels, 1 << warps.bit_length() - 1)
    schedule = rows.tabled(op, x, of_group * space, guess)
    shape = {"OF_GROUP": of_group, "SPACE": space, "CHANNELS": schedule.rows, "BLOCK": schedule.block}
    return "_held" if schedule.chunks else "", {**shape, "warps": schedule.warps}


def _check(op: str, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    floats(op, x, x=x, weight=weight, bias=bias)
    expect(x.dim() >= 2, op, f"x is {list(x.shape)}, expected [batch, channels, ...]")
    fits = groups > 0 and x.shape[1] % groups == 0
    expect(fits, op, f"{x.shape[1]} channels in {groups} groups", "groups have as many channels each")
    for name, value in (("weight", weight), ("bias", bias)):
        shaped(op, name, value, (x.shape[1],), x)
