"""Softmax over the last dim, with scale, mask and causal edge."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import expect, shaped


def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """`mask` broadcasts against x: boolean, True where a column counts, or added. `causal` keeps column c of query q
    where c <= q + columns - queries. A row with nothing left is zeros."""
    expect(not causal or x.dim() > 1, "softmax", "causal needs [..., queries, columns]")
    if not launch.on_triton(x):
        return reference.softmax(x, scale, mask, causal)
    cols = x.shape[-1]
    queries = x.shape[-2] if x.dim() > 1 else 1
    flat = rows.as_rows(x)
    count = flat.shape[0]
    y = launch.empty(x.shape, x.dtype, x)
    heads, strides = 1, (0, 0, 0)
    if mask is not None:
        expect(mask.device == x.device, "softmax", f"mask is on {mask.device}, x on {x.device}")
        mask, heads, strides = _broadcast(mask, x)
    schedule = rows.forward_schedule("causal_softmax" if causal else "softmax", x, cols)
    args = (flat, mask, y, count, rows.row_stride(flat), scale, *strides)
    shape = {"COLS": cols, "QUERIES": queries, "HEADS": heads, "CAUSAL": causal}
    if schedule.chunks:
        launch.run("softmax.softmax_forward", (schedule.programs(count, x),), *args, **shape, **schedule.persistent)
    else:
        tile = {"BLOCK": schedule.block, "warps": schedule.warps}
        launch.run("softmax.softmax_forward_looped", (count,), *args, **shape, **tile)
    return y


def softmax_backward(dy: Tensor, y: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """dx; `dy` past the causal edge is not read."""
    shaped("softmax_backward", "dy", dy, y.shape, y)
    if not launch.on_triton(y):
        return reference.softmax_backward(dy, y, scale, causal)
    cols = y.shape[-1]
    queries = y.shape[-2] if y.dim() > 1 else 1
    grad, flat = rows.as_rows(dy), rows.as_rows(y)
    count = flat.shape[0]
    dx = launch.empty(y.shape, y.dtype, y)
    schedule = rows.forward_schedule("causal_softmax_backward" if causal else "softmax_backward", y, cols)
    args = (grad, flat, dx, count, rows.row_stride(grad), rows.row_stride(flat), scale)
    shape = {"COLS": cols, "QUERIES": queries, "CAUSAL": causal}
    if schedule.chunks:
        launch.run("softmax.softmax_backward", (schedule.programs(count, y),), *args, **shape, **schedule.persistent)
    else:
        tile = {"BLOCK": schedule.block, "warps": schedule.warps}
        launch.run("softmax.softmax_backward_looped", (count,), *args, **shape, **tile)
    return dx


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
