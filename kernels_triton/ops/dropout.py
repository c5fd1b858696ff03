"""`residual + dropout(x + bias)`: forward keeps the mask, a bit an element, and backward reads it."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import cache

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import expect, same_dtype, shaped
from kernels_triton.ops.sums import partials, summed
from kernels_triton.reference.dropout import scale_of, whole_strides


def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    p: float,
    seed: Tensor,
    op_id: int,
    strides: Sequence[int] | None = None,
    offset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, keep): `keep` is uint8 [..., ceil(columns / 8)], the first column in the lowest bit.

    The random numbers are those of `shardc::random_uniform(seed, op_id, x.shape, strides, offset)`: `strides` and
    `offset` (0-dim int64) place x in the whole tensor; by default x is whole.
    """
    op = "bias_dropout_residual"
    expect(0.0 <= p <= 1.0, op, f"p is {p}, expected 0 to 1")
    shaped(op, "bias", bias, x.shape[-1:], x)
    shaped(op, "residual", residual, x.shape, x)
    same_dtype(op, "residual", residual, x)
    steps = whole_strides(x) if strides is None else tuple(strides)
    expect(len(steps) == x.dim(), op, f"{len(steps)} strides for a tensor of {x.dim()} dims")
    placed = _outer(x.shape, steps)
    if placed is None or not launch.on_triton(x):
        return reference.bias_dropout_residual(x, bias, residual, p, seed, op_id, steps, offset)
    inner, outer_step, inner_step = placed
    flat = rows.as_rows(x)
    added = None if residual is None else rows.as_rows(residual)
    count, cols = flat.shape
    y = launch.empty(x.shape, x.dtype, x)
    keep = launch.empty((*x.shape[:-1], -(-cols // 8)), torch.uint8, x)
    if offset is None:
        offset = torch.zeros((), dtype=torch.int64, device=x.device)
    schedule = rows.tile_schedule(op, x, cols)
    launch.run(
        "dropout.dropout_forward",
        (schedule.tiles(count, cols),),
        *(flat, None if bias is None else bias.contiguous(), added, y, keep, seed, offset, op_id, count),
        *(rows.row_stride(flat), rows.row_stride(added), least_kept(p), scale_of(p)),
        *(outer_step, inner_step, steps[-1]),
        INNER=inner,
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        warps=schedule.warps,
    )
    return y, keep


def bias_dropout_residual_backward(
    dy: Tensor, keep: Tensor, p: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias); the residual's gradient is dy. `bias` is read for its dtype alone."""
    op = "bias_dropout_residual_backward"
    shaped(op, "keep", keep, (*dy.shape[:-1], -(-dy.shape[-1] // 8)), dy)
    if not launch.on_triton(dy):
        return reference.bias_dropout_residual_backward(dy, keep, p, bias)
    grad = rows.as_rows(dy)
    count, cols = grad.shape
    dx = launch.empty(dy.shape, dy.dtype, dy)
    schedule = rows.walking_schedule(op, dy, cols, sums=bias is not None)
    blocks, programs = schedule.walk(count, cols, dy)
    db = None if bias is None else partials(programs, cols, dy)
    launch.run(
        "dropout.dropout_backward",
        (blocks * programs,),
        *(grad, keep.contiguous(), dx, db, count, rows.row_stride(grad), scale_of(p)),
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        STAGES=schedule.stages,
        warps=schedule.warps,
    )
    return dx, None if bias is None else summed(db, None, bias.dtype, dy)[0]


@cache
def least_kept(p: float) -> int:
    """The smallest 31-bit word that `random_uniform` makes a number of at least p of, in float32; 2^31 if none is."""

    def single(x: float) -> float:
        return c_float(x).value

    low, high = 0, 1 << 31
    while low < high:
        middle = (low + high) // 2
        if single(single(float(middle)) * single(4.6566127342e-10)) >= single(p):
            high = middle
        else:
            low = middle + 1
    return low


def _outer(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int, int] | None:
    """All dims but the last as two: (size of the inner, the outer's stride, the inner's). None if they are more."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    (_, outer), (size, inner) = [(1, 0)] * (2 - len(merged)) + merged
    return size, outer, inner
