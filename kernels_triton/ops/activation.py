"""Bias + GeLU, gated activations (SwiGLU, GeGLU) and squared ReLU; backward recomputes what it needs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from kernels_triton.launch import launch, row_schedule
from kernels_triton.launch.partial_sums import partial_sum_buffer, sum_columns_into
from kernels_triton.library import reference
from kernels_triton.library.checks import (
    checked,
    expect,
    expect_columns,
    expect_floats,
    expect_same_dtype,
    expect_shape,
)
from kernels_triton.library.reference.activation import ACTIVATIONS


@checked
def bias_gelu(x: Tensor, bias: Tensor | None, act: str = "gelu_tanh") -> Tensor:
    """act(x + bias) of x [..., columns] and bias [columns] or None: [..., columns], of x's dtype.

    `act` is `gelu`, x times the normal distribution's function, by erf, or its approximation `gelu_tanh` (Hendrycks &
    Gimpel 2016, section 2); `silu`, x * sigmoid(x) (from the same paper); `relu2`, as `squared_relu`. Results below
    1.1e-36 may be 0, as a kernel's logistic is 0 below 2^-126. In 16 bits, `gelu` has an error of at most 2e-9 for x
    below -5.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for another `act`.
    """
    _expect_activation("bias_gelu", act)
    expect_floats("bias_gelu", x, x=x, bias=bias)
    expect_columns("bias_gelu", x=x)
    expect_shape("bias_gelu", "bias", bias, x.shape[-1:], x)
    if not launch.runs_on_triton(x):
        return reference.bias_gelu(x, bias, act)
    return _forward("bias_gelu", x, bias, act)


@checked
def bias_gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, act: str = "gelu_tanh"
) -> tuple[Tensor, Tensor | None]:
    """(dx, dbias) of `bias_gelu`, from dy [..., columns], x [..., columns] and bias [columns] or None.

    dx [..., columns] is `dy * act'(x + bias)`, in x's dtype. dbias [columns] is its sum over rows; None without a bias.
    Each program sums its rows in float32, before dx is rounded. The programs' sums are added in a fixed order.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), and for another `act`.
    """
    _expect_activation("bias_gelu_backward", act)
    expect_floats("bias_gelu_backward", x, x=x, dy=dy, bias=bias)
    expect_columns("bias_gelu_backward", x=x)
    expect_shape("bias_gelu_backward", "dy", dy, x.shape, x)
    expect_shape("bias_gelu_backward", "bias", bias, x.shape[-1:], x)
    if not launch.runs_on_triton(x):
        return reference.bias_gelu_backward(dy, x, bias, act)
    return _backward("bias_gelu_backward", dy, x, bias, act)


@checked
def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0) ** 2 of x [..., columns]: [..., columns], of x's dtype (So et al. 2021, "Primer").

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    expect_floats("squared_relu", x, x=x)
    expect_columns("squared_relu", x=x)
    return _forward("squared_relu", x, None, "relu2") if launch.runs_on_triton(x) else reference.squared_relu(x)


@checked
def squared_relu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """dx [..., columns] of `squared_relu`, `2 * max(x, 0) * dy`, from dy and x [..., columns]; of x's dtype.

    dx is 0 where x is not positive, even for an infinite dy, as in autograd; NaN gives NaN.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`).
    """
    expect_floats("squared_relu_backward", x, x=x, dy=dy)
    expect_columns("squared_relu_backward", x=x)
    expect_shape("squared_relu_backward", "dy", dy, x.shape, x)
    if not launch.runs_on_triton(x):
        return reference.squared_relu_backward(dy, x)
    return _backward("squared_relu_backward", dy, x, None, "relu2")[0]


@checked
def gated(gate: Tensor, up: Tensor | None = None, act: str = "silu") -> Tensor:
    """act(gate) * up, of gate and up [..., columns]: [..., columns], of their one dtype.

    Shazeer 2020, "GLU variants improve Transformer", section 2: `silu` makes it SwiGLU, `gelu` and `gelu_tanh` GeGLU.
    Without `up`, gate [..., 2 * columns] holds both, one after the other in each row. Accuracy near 0 is as in
    `bias_gelu`.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for another `act`, and for a packed gate of an odd
    number of columns.
    """
    _expect_activation("gated", act)
    _expect_pair("gated", gate, up)
    if not launch.runs_on_triton(gate):
        return reference.gated(gate, up, act)
    first, second = _halves(gate, up)
    y = launch.empty((*gate.shape[:-1], first.shape[1]), gate.dtype, gate)
    _launch_tiles("gated_forward", "gated", first, (first, second, y), (first, second), act)
    return y


@checked
def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor | None = None, act: str = "silu"
) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup) of `gated`, from dy [..., columns] and gate and up [..., columns]; shapes and dtypes are theirs.

    dgate is `dy * up * act'(gate)`, dup `dy * act(gate)`. Without `up`, gate and dgate are packed, [..., 2 * columns],
    and dup is None.

    Raises SC530 as `gated`.
    """
    _expect_activation("gated_backward", act)
    _expect_pair("gated_backward", gate, up)
    expect_floats("gated_backward", gate, dy=dy)
    expect_shape("gated_backward", "dy", dy, (*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)), gate)
    if not launch.runs_on_triton(gate):
        return reference.gated_backward(dy, gate, up, act)
    first, second = _halves(gate, up)
    dgate = launch.empty(gate.shape, gate.dtype, gate)
    dup = None if up is None else launch.empty(up.shape, up.dtype, up)
    tensors = (row_schedule.as_rows(dy), first, second, *_halves(dgate, dup))
    _launch_tiles("gated_backward", "gated_backward", first, tensors, tensors, act)
    return dgate, dup


def _expect_activation(op: str, act: str) -> None:
    expect(act in ACTIVATIONS, op, f"act is {act!r}, which is no activation", hint=f"one of {', '.join(ACTIVATIONS)}")


def _expect_pair(op: str, gate: Tensor, up: Tensor | None) -> None:
    expect_floats(op, gate, gate=gate, up=up)
    expect_columns(op, gate=gate)
    if up is None:
        message = f"gate is {list(gate.shape)}, gate and up in one: its columns are odd"
        expect(gate.shape[-1] % 2 == 0, op, message, "pass both halves, of as many columns each, or gate and up apart")
    else:
        expect_shape(op, "up", up, gate.shape, gate)
        expect_same_dtype(op, "up", up, gate)


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up as rows. A packed tensor gives two views."""
    if up is not None:
        return row_schedule.as_rows(gate), row_schedule.as_rows(up)
    flat = row_schedule.as_rows(gate)
    half = gate.shape[-1] // 2
    return flat[:, :half], flat[:, half:]


def _forward(op: str, x: Tensor, bias: Tensor | None, act: str) -> Tensor:
    y, flat = launch.empty(x.shape, x.dtype, x), row_schedule.as_rows(x)
    tensors = (flat, None if bias is None else bias.contiguous(), y)
    _launch_tiles("activation_forward", op, x, tensors, (flat,), act)
    return y


def _launch_tiles(
    kernel: str, op: str, like: Tensor, tensors: Sequence[Tensor | None], strided: Sequence[Tensor], act: str
) -> None:
    """A program for each tile of `like`. `strided`: the tensors, as rows, whose row strides the kernel takes."""
    count, cols = strided[0].shape
    schedule = row_schedule.tile_schedule(op, like, cols)
    launch.run(
        f"activation.{kernel}",
        (schedule.tiles(count, cols),),
        *(*tensors, count, *map(row_schedule.row_stride, strided)),
        ACT=act,
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        warps=schedule.warps,
    )


def _backward(op: str, dy: Tensor, x: Tensor, bias: Tensor | None, act: str) -> tuple[Tensor, Tensor | None]:
    dx = launch.empty(x.shape, x.dtype, x)
    dbias = None if bias is None else launch.empty(bias.shape, bias.dtype, x)
    grad, flat = row_schedule.as_rows(dy), row_schedule.as_rows(x)
    count, cols = flat.shape
    schedule = row_schedule.column_walk_schedule(op, x, cols, sums=dbias is not None)
    blocks, programs = schedule.column_grid(count, cols, x)
    db = None if dbias is None else partial_sum_buffer(programs, cols, x)
    launch.run(
        "activation.activation_backward",
        (blocks * programs,),
        *(grad, flat, None if bias is None else bias.contiguous(), dx, db, count),
        *(row_schedule.row_stride(grad), row_schedule.row_stride(flat)),
        ACT=act,
        COLS=cols,
        BLOCK=schedule.block,
        ROWS=schedule.rows,
        STAGES=schedule.stages,
        warps=schedule.warps,
    )
    sum_columns_into((db,), [dbias])
    return dx, dbias
