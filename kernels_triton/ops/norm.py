"""LayerNorm and RMSNorm, alone or after a residual add. Backward computes dx, dw and db from one read of dy and x."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.launch.partial_sums import partial_sum_buffer, sum_columns_into
from kernels_triton.library import reference
from kernels_triton.library.checks import (
    checked,
    expect_columns,
    expect_floats,
    expect_same_dtype,
    expect_shape,
    expect_statistics,
)

STATISTICS = ("mean", "rstd")
HELD_COLS = 4096  # up to this width forward always keeps weight and bias in registers
HELD = 16  # elements of the weight that a thread of backward keeps in registers


@checked
def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of rows: `y = (x - mean) * rstd * weight + bias`, `rstd = 1 / sqrt(variance + eps)`.

    Ba et al. 2016, "Layer normalization", section 3. x [..., columns]; weight and bias [columns] or None; y is of x's
    shape and dtype; the statistics mean and rstd are float32 [...], one a row, for backward. The variance is
    summed from differences to the mean, without cancellation: a row in registers takes two passes, corrected in float32
    by the sum of the differences (Chan, Golub & LeVeque 1983). The blocks of a longer row are merged by their formula
    of 1979.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    if not launch.runs_on_triton(x):
        return reference.layer_norm(x, weight, bias, eps)
    y, _, mean, rstd = _forward("layer_norm", x, None, weight, bias, eps, centred=True)
    assert mean is not None
    return y, mean, rstd


@checked
def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, rstd) of rows: `y = x * rstd * weight`, `rstd = 1 / sqrt(mean of squares + eps)`.

    Zhang & Sennrich 2019, "Root mean square layer normalization", equation 4. x [..., columns]; weight [columns] or
    None; y is of x's shape and dtype, rstd float32 [...], one a row, for backward.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("rms_norm", x, weight=weight)
    if not launch.runs_on_triton(x):
        return reference.rms_norm(x, weight, eps)
    y, _, _, rstd = _forward("rms_norm", x, None, weight, None, eps, centred=False)
    return y, rstd


@checked
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, sum, mean, rstd): `layer_norm`, by eps, of `sum = x + residual`, rounded to x's dtype; backward reads it.

    x and residual [..., columns], of one dtype; weight and bias [columns] or None; y and the sum are of x's shape and
    dtype, mean and rstd float32 [...], one a row.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("add_layer_norm", x, residual=residual, weight=weight, bias=bias)
    if not launch.runs_on_triton(x):
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    y, total, mean, rstd = _forward("add_layer_norm", x, residual, weight, bias, eps, centred=True)
    assert mean is not None
    return y, total, mean, rstd


@checked
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, sum, rstd): `rms_norm`, by eps, of `sum = x + residual`, rounded to x's dtype; backward reads it.

    x and residual [..., columns], of one dtype; weight [columns] or None; y and the sum are of x's shape and dtype,
    rstd float32 [...], one a row.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("add_rms_norm", x, residual=residual, weight=weight)
    if not launch.runs_on_triton(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    y, total, _, rstd = _forward("add_rms_norm", x, residual, weight, None, eps, centred=False)
    return y, total, rstd


@checked
def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias) of `layer_norm`, from dy and x [..., columns] and the forward's statistics.

    weight [columns] or None; mean and rstd, float32 [...], as forward returned them. With `xhat = (x - mean) * rstd`,
    `g = dy * weight` and means over a row, `dx = rstd * (g - mean(g) - xhat * mean(g * xhat))`, of x's shape and dtype.
    dweight [columns] and dbias [columns], of the weight's dtype, are sums over rows, None without a weight and with
    `with_bias=False`: each program adds its rows in float32, and the programs' sums are added in a fixed order.

    After `add_layer_norm`, x is the sum, and residual_grad [..., columns] is the gradient that reaches the sum past the
    norm, or None. dx is then the gradient of both addends.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("layer_norm_backward", x, dy=dy, weight=weight, mean=mean, rstd=rstd, residual_grad=residual_grad)
    if not launch.runs_on_triton(x):
        return reference.layer_norm_backward(dy, x, weight, mean, rstd, residual_grad, with_bias)
    return _backward("layer_norm_backward", dy, x, weight, mean, rstd, residual_grad, with_bias)


@checked
def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dweight) of `rms_norm`, from dy and x [..., columns] and the forward's statistics.

    weight [columns] or None; rstd, float32 [...], as forward returned it; residual_grad [..., columns] or None, as for
    `layer_norm_backward`. With `xhat = x * rstd` and `g = dy * weight`, `dx = rstd * (g - xhat * mean(g * xhat))`, of
    x's shape and dtype; dweight [columns], of the weight's dtype, is None without one.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    _check("rms_norm_backward", x, dy=dy, weight=weight, rstd=rstd, residual_grad=residual_grad)
    if not launch.runs_on_triton(x):
        return reference.rms_norm_backward(dy, x, weight, rstd, residual_grad)
    return _backward("rms_norm_backward", dy, x, weight, None, rstd, residual_grad, False)[:2]


def _check(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Weights and biases have one number a column, statistics one number a row; all others have the shape of x."""
    shapes = {"weight": x.shape[-1:], "bias": x.shape[-1:], "mean": x.shape[:-1], "rstd": x.shape[:-1]}
    expect_floats(op, x, x=x, **{name: value for name, value in others.items() if name not in STATISTICS})
    expect_statistics(
        op, x, **{name: value for name, value in others.items() if name in STATISTICS and value is not None}
    )
    expect_columns(op, x=x)
    for name, value in others.items():
        expect_shape(op, name, value, shapes.get(name, x.shape), x)
    expect_same_dtype(op, "residual", others.get("residual"), x)


def _forward(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    y = launch.empty(x.shape, x.dtype, x)
    total = None if residual is None else launch.empty(x.shape, x.dtype, x)
    mean = launch.empty(x.shape[:-1], torch.float32, x) if centred else None
    rstd = launch.empty(x.shape[:-1], torch.float32, x)
    forward_into(op, x, residual, weight, bias, eps, y, total, mean, rstd)
    return y, x if total is None else total, mean, rstd


def forward_into(
    op: str,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y: Tensor,
    total: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    before: Tensor | None = None,
) -> None:
    """The norm of `x + before + residual`, that sum (`total`) and the statistics, each written in its own dtype.
    Without `mean` this is an RMS norm."""
    cols = x.shape[-1]
    flat = row_schedule.as_rows(x)
    count = flat.shape[0]
    added = None if residual is None else row_schedule.as_rows(residual)
    schedule = row_schedule.forward_schedule(op, x, cols)
    columns = [None if column is None else column.contiguous() for column in (before, weight, bias)]
    args = (
        *(flat, columns[0], added, total, *columns[1:], y, mean, rstd, count),
        *(row_schedule.row_stride(flat), row_schedule.row_stride(added), eps),
    )
    if schedule.chunks:
        once, again = schedule.waves == 0, schedule.again and before is None and residual is None
        # With one wide row, registers for weight and bias would be missing elsewhere.
        is_held = not again and (not once or schedule.chunks == 1 or cols <= HELD_COLS)
        tile = {"COLS": cols, **schedule.persistent, "HOLD": is_held, "ONCE": once, "AGAIN": again}
        # Without a limit the compiler for sm_80 spills two registers, so that another program fits.
        wide = schedule.chunks > 1 or (before is not None and x.element_size() == 4)
        older = wide and launch.device_of(x).shared_bytes < row_schedule.SM90_SHARED
        registers = (1 << 16) // (32 * schedule.warps) if older else 0
        launch.run("norm.norm_forward", (schedule.programs(count, x),), *args, **tile, registers=min(255, registers))
    else:
        tile = {"COLS": cols, "BLOCK": schedule.block}
        launch.run("norm.norm_forward_looped", (count,), *args, **tile, warps=schedule.warps)


def _backward(
    op: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    with_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    cols, dtype = x.shape[-1], x.dtype if weight is None else weight.dtype
    dx = launch.empty(x.shape, x.dtype, x)
    dw = None if weight is None else launch.empty((cols,), dtype, x)
    db = launch.empty((cols,), dtype, x) if with_bias else None
    backward_into(op, dy, x, weight, mean, rstd, residual_grad, dx, dw, db)
    return dx, dw, db


def _schedule_for_operands(schedule: row_schedule.Schedule, x: Tensor, read: Sequence[Tensor]) -> row_schedule.Schedule:
    """The schedule with as many stages of these tensors in flight as shared memory allows."""
    if not schedule.chunks:
        return schedule
    width, height = schedule.block * schedule.chunks, max(1, schedule.rows // (2 if len(read) > 3 else 1))
    in_flight = max(1, schedule.waves) * width * height * sum(tensor.element_size() for tensor in read)
    stages = min(schedule.stages, (launch.device_of(x).shared_bytes - row_schedule.RESERVED) // in_flight)
    return replace(schedule, rows=height, stages=max(1, stages))


def backward_into(
    op: str,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    residual_grad: Tensor | None,
    dx: Tensor,
    dweight: Tensor | None,
    dbias: Tensor | None,
    dbefore: Tensor | None = None,
    more: Tensor | None = None,
) -> None:
    """The gradient of `forward_into` for `dy + more`, each part written in its own dtype. `dbefore` is the sum of `dx`
    over rows."""
    cols = x.shape[-1]
    grad, flat = row_schedule.as_rows(dy), row_schedule.as_rows(x)
    others = [None if tensor is None else row_schedule.as_rows(tensor) for tensor in (more, residual_grad)]
    count = flat.shape[0]
    schedule = row_schedule.backward_schedule(op, x, cols)
    read = [tensor for tensor in (grad, flat, *others) if tensor is not None]
    wider = sum(tensor.element_size() for tensor in read) > 3 * x.element_size()  # than the schedules assume
    if more is not None or dbefore is not None or wider:
        schedule = _schedule_for_operands(schedule, x, read)
    is_held = schedule.block * schedule.chunks <= HELD * 32 * schedule.warps
    if not is_held and weight is not None and weight.element_size() > x.element_size():
        # It would be loaded through shared memory with every row, and there is not enough.
        schedule = row_schedule.looped_schedule(x, cols)
    programs = schedule.programs(count, x)
    sums = tuple(
        None if tensor is None else partial_sum_buffer(programs, cols, x) for tensor in (dweight, dbias, dbefore)
    )
    args = (
        *(grad, others[0], flat, None if weight is None else weight.contiguous()),
        *(None if mean is None else mean.contiguous(), rstd.contiguous(), others[1], dx, *sums, count),
        *(
            row_schedule.row_stride(grad),
            row_schedule.row_stride(others[0]),
            row_schedule.row_stride(flat),
            row_schedule.row_stride(others[1]),
        ),
    )
    if schedule.chunks:
        tile = {"COLS": cols, **schedule.persistent, "GROUP": schedule.group(x), "HOLD": is_held}
        launch.run("norm.norm_backward", (programs,), *args, **tile)
    else:
        tile = {"COLS": cols, "BLOCK": schedule.block, "ROWS": schedule.rows}
        launch.run("norm.norm_backward_looped", (programs,), *args, **tile, warps=schedule.warps)
    sum_columns_into(sums, [dweight, dbias, dbefore])
