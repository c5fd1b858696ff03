"""A corpus of kernels as models have them, for any rows and columns. The compile gate and the tests go through it.

`Draft` is the shortest way to write a kernel by hand: values are `Ref`s, and each op of the table is a call.

    k = Draft((8, 128, 64))
    x = k.full(torch.bfloat16)
    k.out(k("rsqrt", k("rsum", k("square", x))), torch.float32)
    kernel = k.kernel("fused_row_norm")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kernels_triton.ir.access_map import AccessMap, broadcast_map, contiguous_map
from kernels_triton.ir.kernel import Input, Kernel, KernelStep, Operand, Output, OutputStore, Ref
from kernels_triton.ir.row_padding import padded_columns


@dataclass
class Draft:
    """A kernel under construction: all inputs first, then steps and outputs."""

    space: tuple[int, ...]
    inputs: list[Input] = field(default_factory=list)
    steps: list[KernelStep] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    batch: int = 0

    def input(self, dtype: torch.dtype, shape: Sequence[int], walk: AccessMap | None = None) -> Ref:
        assert not self.steps, "inputs come before steps"
        self.inputs.append(Input(dtype, tuple(shape), broadcast_map(shape, self.space) if walk is None else walk))
        return Ref(len(self.inputs) - 1)

    def full(self, dtype: torch.dtype) -> Ref:
        return self.input(dtype, self.space)

    def row(self, dtype: torch.dtype = torch.float32) -> Ref:
        return self.input(dtype, self.space[:-1], broadcast_map((*self.space[:-1], 1), self.space))

    def col(self, dtype: torch.dtype) -> Ref:
        return self.input(dtype, self.space[-1:])

    def scalar(self, dtype: torch.dtype = torch.float32) -> Ref:
        return self.input(dtype, ())

    def in_wide_rows(self, dtype: torch.dtype) -> Ref:
        """An input over the whole space, in rows that are padded to a multiple of 16 bytes."""
        shape = (*self.space[:-1], padded_columns(self.space[-1]))
        return self.input(dtype, shape, AccessMap(0, contiguous_map(shape).strides))

    def __call__(
        self, op: str, *operands: Operand, attributes: Sequence[int] = (), dtype: torch.dtype | None = None
    ) -> Ref:
        self.steps.append(KernelStep(op, operands, tuple(attributes), dtype))
        return Ref(len(self.inputs) + len(self.steps) - 1)

    def out(self, value: Ref, dtype: torch.dtype, shape: Sequence[int] | None = None) -> None:
        """A tensor over those dims of the space that `shape` names from the right; the whole space by default."""
        shape = self.space if shape is None else tuple(shape)
        self.outputs.append(Output(dtype, tuple(shape), (OutputStore(value, broadcast_map(shape, self.space)),)))

    def out_row(self, value: Ref, dtype: torch.dtype = torch.float32) -> None:
        walk = broadcast_map((*self.space[:-1], 1), self.space)
        self.outputs.append(Output(dtype, self.space[:-1], (OutputStore(value, walk),)))

    def out_col(self, value: Ref, dtype: torch.dtype) -> None:
        self.out(value, dtype, self.space[-1:])

    def out_before_zeros(self, value: Ref, dtype: torch.dtype) -> None:
        """An output over the whole space, in padded rows with zeros at their ends."""
        shape = (*self.space[:-1], padded_columns(self.space[-1]))
        self.outputs.append(
            Output(
                dtype, shape, (OutputStore(value, AccessMap(0, contiguous_map(shape).strides)),), shape != self.space
            )
        )

    def joined(self, dtype: torch.dtype, shape: Sequence[int], *stores: tuple[Ref, AccessMap]) -> None:
        self.outputs.append(Output(dtype, tuple(shape), tuple(OutputStore(v, w) for v, w in stores)))

    def mean(self, value: Operand) -> Ref:
        return self("div", self("rsum", value), float(self.space[-1]))

    def kernel(self, name: str) -> Kernel:
        return Kernel(name, self.space, tuple(self.inputs), tuple(self.steps), tuple(self.outputs), self.batch)


def add_layer_norm(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    x, residual, w, b = k.full(dtype), k.full(dtype), k.col(dtype), k.col(dtype)
    h = k("cast", k("add", x, residual), dtype=dtype)
    mean = k.mean(h)
    d = k("sub", h, mean)
    rstd = k("rsqrt", k("add", k.mean(k("square", d)), 1e-5))
    k.out(h, dtype)
    k.out(k("fma", k("mul", d, rstd), w, b), dtype)
    k.out_row(mean)
    k.out_row(rstd)
    return k.kernel("fused_add_layer_norm")


def layer_norm_backward(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """dx, including the residual's gradient, and the sums of both parameters' gradients."""
    k = Draft((rows, cols))
    dy, h, dres, w, mean, rstd = k.full(dtype), k.full(dtype), k.full(dtype), k.col(dtype), k.row(), k.row()
    xhat = k("mul", k("sub", h, mean), rstd)
    g = k("mul", dy, w)
    inner = k("sub", k("sub", g, k.mean(g)), k("mul", xhat, k.mean(k("mul", g, xhat))))
    k.out(k("add", k("mul", inner, rstd), dres), dtype)
    k.out_col(k("csum", k("mul", dy, xhat)), dtype)
    k.out_col(k("csum", dy), dtype)
    return k.kernel("fused_layer_norm_backward")


def rms_norm(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    x, w = k.full(dtype), k.col(dtype)
    rstd = k("rsqrt", k("add", k.mean(k("square", x)), 1e-6))
    k.out(k("mul", k("cast", k("mul", x, rstd), dtype=dtype), w), dtype)
    k.out_row(rstd)
    return k.kernel("fused_rms_norm")


def rms_norm_backward(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    dy, x, w, rstd = k.full(dtype), k.full(dtype), k.col(dtype), k.row()
    xhat, g = k("mul", x, rstd), k("mul", dy, w)
    k.out(k("mul", k("sub", g, k("mul", xhat, k.mean(k("mul", g, xhat)))), rstd), dtype)
    k.out_col(k("csum", k("mul", dy, xhat)), torch.float32)
    return k.kernel("fused_rms_norm_backward")


def causal_softmax(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """Rows are (head, query). Query q sees keys up to `cols - queries + q`."""
    queries = math.gcd(rows, 1 << 10)
    k = Draft((rows // queries, queries, cols))
    x = k.full(dtype)
    visible = k("le", k("iota", attributes=(2,)), k("add", k("iota", attributes=(1,)), max(0, cols - queries)))
    s = k("where", visible, k("mul", x, 0.125), float("-inf"))
    e = k("exp", k("sub", s, k("rmax", s)))
    k.out(k("div", e, k("rsum", e)), dtype)
    return k.kernel("fused_causal_softmax")


def softmax_backward(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    dy, y = k.full(dtype), k.full(dtype)
    g = k("mul", dy, y)
    k.out(k("mul", k("sub", g, k("mul", y, k("rsum", g))), 0.125), dtype)
    return k.kernel("fused_softmax_backward")


def uneven_softmax(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """Rows of one more column, which matrix products need padded to 16 bytes: read and written in place."""
    k = Draft((rows, cols + 1 + 8 * (cols < 8)))
    x = k.in_wide_rows(dtype)
    e = k("exp", k("sub", x, k("rmax", x)))
    k.out_before_zeros(k("div", e, k("rsum", e)), dtype)
    return k.kernel("fused_uneven_softmax")


ROOT = math.sqrt(2.0 / math.pi)


def _gelu_inner(k: Draft, x: Ref) -> Ref:
    return k("mul", k("fma", k("mul", k("square", x), 0.044715), x, x), ROOT)


def bias_gelu(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    x, b = k.full(dtype), k.col(dtype)
    h = k("add", x, b)
    k.out(k("mul", k("mul", h, 0.5), k("add", k("tanh", _gelu_inner(k, h)), 1.0)), dtype)
    return k.kernel("fused_bias_gelu")


def bias_gelu_backward(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    dy, x, b = k.full(dtype), k.full(dtype), k.col(dtype)
    h = k("add", x, b)
    t = k("tanh", _gelu_inner(k, h))
    slope = k("mul", k("fma", k("square", h), 3 * 0.044715, 1.0), ROOT)
    cdf = k("mul", k("add", t, 1.0), 0.5)
    pdf_term = k("mul", k("mul", k("mul", h, 0.5), k("sub", 1.0, k("square", t))), slope)
    dx = k("mul", dy, k("add", cdf, pdf_term))
    k.out(dx, dtype)
    k.out_col(k("csum", dx), dtype)
    return k.kernel("fused_bias_gelu_backward")


def swiglu_backward(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """From a packed gate and up, into a packed gradient."""
    k = Draft((rows, cols))
    left, right = AccessMap(0, (2 * cols, 1)), AccessMap(cols, (2 * cols, 1))
    dy = k.full(dtype)
    gate, up = k.input(dtype, (rows, 2 * cols), left), k.input(dtype, (rows, 2 * cols), right)
    s = k("sigmoid", gate)
    silu = k("mul", gate, s)
    dup = k("mul", dy, silu)
    dgate = k("mul", k("mul", dy, up), k("fma", silu, k("sub", 1.0, s), s))
    k.joined(dtype, (rows, 2 * cols), (dgate, left), (dup, right))
    return k.kernel("fused_swiglu_backward")


def rope(rows: int, cols: int, dtype: torch.dtype, heads: int = 0) -> Kernel:
    """Rows are (position, head) of 2 x cols numbers, rotated in halves."""
    heads = heads or math.gcd(rows, 8)
    k = Draft((rows // heads, heads, cols))
    step = (2 * cols * heads, 2 * cols, 1)
    low, high = AccessMap(0, step), AccessMap(cols, step)
    shape = (rows // heads, heads, 2 * cols)
    a, b = k.input(dtype, shape, low), k.input(dtype, shape, high)
    angles = (rows // heads, 1, cols)
    cos, sin = k.input(torch.float32, angles), k.input(torch.float32, angles)
    first = k("sub", k("mul", a, cos), k("mul", b, sin))
    second = k("fma", a, sin, k("mul", b, cos))
    k.joined(dtype, shape, (first, low), (second, high))
    return k.kernel("fused_rope")


def dropout_add(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """`residual + dropout(x)`. The mask depends on the global index: a shard's rows start at `offset`."""
    k = Draft((rows, cols))
    x, residual, seed, offset = k.full(dtype), k.full(dtype), k.scalar(torch.int64), k.scalar(torch.int64)
    keep = k("ge", k("uniform", seed, offset, attributes=(3, 2 * cols, 1)), 0.1)
    k.out(k("add", k("mul", k("mul", x, keep), 1 / 0.9), residual), dtype)
    return k.kernel("fused_dropout_add")


def dropout_add_layer_norm(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """`residual + dropout(x + bias)`, and its norm."""
    k = Draft((rows, cols))
    x, residual, bias, w, b = k.full(dtype), k.full(dtype), k.col(dtype), k.col(dtype), k.col(dtype)
    seed, offset = k.scalar(torch.int64), k.scalar(torch.int64)
    keep = k("ge", k("uniform", seed, offset, attributes=(3, cols, 1)), 0.1)
    dropped = k("mul", k("mul", k("add", x, bias), keep), 1 / 0.9)
    h = k("cast", k("add", dropped, residual), dtype=dtype)
    mean = k.mean(h)
    d = k("sub", h, mean)
    rstd = k("rsqrt", k("add", k.mean(k("square", d)), 1e-5))
    k.out(h, dtype)
    k.out(k("fma", k("mul", d, rstd), w, b), dtype)
    k.out_row(mean)
    k.out_row(rstd)
    return k.kernel("fused_dropout_add_layer_norm")


def dropped_softmax(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """Attention weights, and the same weights after dropout."""
    k = Draft((rows, cols))
    x, seed, offset = k.full(dtype), k.scalar(torch.int64), k.scalar(torch.int64)
    e = k("exp", k("sub", x, k("rmax", x)))
    y = k("div", e, k("rsum", e))
    keep = k("ge", k("uniform", seed, offset, attributes=(3, cols, 1)), 0.1)
    k.out(y, dtype)
    k.out(k("mul", k("mul", y, keep), 1 / 0.9), dtype)
    return k.kernel("fused_dropped_softmax")


def adamw(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """The updates of p, m and v, and a copy of p in the compute dtype."""
    f32 = torch.float32
    k = Draft((rows * cols,))
    p, g, m, v = k.full(f32), k.full(dtype), k.full(f32), k.full(f32)
    lr, scale, one, two = (k.scalar() for _ in range(4))
    g = k("mul", g, scale)
    m = k("fma", m, 0.9, k("mul", g, 0.1))
    v = k("fma", v, 0.95, k("mul", k("square", g), 0.05))
    denominator = k("add", k("div", k("sqrt", v), k("sqrt", two)), 1e-8)
    p = k("sub", k("mul", p, k("sub", 1.0, k("mul", lr, 0.1))), k("mul", lr, k("div", k("div", m, one), denominator)))
    for value in (p, m, v):
        k.out(value, f32)
    k.out(p, dtype)
    return k.kernel("fused_adamw")


def square_sum(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """The norm of a whole tensor: a sum over rows' columns, then over rows, and its root."""
    k = Draft((rows, cols))
    x = k.full(dtype)
    k.out(k("sqrt", k("csum", k("rsum", k("square", x)))), torch.float32, ())
    return k.kernel("fused_norm")


def transposed_add(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    k = Draft((rows, cols))
    x, y = k.full(dtype), k.input(dtype, (cols, rows), AccessMap(0, (1, rows)))
    k.out(k("add", x, y), dtype)
    return k.kernel("fused_transposed_add")


def accumulated_bias(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """A bias's gradient added to the sum of earlier microbatches."""
    k = Draft((rows, cols))
    dy, before = k.full(dtype), k.col(torch.float32)
    k.out_col(k("add", before, k("csum", dy)), torch.float32)
    return k.kernel("fused_accumulated_bias")


def channel_sums(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """The sums of batch norm's backward over images and positions, with the gradient through the activation."""
    images = max(1, rows // 64)
    channels = rows // images
    k = Draft((channels, images, cols), batch=1)
    shape, walk = (images, channels, cols), AccessMap(0, (cols, channels * cols, 1))
    of_channels = AccessMap(0, (1, 0, 0))
    dy, y, x = (k.input(dtype, shape, walk) for _ in range(3))
    mean, rstd = (k.input(torch.float32, (channels,), of_channels) for _ in range(2))
    g = k("where", k("le", y, 0.0), 0.0, dy)
    k.joined(dtype, shape, (g, walk))
    for value in (g, k("mul", g, k("mul", k("sub", x, mean), rstd))):
        k.joined(torch.float32, (channels,), (k("csum", k("rsum", value)), of_channels))
    return k.kernel("fused_channel_sums")


def pooled(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """The mean of each sequence's positions."""
    batch = math.gcd(rows, 16)
    k = Draft((batch, rows // batch, cols), batch=1)
    x = k.full(dtype)
    mean = k("mul", k("csum", x), float(batch) / rows)
    k.joined(dtype, (batch, cols), (mean, AccessMap(0, (cols, 0, 1))))
    return k.kernel("fused_pooled")


def angles(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """A rotary embedding's table."""
    k = Draft((rows, cols))
    x = k.full(torch.float32)
    for op in ("cos", "sin"):
        k.out(k(op, x), dtype)
    return k.kernel("fused_angles")


def extremes(rows: int, cols: int, dtype: torch.dtype) -> Kernel:
    """The maximum, the minimum and a product of each row and of each column."""
    k = Draft((rows, cols))
    x = k.full(dtype)
    few = k("where", k("gt", x, 3.0), 2.0, 1.0)
    for op, of in (("max", x), ("min", x), ("prod", few)):
        k.out_row(k(f"r{op}", of))
        k.out_col(k(f"c{op}", of), torch.float32)
    return k.kernel("fused_extremes")


CORPUS: dict[str, Callable[[int, int, torch.dtype], Kernel]] = {
    build.__name__: build
    for build in (
        *(add_layer_norm, layer_norm_backward, rms_norm, rms_norm_backward, causal_softmax, softmax_backward),
        uneven_softmax,
        *(bias_gelu, bias_gelu_backward, swiglu_backward, rope, dropout_add, adamw, square_sum, transposed_add),
        *(accumulated_bias, dropout_add_layer_norm, dropped_softmax, channel_sums, pooled, angles, extremes),
    )
}
