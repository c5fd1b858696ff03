"""Softmax over the last dim, with scale, mask and causal edge."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.library import reference
from kernels_triton.library.checks import checked, expect, expect_columns, expect_device, expect_floats, expect_shape

CAUSAL_BLOCKS_FROM = 1024  # the fewest columns for which causal rows are computed by blocks


@checked
def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(x * scale + mask) over the last dim of x [..., columns]: [..., columns], of x's dtype.

    mask [...] broadcasts against x: boolean, True where a column counts, or of floating point, and added; or None.
    `causal` keeps column c of query q of x [..., queries, columns] where `c <= q + columns - queries`. A
    fully masked row is zeros. A row in registers is read once. For a longer row, maximum and sum are computed in one
    pass; the sum is rescaled as the maximum grows (Milakov & Gimelshein 2018, "Online normalizer
    calculation for softmax").

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for `causal` of a single dim.
    """
    expect_floats("softmax", x, x=x)
    expect_columns("softmax", x=x)
    _expect_queries("softmax", "x", x, causal)
    if mask is not None:
        _expect_mask(x, mask)
    if not launch.runs_on_triton(x):
        return reference.softmax(x, scale, mask, causal)
    cols = x.shape[-1]
    queries = x.shape[-2] if x.dim() > 1 else 1
    flat = row_schedule.as_rows(x)
    count = flat.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    heads, strides = 1, (0, 0, 0)
    if mask is not None:
        mask, heads, strides = _broadcast(mask, x)
    schedule = _schedule("softmax", x, cols, causal, mask is not None)
    args = (flat, mask, y, count, row_schedule.row_stride(flat), scale, *strides)
    shape = {"COLS": cols, "QUERIES": queries, "HEADS": heads, "CAUSAL": causal}
    if causal and schedule.chunks > 1:
        tile = {"CHUNKS": schedule.chunks, "BLOCK": schedule.block, "warps": schedule.warps}
        args, shape = (flat, mask, y, *args[4:]), {"COLS": cols, "QUERIES": queries, "HEADS": heads}
        launch.run("softmax.causal_forward", (count,), *args, **shape, **tile)
    elif schedule.chunks:
        tile, programs = {**schedule.persistent, "ONCE": schedule.waves == 0}, schedule.programs(count, x)
        launch.run("softmax.softmax_forward", (programs,), *args, **shape, **tile)
    else:
        tile = {"BLOCK": schedule.block, "warps": schedule.warps}
        launch.run("softmax.softmax_forward_looped", (count,), *args, **shape, **tile)
    return y


@checked
def softmax_backward(dy: Tensor, y: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """dx of `softmax`, `scale * y * (dy - sum(dy * y))`, from dy and y [..., columns], its result: of y's shape, dtype.

    What dy holds past the edge of `causal` is not read.

    Raises SC530 as `softmax`.
    """
    expect_floats("softmax_backward", y, y=y, dy=dy)
    expect_columns("softmax_backward", y=y)
    _expect_queries("softmax_backward", "y", y, causal)
    expect_shape("softmax_backward", "dy", dy, y.shape, y)
    if not launch.runs_on_triton(y):
        return reference.softmax_backward(dy, y, scale, causal)
    queries = y.shape[-2] if y.dim() > 1 else 1
    dx = launch.empty(y.shape, y.dtype, y)
    grad, flat = row_schedule.as_rows(dy), row_schedule.as_rows(y)
    count, cols = flat.shape
    schedule = _schedule("softmax_backward", flat, cols, causal)
    args = (grad, flat, dx, count, row_schedule.row_stride(grad), row_schedule.row_stride(flat), scale)
    shape = {"COLS": cols, "QUERIES": queries, "CAUSAL": causal}
    if causal and schedule.chunks > 1:
        tile = {"CHUNKS": schedule.chunks, "BLOCK": schedule.block, "warps": schedule.warps}
        args = (grad, flat, dx, *args[4:])
        launch.run("softmax.causal_backward", (count,), *args, COLS=cols, QUERIES=queries, **tile)
    elif schedule.chunks:
        tile = {**schedule.persistent, "ONCE": schedule.waves == 0, "AGAIN": schedule.again and not causal}
        launch.run("softmax.softmax_backward", (schedule.programs(count, flat),), *args, **shape, **tile)
    else:
        tile = {"BLOCK": schedule.block, "warps": schedule.warps}
        launch.run("softmax.softmax_backward_looped", (count,), *args, **shape, **tile)
    return dx


def _schedule(op: str, x: Tensor, cols: int, causal: bool, masked: bool = False) -> row_schedule.Schedule:
    """Long causal rows are cut into at least two blocks. With a mask occupancy is lower, and latency is hidden less.
    Schedules measured without a mask do not hold then: with schedules from sizes, masked rows are 2 to 22 % faster."""
    name = f"causal_{op}" if causal else f"masked_{op}" if masked else op
    schedule = row_schedule.forward_schedule(name, x, cols)
    if not causal or cols < CAUSAL_BLOCKS_FROM or not schedule.chunks:
        return schedule
    block, chunks = row_schedule.column_chunks(cols, 16384, 4)
    if chunks == 1:
        block, chunks = block // 2, 2
    warps = 1 << (max(2, min(16, block * chunks // 1024)).bit_length() - 1)
    older = launch.device_of(x).shared_bytes < row_schedule.SM90_SHARED
    if older and op.endswith("backward") and x.element_size() == 2 and chunks == 2 and block in (1024, 2048):
        warps *= 2  # with 16 numbers a thread and block, sm_80's compiler spills a scalar to fit one more program
    return row_schedule.table_schedule(name, x, cols, row_schedule.Schedule(block, chunks, 1, warps))


def _expect_queries(op: str, name: str, x: Tensor, causal: bool) -> None:
    if causal and x.dim() < 2:
        message = f"{name} is {list(x.shape)}, expected [..., queries, columns] with causal"
        expect(False, op, message, f"pass {name}.unsqueeze(0), or causal=False")


def _expect_mask(x: Tensor, mask: Tensor) -> None:
    expect_device("softmax", x, mask=mask)
    if mask.dtype != torch.bool:
        expect_floats("softmax", x, mask=mask)
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    fits = mask.dim() <= x.dim() and all(mask_size in (1, size) for mask_size, size in sizes)
    expect(fits, "softmax", f"mask is {list(mask.shape)}, x {list(x.shape)}", hint="a mask broadcasts against x")


def _broadcast(mask: Tensor, x: Tensor) -> tuple[Tensor, int, tuple[int, int, int]]:
    """The mask, the number of heads for each batch index, and the mask's strides over (batch, head, query). x is
    [*batch, heads, queries, columns]; all leading dims but the last must merge into one batch stride."""
    if mask.dtype == torch.bool:
        mask = mask.view(torch.int8)
    if mask.shape[-1:] != x.shape[-1:] or (mask.shape[-1] > 1 and mask.stride(-1) != 1):
        mask = mask.expand(*mask.shape[:-1], x.shape[-1]).contiguous()
    full = mask.expand(x.shape)
    if x.dim() > 4:
        try:
            full = full.view(-1, *x.shape[-3:])
        except RuntimeError:
            full = full.contiguous().view(-1, *x.shape[-3:])
    batch, head, query = (0, 0, 0, *full.stride()[:-1])[-3:]
    return full, x.shape[-3] if x.dim() > 2 else 1, (batch, head, query)
