"""LayerNorm and RMSNorm, alone or after a residual add; backward gives dx, dw and db from one read of dy and x."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton import launch, reference, rows
from kernels_triton.checks import same_dtype, shaped
from kernels_triton.ops.sums import partials, summed

HELD = 16  # numbers of the weight that a thread of backward has registers for


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd); the statistics are float32, one a row."""
    _check("layer_norm", x, weight=weight, bias=bias)
    if not launch.on_triton(x):
        return reference.layer_norm(x, weight, bias, eps)
    y, _, mean, rstd = _forward("layer_norm", x, None, weight, bias, eps, centred=True)
    assert mean is not None
    return y, mean, rstd


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """(y, rstd)."""
    _check("rms_norm", x, weight=weight)
    if not launch.on_triton(x):
        return reference.rms_norm(x, weight, eps)
    y, _, _, rstd = _forward("rms_norm", x, None, weight, None, eps, centred=False)
    return y, rstd


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, x + residual, mean, rstd): y is the norm of the sum as rounded, which backward reads."""
    _check("add_layer_norm", x, residual=residual, weight=weight, bias=bias)
    if not launch.on_triton(x):
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    y, total, mean, rstd = _forward("add_layer_norm", x, residual, weight, bias, eps, centred=True)
    assert mean is not None
    return y, total, mean, rstd


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, x + residual, rstd)."""
    _check("add_rms_norm", x, residual=residual, weight=weight)
    if not launch.on_triton(x):
        return reference.add_rms_norm(x, residual, weight, eps)
    y, total, _, rstd = _forward("add_rms_norm", x, residual, weight, None, eps, centred=False)
    return y, total, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    residual_grad: Tensor | None = None,
    with_bias: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dx, dweight, dbias). After `add_layer_norm`, x is the sum and `residual_grad` the gradient that reaches it
    beside the norm; dx is then that of both addends."""
    _check("layer_norm_backward", x, dy=dy, weight=weight, mean=mean, rstd=rstd, residual_grad=residual_grad)
    if not launch.on_triton(x):
        return reference.layer_norm_backward(dy, x, weight, mean, rstd, residual_grad, with_bias)
    return _backward("layer_norm_backward", dy, x, weight, mean, rstd, residual_grad, with_bias)


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, residual_grad: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dx, dweight); as `layer_norm_backward`."""
    _check("rms_norm_backward", x, dy=dy, weight=weight, rstd=rstd, residual_grad=residual_grad)
    if not launch.on_triton(x):
        return reference.rms_norm_backward(dy, x, weight, rstd, residual_grad)
    return _backward("rms_norm_backward", dy, x, weight, None, rstd, residual_grad, False)[:2]


def _check(op: str, x: Tensor, **others: Tensor | None) -> None:
    """Weights and biases have a number a column, statistics one a row, everything else the shape of x."""
    shapes = {"weight": x.shape[-1:], "bias": x.shape[-1:], "mean": x.shape[:-1], "rstd": x.shape[:-1]}
    for name, value in others.items():
        shaped(op, name, value, shapes.get(name, x.shape), x)
    same_dtype(op, "residual", others.get("residual"), x)


def _forward(
    op: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    cols = x.shape[-1]
    flat = rows.as_rows(x)
    count = flat.shape[0]
    added = None if residual is None else rows.as_rows(residual)
    y = launch.empty(x.shape, x.dtype, x)
    total = x if added is None else launch.empty(x.shape, x.dtype, x)
    mean = launch.empty(x.shape[:-1], torch.float32, x) if centred else None
    rstd = launch.empty(x.shape[:-1], torch.float32, x)
    schedule = rows.forward_schedule(op, x, cols)
    args = (
        flat,
        added,
        None if added is None else total,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        mean,
        rstd,
        count,
        rows.row_stride(flat),
        rows.row_stride(added),
        eps,
    )
    if schedule.chunks:
        # For one row alone, two of them or a wide one cost other rows their registers.
        held = schedule.waves > 0 or (bias is None and schedule.chunks == 1)
        tile = {"COLS": cols, **schedule.persistent, "GROUP": schedule.group(x), "HOLD": held}
        launch.run("norm.norm_forward", (schedule.programs(count, x),), *args, **tile)
    else:
        launch.run("norm.norm_forward_looped", (count,), *args, COLS=cols, BLOCK=schedule.block, warps=schedule.warps)
    return y, total, mean, rstd


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
    cols = x.shape[-1]
    grad, flat = rows.as_rows(dy), rows.as_rows(x)
    beside = None if residual_grad is None else rows.as_rows(residual_grad)
    count = flat.shape[0]
    dx = launch.empty(x.shape, x.dtype, x)
    schedule = rows.backward_schedule(op, x, cols)
    programs = schedule.programs(count, x)
    dw = None if weight is None else partials(programs, cols, x)
    db = partials(programs, cols, x) if with_bias else None
    args = (
        grad,
        flat,
        None if weight is None else weight.contiguous(),
        None if mean is None else mean.contiguous(),
        rstd.contiguous(),
        beside,
        dx,
        dw,
        db,
        count,
        rows.row_stride(grad),
        rows.row_stride(flat),
        rows.row_stride(beside),
    )
    if schedule.chunks:
        held = schedule.block * schedule.chunks <= HELD * 32 * schedule.warps
        tile = {"COLS": cols, **schedule.persistent, "GROUP": schedule.group(x), "HOLD": held}
        launch.run("norm.norm_backward", (programs,), *args, **tile)
    else:
        tile = {"COLS": cols, "BLOCK": schedule.block, "ROWS": schedule.rows}
        launch.run("norm.norm_backward_looped", (programs,), *args, **tile, warps=schedule.warps)
    dtype = x.dtype if weight is None else weight.dtype
    dweight, dbias = summed(dw, db, dtype, x)
    return dx, dweight, dbias
