"""`residual + dropout(x + bias)`. Forward keeps the mask, one bit an element, and backward reads it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.random import least_word
from kernels_triton.launch import launch, row_schedule
from kernels_triton.launch.partial_sums import partial_sum_buffer, sum_columns
from kernels_triton.library import reference
from kernels_triton.library.checks import (
    checked,
    expect,
    expect_columns,
    expect_dtype,
    expect_floats,
    expect_probability,
    expect_same_dtype,
    expect_scalars,
    expect_shape,
    integer_in_range,
)
from kernels_triton.library.reference.dropout import scale_of, whole_strides


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
    [..., ceil(columns / 8)], one bit an element, with the first column in the lowest bit. p is the drop probability.

    The random numbers are those of `shardc::random_uniform(seed, op_id, x.shape, strides, offset)`, Philox4x32-10
    (Salmon et al. 2011). seed [] (int64, all 64 bits) is the key. op_id, 0 to 2**32 - 1, distinguishes calls with one
    seed. An element's number depends only on its index in the whole tensor, to which `strides` and offset [] (int64)
    map x; by default x is the whole tensor.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for a p that is not in 0 to 1, and for an op_id or
    strides out of range.
    """
    op = "bias_dropout_residual"
    expect_probability(op, p)
    integer_in_range(op, "op_id", op_id, 0, 1 << 32)
    expect_floats(op, x, x=x, bias=bias, residual=residual)
    expect_columns(op, x=x)
    expect_scalars(op, x, seed=seed, offset=offset)
    for name, value in (("seed", seed), ("offset", offset)):
        if value is not None:
            expect_dtype(op, name, value, torch.int64)
    expect_shape(op, "bias", bias, x.shape[-1:], x)
    expect_shape(op, "residual", residual, x.shape, x)
    expect_same_dtype(op, "residual", residual, x)
    element_strides = whole_strides(x) if strides is None else tuple(strides)
    element_strides = tuple(
        integer_in_range(op, f"strides[{dim}]", step, 0) for dim, step in enumerate(element_strides)
    )
    message = f"strides are {len(element_strides)} numbers, x is of {x.dim()} dims"
    expect(len(element_strides) == x.dim(), op, message, "pass the strides of the whole tensor, one a dim")
    reach = sum((size - 1) * step for size, step in zip(x.shape, element_strides, strict=True))
    expect(
        reach < 1 << 63,
        op,
        f"strides are {element_strides}: an element's place is more than 64 bits",
        "pass smaller ones",
    )
    leading = row_schedule.leading_dims(x.shape, element_strides, 2)
    if leading is None or not launch.runs_on_triton(x):
        return reference.bias_dropout_residual(x, bias, residual, p, seed, op_id, element_strides, offset)
    y = launch.empty(x.shape, x.dtype, x)
    keep = launch.empty((*x.shape[:-1], -(-x.shape[-1] // 8)), torch.uint8, x)
    (_, outer_step), (inner, inner_step) = leading
    flat = row_schedule.as_rows(x)
    added = None if residual is None else row_schedule.as_rows(residual)
    count, cols = flat.shape
    schedule = row_schedule.tile_schedule(op, x, cols)
    launch.run(
        "dropout.dropout_forward",
        (schedule.tiles(count, cols),),
        *(flat, None if bias is None else bias.contiguous(), added, y, keep, seed, offset, op_id, count),
        *(row_schedule.row_stride(flat), row_schedule.row_stride(added), least_word(p), scale_of(p)),
        *(outer_step, inner_step),
        COL_STRIDE=element_strides[-1],
        INNER=inner,
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        warps=schedule.warps,
        registers=schedule.registers,
    )
    return y, keep


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
    expect_probability(op, p)
    expect_floats(op, dy, dy=dy, bias=bias)
    expect_columns(op, dy=dy)
    expect_dtype(op, "keep", keep, torch.uint8)
    expect_shape(op, "keep", keep, (*dy.shape[:-1], -(-dy.shape[-1] // 8)), dy)
    expect_shape(op, "bias", bias, dy.shape[-1:], dy)
    if not launch.runs_on_triton(dy):
        return reference.bias_dropout_residual_backward(dy, keep, p, bias)
    grad = row_schedule.as_rows(dy)
    count, cols = grad.shape
    dx = launch.empty(dy.shape, dy.dtype, dy)
    schedule = row_schedule.column_walk_schedule(op, dy, cols, sums=bias is not None)
    blocks, programs = schedule.column_grid(count, cols, dy)
    db = None if bias is None else partial_sum_buffer(programs, cols, dy)
    launch.run(
        "dropout.dropout_backward",
        (blocks * programs,),
        *(grad, keep.contiguous(), dx, db, count, row_schedule.row_stride(grad), scale_of(p)),
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        STAGES=schedule.stages,
        warps=schedule.warps,
    )
    return dx, None if bias is None else sum_columns(db, None, bias.dtype, dy)[0]
