"""`residual + dropout(x + bias)`: forward keeps the mask, a bit an element, and backward reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import checked, expect, floats, probability, rowed, same_dtype, scalars, shaped, typed, whole
from kernels_triton.ops.sums import partials, summed
from kernels_triton.reference.dropout import scale_of, whole_strides
from shardc.ir.ops.random import least_word


@checked
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
    """(y, keep): `y = residual + (x + bias) * kept / (1 - p)`, [..., columns] of x's dtype, and the mask for backward.

    x [..., columns]; bias [columns] or None; residual [..., columns], of x's dtype, or None. keep is uint8
    [..., ceil(columns / 8)], a bit an element, the first column in the lowest. p is the part that is dropped.

    The random numbers are those of `shardc::random_uniform(seed, op_id, x.shape, strides, offset)`, Philox4x32-10
    (Salmon et al. 2011): seed [] (int64, of which each of the 64 bits counts) is the key, op_id, 0 to 2**32 - 1, tells
    calls of one seed apart, and an element's number depends on nothing but its place in the whole tensor, to which
    `strides` and offset [] (int64) map x; by default x is whole.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for a p that is not in 0 to 1, and for an op_id or
    strides out of range.
    """
    op = "bias_dropout_residual"
    probability(op, p)
    whole(op, "op_id", op_id, 0, 1 << 32)
    floats(op, x, x=x, bias=bias, residual=residual)
    rowed(op, x=x)
    scalars(op, x, seed=seed, offset=offset)
    for name, value in (("seed", seed), ("offset", offset)):
        if value is not None:
            typed(op, name, value, torch.int64)
    shaped(op, "bias", bias, x.shape[-1:], x)
    shaped(op, "residual", residual, x.shape, x)
    same_dtype(op, "residual", residual, x)
    steps = whole_strides(x) if strides is None else tuple(strides)
    steps = tuple(whole(op, f"strides[{at}]", step, 0) for at, step in enumerate(steps))
    told = f"strides are {len(steps)} numbers, x is of {x.dim()} dims"
    expect(len(steps) == x.dim(), op, told, "pass the strides of the whole tensor, one a dim")
    reach = sum((size - 1) * step for size, step in zip(x.shape, steps, strict=True))
    expect(reach < 1 << 63, op, f"strides are {steps}: an element's place is more than 64 bits", "pass smaller ones")
    placed = rows.leading(x.shape, steps)
    if placed is None or not launch.on_triton(x):
        return reference.bias_dropout_residual(x, bias, residual, p, seed, op_id, steps, offset)
    y = launch.empty(x.shape, x.dtype, x)
    keep = launch.empty((*x.shape[:-1], -(-x.shape[-1] // 8)), torch.uint8, x)
    words = (seed, op_id, offset, (*placed, steps[-1]))
    forward_into(x, bias, residual, *words, p, scale_of(p), y, keep)
    return y, keep


def forward_into(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    op_id: int,
    offset: Tensor | None,
    placed: tuple[int, int, int, int],
    p: float,
    scale: float,
    y: Tensor,
    keep: Tensor | None,
) -> None:
    """`placed`: the size of the inner of x's two leading dims, the whole tensor's strides along them and columns."""
    op, (inner, outer_step, inner_step, step) = "bias_dropout_residual", placed
    flat = rows.as_rows(x)
    added = None if residual is None else rows.as_rows(residual)
    count, cols = flat.shape
    schedule = rows.tile_schedule(op, x, cols)
    launch.run(
        "dropout.dropout_forward",
        (schedule.tiles(count, cols),),
        *(flat, None if bias is None else bias.contiguous(), added, y, keep, seed, offset, op_id, count),
        *(rows.row_stride(flat), rows.row_stride(added), least_word(p), scale, outer_step, inner_step),
        COL_STRIDE=step,
        INNER=inner,
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        warps=schedule.warps,
        registers=schedule.registers,
    )


@checked
def bias_dropout_residual_backward(
    dy: Tensor, keep: Tensor, p: float, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias) of `bias_dropout_residual`, from dy [..., columns]; the residual's gradient is dy itself.

    keep, uint8 [..., ceil(columns / 8)], and p are the forward's. dx [..., columns], of dy's dtype, is `dy / (1 - p)`
    where an element was kept and 0 elsewhere; dbias [columns] is its sum over rows, None without a bias. bias [columns]
    is read for its dtype alone.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for a p that is not in 0 to 1.
    """
    op = "bias_dropout_residual_backward"
    probability(op, p)
    floats(op, dy, dy=dy, bias=bias)
    rowed(op, dy=dy)
    typed(op, "keep", keep, torch.uint8)
    shaped(op, "keep", keep, (*dy.shape[:-1], -(-dy.shape[-1] // 8)), dy)
    shaped(op, "bias", bias, dy.shape[-1:], dy)
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
