"""GroupNorm of [batch, channels, ...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import checked, expect, floats, shaped, statistics
from kernels_triton.ops.sums import partials, summed

TILE = {"group_norm": 8192, "group_norm_backward": 4096}  # elements
WARPS = 16  # a program, at most: with many small programs their groups would not stay in the L2 cache
HELD = 64  # bytes of x that a thread keeps at most
PART = {"group_norm": 32 << 10, "group_norm_backward": 16 << 10}  # bytes of x a program has of a longer group, at most
FEWEST = 4  # programs of such a group
KEEPS = launch.triton_version() >= (3, 7)  # what a thread converted stays in registers, beside what it loaded
A_THREAD = {"group_norm": 64 if KEEPS else 128, "group_norm_backward": 64}  # bytes of a part
PARTS = 32  # of a group at most: programs that wait for each other have to be on the GPU together
ALIGNED = 8  # bytes that a channel is a multiple of, to stay in registers so: single numbers would take more
REGISTERS = 80 if KEEPS else 64  # a thread: as many programs as fit then load while others wait


@checked
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of x [batch, channels, ...], weight and bias [channels] or None (Wu & He 2018, equations 1 to 7).

    Statistics are of `channels / groups` neighbouring channels at all positions of a sample: mean and rstd, float32
    [batch, groups], `rstd = 1 / sqrt(variance + eps)`; `y = (x - mean) * rstd * weight + bias` is of x's shape and
    dtype. The variance is summed from distances to the mean; parts of a group are put together by Chan, Golub &
    LeVeque's formula (1979), which does not cancel.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for fewer than two dims, and for groups that do not
    divide the channels.
    """
    _check("group_norm", x, groups, weight, bias)
    if not launch.on_triton(x):
        return reference.group_norm(x, groups, weight, bias, eps)
    flat = x.contiguous()
    batch = x.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    mean, rstd = (launch.empty((batch, groups), torch.float32, x) for _ in range(2))
    columns = (None if t is None else t.contiguous() for t in (weight, bias))
    _run("group_norm_forward", _schedule("group_norm", x, groups), x, groups, (flat, *columns, y, mean, rstd), eps)
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
    """(dx, dweight, dbias) of `group_norm`, from dy and x [batch, channels, ...] and the forward's statistics.

    weight [channels] or None; mean and rstd, float32 [batch, groups], as forward returned them. With
    `xhat = (x - mean) * rstd`, `g = dy * weight` and means over a group, `dx = rstd * (g - mean(g) - xhat *
    mean(g * xhat))`, of x's shape and dtype. dweight [channels] and dbias [channels], of the weight's dtype, are None
    without a weight, and with `with_bias=False`.

    Raises SC530 as `group_norm`.
    """
    op = "group_norm_backward"
    _check(op, x, groups, weight, None)
    floats(op, x, dy=dy)
    statistics(op, x, mean=mean, rstd=rstd)
    shaped(op, "dy", dy, x.shape, x)
    shaped(op, "mean", mean, (x.shape[0], groups), x)
    shaped(op, "rstd", rstd, (x.shape[0], groups), x)
    if not launch.on_triton(x):
        return reference.group_norm_backward(dy, x, groups, weight, mean, rstd, with_bias)
    batch, channels = x.shape[:2]
    dx = launch.empty(x.shape, x.dtype, x)
    dw, db = partials(batch, channels, x), partials(batch, channels, x)
    operands = (t.contiguous() for t in (dy, x))
    columns = (None if weight is None else weight.contiguous(), mean.contiguous(), rstd.contiguous())
    _run(op, _schedule(op, x, groups), x, groups, (*operands, *columns, dx, dw, db))
    dtype = x.dtype if weight is None else weight.dtype
    return dx, *summed(dw if weight is not None else None, db if with_bias else None, dtype, x)


def _run(
    kernel: str, schedule: rows.Schedule, x: Tensor, groups: int, tensors: tuple[Tensor | None, ...], *numbers: float
) -> None:
    of_group, programs = x.shape[1] // groups, x.shape[0] * groups
    parts = schedule.chunks and -(-of_group // -(-of_group // schedule.chunks))  # each has channels
    tile = {"OF_GROUP": of_group, "SPACE": math.prod(x.shape[2:]), "CHANNELS": schedule.rows, "BLOCK": schedule.block}
    size = {"warps": schedule.warps, "registers": schedule.registers}
    if not parts:
        launch.run(f"group_norm.{kernel}", (programs,), *tensors, *numbers, groups, **tile, **size)
        return
    shared = signal = None
    if parts > 1:
        shared = launch.empty((programs, parts, 3), torch.float32, x)
        signal = torch.zeros(programs, dtype=torch.int32, device=x.device)
    # Interpreted programs run one after the other: none can wait for the next.
    for step in (1, 2) if parts > 1 and launch.interpreting() else (0,):
        args = (*tensors, shared, signal, *numbers, groups)
        launch.run(f"group_norm.{kernel}_held", (programs * parts,), *args, PARTS=parts, STEP=step, **tile, **size)


def _schedule(op: str, x: Tensor, groups: int) -> rows.Schedule:
    """`chunks` programs have a group, each as much of it in registers; 0: one has, and reads it twice. A tile is `rows`
    channels of `block` positions."""
    of_group, space = x.shape[1] // groups, math.prod(x.shape[2:])
    high, wide, size = rows.power_of_two(of_group), rows.power_of_two(space), x.element_size()
    across = 512 // size  # a warp's 16 bytes a thread; of channels as short as that, their length
    parts = 0 if space * size % ALIGNED else _parts(op, of_group, wide * size, launch.device_of(x).sms)
    if parts:
        held = rows.power_of_two(-(-of_group // parts)) * wide * size
        warps = max(1, min(WARPS, held // (32 * A_THREAD[op])))
        channels = max(1, min(held // (wide * size), warps * across // min(wide, across)))
        block, registers = min(wide, warps * across // channels), _registers(parts, of_group)
        guess = rows.Schedule(block, parts, channels, warps, registers=registers)
    else:
        held = high * wide * size <= HELD * 32 * WARPS
        tile = TILE[op] // (2 if op.endswith("backward") and size > 2 else 1)  # of float32 both fill registers
        channels = max(1, min(high, tile // min(wide, across)))
        # Of 16 bits two tiles of backward's are in flight; for sm_80 the compiler then puts a scalar aside, not of
        # larger ones.
        older = launch.device_of(x).shared_bytes < rows.NEWER and op.endswith("backward") and size == 2
        block = min(wide, max(across, ((4096 if older else 2048) if held else tile) // channels))
        warps = max(1, min(WARPS, channels * block // 256, high * wide // 1024 if held else WARPS))
        guess = rows.Schedule(block, int(held), channels, 1 << warps.bit_length() - 1)
    return rows.tabled(op, x, of_group * space, guess)


def _registers(parts: int, of_group: int) -> int:
    """A thread's: of few parts each is long, and channels that are no multiple of 8 take some more to count."""
    return 128 if parts < 3 else max(REGISTERS, 80 if of_group % 8 else 0)


def _parts(op: str, of_group: int, channel: int, sms: int) -> int:
    """How many programs share a group whose channels have so many bytes. 0: it fits one, or no part of it does, or they
    would be too many."""
    if rows.power_of_two(of_group) * channel <= HELD * 32 * WARPS or channel > 2 * PART[op]:
        return 0
    parts = -(-of_group // max(1, min(PART[op] // channel, -(-of_group // FEWEST))))
    return parts if parts <= min(PARTS, sms) else 0


def _check(op: str, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    floats(op, x, x=x, weight=weight, bias=bias)
    expect(x.dim() >= 2, op, f"x is {list(x.shape)}, expected [batch, channels, ...]")
    fits = groups > 0 and x.shape[1] % groups == 0
    told = f"x is {list(x.shape)}: {x.shape[1]} channels in {groups} groups"
    expect(fits, op, told, "groups have as many channels each")
    for name, value in (("weight", weight), ("bias", bias)):
        shaped(op, name, value, (x.shape[1],), x)
