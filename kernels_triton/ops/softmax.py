"""Softmax over the last dim, with scale, mask and causal edge."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import checked, expect, floats, placed, rowed, shaped

KEPT = {"EXACT": False, "FILL": -math.inf, "HIDES": False}  # what a mask does not keep is not there
CUT = 1024  # columns, from which on causal rows are computed by blocks


@checked
def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(x * scale + mask) over the last dim of x [..., columns]: [..., columns], of x's dtype.

    mask [...] broadcasts against x: boolean, True where a column counts, or of floating point, and added; or None.
    `causal` keeps column c of query q of x [..., queries, columns] where `c <= q + columns - queries`. A row with
    nothing left is zeros. A row in registers is read once; of a longer one, maximum and sum are taken in one pass, the
    sum rescaled as the maximum grows (Milakov & Gimelshein 2018, "Online normalizer calculation for softmax").

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for `causal` of a single dim.
    """
    floats("softmax", x, x=x)
    rowed("softmax", x=x)
    _square("softmax", "x", x, causal)
    if mask is not None:
        _maskable(x, mask)
    if not launch.on_triton(x):
        return reference.softmax(x, scale, mask, causal)
    cols = x.shape[-1]
    queries = x.shape[-2] if x.dim() > 1 else 1
    flat = rows.as_rows(x)
    count = flat.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    heads, strides = 1, (0, 0, 0)
    if mask is not None:
        mask, heads, strides = _broadcast(mask, x)
    schedule = _schedule("softmax", x, cols, causal, mask is not None)
    args = (flat, mask, y, count, rows.row_stride(flat), scale, *strides)
    shape = {"COLS": cols, "QUERIES": queries, "HEADS": heads, "CAUSAL": causal, **KEPT}
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


def softmax_into(x: Tensor, mask: Tensor | None, y: Tensor, scale: float, fill: float, hides: bool) -> None:
    """Torch's softmax of rows [rows, cols], into y: NaN in a row of -inf alone. `mask` walks the rows in as many dims
    as it likes: added, or boolean, and `fill` is where it is True, if it `hides`, or where it is not."""
    count, cols = x.shape
    (_, batch), (heads, head), (queries, query) = (1, 0), (1, 0), (1, 0)
    if mask is not None:
        walked = rows.leading_three(mask.shape, mask.stride())
        assert walked is not None, "a mask of more dims than a kernel walks"
        (_, batch), (heads, head), (queries, query) = walked
        mask = mask.view(torch.int8) if mask.dtype == torch.bool else mask
    schedule = _schedule("softmax", x, cols, False, mask is not None)
    args = (x, mask, y, count, rows.row_stride(x), scale, batch, head, query)
    shape = {"COLS": cols, "QUERIES": queries, "HEADS": heads, "CAUSAL": False}
    shape |= {"EXACT": True, "FILL": fill, "HIDES": hides}
    if schedule.chunks:
        tile, programs = {**schedule.persistent, "ONCE": schedule.waves == 0}, schedule.programs(count, x)
        launch.run("softmax.softmax_forward", (programs,), *args, **shape, **tile)
    else:
        tile = {"BLOCK": schedule.block, "warps": schedule.warps}
        launch.run("softmax.softmax_forward_looped", (count,), *args, **shape, **tile)


@checked
def softmax_backward(dy: Tensor, y: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """dx of `softmax`, `scale * y * (dy - sum(dy * y))`, from dy and y [..., columns], its result: of y's shape, dtype.

    What dy holds past the edge of `causal` is not read.

    Raises SC530 as `softmax`.
    """
    floats("softmax_backward", y, y=y, dy=dy)
    rowed("softmax_backward", y=y)
    _square("softmax_backward", "y", y, causal)
    shaped("softmax_backward", "dy", dy, y.shape, y)
    if not launch.on_triton(y):
        return reference.softmax_backward(dy, y, scale, causal)
    queries = y.shape[-2] if y.dim() > 1 else 1
    dx = launch.empty(y.shape, y.dtype, y)
    softmax_backward_into(rows.as_rows(dy), rows.as_rows(y), dx, scale, queries, causal)
    return dx


def softmax_backward_into(
    grad: Tensor, flat: Tensor, dx: Tensor, scale: float, queries: int = 1, causal: bool = False
) -> None:
    """Of rows [rows, cols]; dx lies in order."""
    count, cols = flat.shape
    schedule = _schedule("softmax_backward", flat, cols, causal)
    args = (grad, flat, dx, count, rows.row_stride(grad), rows.row_stride(flat), scale)
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


def _schedule(op: str, x: Tensor, cols: int, causal: bool, masked: bool = False) -> rows.Schedule:
    """Long causal rows are cut in at least two blocks. With a mask fewer programs fit, which hide each other's waits:
    what was measured without one does not hold, and masked rows are 2 to 22 % faster as their size asks."""
    name = f"causal_{op}" if causal else f"masked_{op}" if masked else op
    schedule = rows.forward_schedule(name, x, cols)
    if not causal or cols < CUT or not schedule.chunks:
        return schedule
    block, chunks = rows.cut(cols, 16384, 4)
    if chunks == 1:
        block, chunks = block // 2, 2
    warps = 1 << (max(2, min(16, block * chunks // 1024)).bit_length() - 1)
    older = launch.device_of(x).shared_bytes < rows.NEWER
    if older and op.endswith("backward") and x.element_size() == 2 and chunks == 2 and block in (1024, 2048):
        warps *= 2  # of 16 numbers a thread and block sm_80's compiler puts a scalar aside, to fit one more program
    return rows.tabled(name, x, cols, rows.Schedule(block, chunks, 1, warps))


def _square(op: str, name: str, x: Tensor, causal: bool) -> None:
    if causal and x.dim() < 2:
        told = f"{name} is {list(x.shape)}, expected [..., queries, columns] with causal"
        expect(False, op, told, f"pass {name}.unsqueeze(0), or causal=False")


def _maskable(x: Tensor, mask: Tensor) -> None:
    placed("softmax", x, mask=mask)
    if mask.dtype != torch.bool:
        floats("softmax", x, mask=mask)
    sizes = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    fits = mask.dim() <= x.dim() and all(one in (1, size) for one, size in sizes)
    expect(fits, "softmax", f"mask is {list(mask.shape)}, x {list(x.shape)}", hint="a mask broadcasts against x")


def _broadcast(mask: Tensor, x: Tensor) -> tuple[Tensor, int, tuple[int, int, int]]:
    """The mask, how many heads share a batch index, and its strides over (batch, head, query). x is
    [*batch, heads, queries, columns]; all but the last of its leading dims must collapse into one batch stride."""
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
