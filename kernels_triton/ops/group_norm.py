"""GroupNorm of [batch, channels, ...]."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.launch.partial_sums import partial_sum_buffer, sum_columns
from kernels_triton.library import reference
from kernels_triton.library.checks import checked, expect, expect_floats, expect_shape, expect_statistics

TILE = {"group_norm": 8192, "group_norm_backward": 4096}  # elements
WARPS = 16  # the most warps a program; with many small programs, groups would not stay in the L2 cache
HELD = 64  # the most bytes of x that a thread keeps
PART = {
    "group_norm": 32 << 10,
    "group_norm_backward": 16 << 10,
}  # the most bytes of x in a program's part of a longer group
FEWEST = 4  # the fewest programs for such a group
KEEPS = launch.triton_version() >= (3, 7)  # the compiler keeps converted values in registers beside the loaded ones
A_THREAD = {"group_norm": 64 if KEEPS else 128, "group_norm_backward": 64}  # bytes of a part
PARTS = 32  # the most parts of a group: programs that wait for each other must be resident together
ALIGNED = 8  # a channel's bytes must be a multiple of this to stay in registers; single numbers would take more
REGISTERS = 80 if KEEPS else 64  # registers a thread, for occupancy: some programs load while others wait


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
    if not launch.runs_on_triton(x):
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
    expect_floats(op, x, dy=dy)
    expect_statistics(op, x, mean=mean, rstd=rstd)
    expect_shape(op, "dy", dy, x.shape, x)
    expect_shape(op, "mean", mean, (x.shape[0], groups), x)
    expect_shape(op, "rstd", rstd, (x.shape[0], groups), x)
    if not launch.runs_on_triton(x):
        return reference.group_norm_backward(dy, x, groups, weight, mean, rstd, with_bias)
    batch, channels = x.shape[:2]
    dx = launch.empty(x.shape, x.dtype, x)
    dw, db = partial_sum_buffer(batch, channels, x), partial_sum_buffer(batch, channels, x)
    operands = (t.contiguous() for t in (dy, x))
    columns = (None if weight is None else weight.contiguous(), mean.contiguous(), rstd.contiguous())
    _run(op, _schedule(op, x, groups), x, groups, (*operands, *columns, dx, dw, db))
    dtype = x.dtype if weight is None else weight.dtype
    return dx, *sum_columns(dw if weight is not None else None, db if with_bias else None, dtype, x)


def _run(
    kernel: str,
    schedule: row_schedule.Schedule,
    x: Tensor,
    groups: int,
    tensors: tuple[Tensor | None, ...],
    *numbers: float,
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
    # Interpreted programs run one after the other, so none can wait for a later one.
    for step in (1, 2) if parts > 1 and launch.is_interpreting() else (0,):
        args = (*tensors, shared, signal, *numbers, groups)
        launch.run(f"group_norm.{kernel}_held", (programs * parts,), *args, PARTS=parts, STEP=step, **tile, **size)


def _schedule(op: str, x: Tensor, groups: int) -> row_schedule.Schedule:
    """`chunks` programs share a group and keep their parts in registers; 0: one program reads the group twice. A tile
    is `rows` channels of `block` positions."""
    of_group, space = x.shape[1] // groups, math.prod(x.shape[2:])
    high, wide, size = row_schedule.power_of_two(of_group), row_schedule.power_of_two(space), x.element_size()
    across = 512 // size  # elements of a warp's loads of 16 bytes a thread; or the length of shorter channels
    parts = 0 if space * size % ALIGNED else _programs_per_group(op, of_group, wide * size, launch.device_of(x).sms)
    if parts:
        part_bytes = row_schedule.power_of_two(-(-of_group // parts)) * wide * size
        warps = max(1, min(WARPS, part_bytes // (32 * A_THREAD[op])))
        channels = max(1, min(part_bytes // (wide * size), warps * across // min(wide, across)))
        block, registers = min(wide, warps * across // channels), _registers(parts, of_group)
        guess = row_schedule.Schedule(block, parts, channels, warps, registers=registers)
    else:
        is_held = high * wide * size <= HELD * 32 * WARPS
        tile = TILE[op] // (
            2 if op.endswith("backward") and size > 2 else 1
        )  # with float32, dy and x fill the registers
        channels = max(1, min(high, tile // min(wide, across)))
        # With 16 bits, backward has two tiles in flight. The compiler for sm_80 then spills a scalar, but not with
        # larger tiles.
        older = launch.device_of(x).shared_bytes < row_schedule.SM90_SHARED and op.endswith("backward") and size == 2
        block = min(wide, max(across, ((4096 if older else 2048) if is_held else tile) // channels))
        warps = max(1, min(WARPS, channels * block // 256, high * wide // 1024 if is_held else WARPS))
        guess = row_schedule.Schedule(block, int(is_held), channels, 1 << warps.bit_length() - 1)
    return row_schedule.table_schedule(op, x, of_group * space, guess)


def _registers(parts: int, of_group: int) -> int:
    """The registers of a thread. With few parts each is long; channels that are no multiple of 8 take some more to
    count."""
    return 128 if parts < 3 else max(REGISTERS, 80 if of_group % 8 else 0)


def _programs_per_group(op: str, of_group: int, channel: int, sms: int) -> int:
    """The number of programs that share a group whose channels have `channel` bytes. 0 if the group fits one program,
    if no part of it fits, or if there would be too many."""
    if row_schedule.power_of_two(of_group) * channel <= HELD * 32 * WARPS or channel > 2 * PART[op]:
        return 0
    parts = -(-of_group // max(1, min(PART[op] // channel, -(-of_group // FEWEST))))
    return parts if parts <= min(PARTS, sms) else 0


def _check(op: str, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None) -> None:
    expect_floats(op, x, x=x, weight=weight, bias=bias)
    expect(x.dim() >= 2, op, f"x is {list(x.shape)}, expected [batch, channels, ...]")
    fits = groups > 0 and x.shape[1] % groups == 0
    message = f"x is {list(x.shape)}: {x.shape[1]} channels in {groups} groups"
    expect(fits, op, message, "groups have as many channels each")
    for name, value in (("weight", weight), ("bias", bias)):
        expect_shape(op, name, value, (x.shape[1],), x)
