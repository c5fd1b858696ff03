"""Lowerings of pointwise ops, casts and norms. The other modules here lower the rest: `functions`, `reductions`, ...

In a kernel, floats are float32 until they are stored, whatever the dtype of the graph's values in between.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.passes.fusion.analysis.iteration_space import Shape, strided_runs
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten

FLOATS = "reciprocal sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos tanh sigmoid erf floor ceil sign isnan"
NUMBERS = "neg abs"
COMPARES = "eq ne lt le gt ge"


def _named(op: str, floats: bool) -> None:
    @lower(getattr(aten, op).default)
    def unary(m: LoweringBuilder, x: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        if floats:
            m.require_floats(x)
        return m(op, x)


for name in FLOATS.split():
    _named(name, True)
for name in NUMBERS.split():
    _named(name, False)


def _compared(op: str) -> None:
    @lower(getattr(aten, op).Tensor, getattr(aten, op).Scalar)
    def compare(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return m(op, *m.comparison_operands(*m.promoted(a, b)))


for name in COMPARES.split():
    _compared(name)


# ---------------------------------------------------------------------- arithmetic
@lower(aten.add.Tensor, aten.add.Scalar)
def add(m: LoweringBuilder, a: Operand, b: Operand, alpha: float = 1) -> Operand:
    if m.dtype == torch.bool:
        return m("or", a, b if alpha else False)
    return m.add(a, b if alpha == 1 else m.mul(b, alpha))


@lower(aten.sub.Tensor, aten.sub.Scalar)
def sub(m: LoweringBuilder, a: Operand, b: Operand, alpha: float = 1) -> Operand:
    return m.sub(a, b if alpha == 1 else m.mul(b, alpha))


@lower(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(m: LoweringBuilder, a: Operand, b: Operand, alpha: float = 1) -> Operand:
    return m.sub(b, a if alpha == 1 else m.mul(a, alpha))


@lower(aten.mul.Tensor, aten.mul.Scalar)
def mul(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return m("and" if m.dtype == torch.bool else "mul", a, b)


@lower(aten.div.Tensor, aten.div.Scalar)
def div(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return m.div(a, b)


@lower(aten.square.default)
def square(m: LoweringBuilder, x: Operand) -> Operand:
    return m("square", x)


@lower(aten.maximum.default, aten.max.other, aten.clamp_min.default, aten.clamp_min.Tensor)
def maximum(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return m("or" if m.dtype == torch.bool else "maximum", *m.promoted(a, b))


@lower(aten.minimum.default, aten.min.other, aten.clamp_max.default, aten.clamp_max.Tensor)
def minimum(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return m("and" if m.dtype == torch.bool else "minimum", *m.promoted(a, b))


@lower(aten.clamp.default, aten.clamp.Tensor)
def clamp(m: LoweringBuilder, x: Operand, min: Operand | None = None, max: Operand | None = None) -> Operand:
    low = x if min is None else m("maximum", *m.promoted(x, min))
    return low if max is None else m("minimum", *m.promoted(low, max))


@lower(aten.pow.Tensor_Scalar)
def pow_(m: LoweringBuilder, x: Operand, exponent: float) -> Operand:
    m.require_floats(x)
    match exponent:
        case 1:
            return m("same", x)
        case 2:
            return m("square", x)
        case 3:
            return m.mul(m("square", x), x)
        case 0.5:
            return m("sqrt", x)
        case -0.5:
            return m("rsqrt", x)
        case -1:
            return m("reciprocal", x)
        case _:
            return m("pow", x, float(exponent))


@lower(aten.pow.Scalar, aten.pow.Tensor_Tensor)
def power(m: LoweringBuilder, base: Operand, exponent: Operand) -> Operand:
    if not m.dtype.is_floating_point:
        raise NotLowerable
    return m("pow", base, exponent)


@lower(aten.addcmul.default)
def addcmul(m: LoweringBuilder, x: Operand, a: Operand, b: Operand, value: float = 1) -> Operand:
    product = m.mul(a, b)
    return m.add(x, product if value == 1 else m.mul(product, value))


@lower(aten.addcdiv.default)
def addcdiv(m: LoweringBuilder, x: Operand, a: Operand, b: Operand, value: float = 1) -> Operand:
    m.require_floats(x)
    return m.add(x, m.div(a if value == 1 else m.mul(a, value), b))


# ---------------------------------------------------------------------- choice
@lower(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(m: LoweringBuilder, condition: Operand, a: Operand, b: Operand) -> Operand:
    if m.dtype.is_floating_point:
        a, b = (float(x) if isinstance(x, int) else x for x in (a, b))
    return m("where", condition, *m.promoted(a, b))


@lower(aten._to_copy.default)
def to_copy(m: LoweringBuilder, x: Operand, dtype: torch.dtype | None = None, **_: Any) -> Operand:
    before, after = m.dtype_of(x), m.dtype
    wider = before.is_floating_point and after.is_floating_point and after.itemsize > before.itemsize
    if after == before or wider:
        return m("same", x)  # between the 16-bit dtypes a cast rounds, or overflows
    if before.is_floating_point and not after.is_floating_point and after != torch.bool:
        raise NotLowerable  # the integer of a float out of range depends on the hardware
    return m("cast", x)


@lower(aten.clone.default, aten.alias.default, aten.detach.default)
def clone(m: LoweringBuilder, x: Operand, **_: Any) -> Operand:
    return m("same", x)


@lower(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(m: LoweringBuilder, *args: float, **_: Any) -> Operand:
    numbers: list[float] = [0, *args, 1] if len(args) == 1 else [*args, 1]
    start, end, step = numbers[:3]
    if m.dtype.is_floating_point or not all(isinstance(n, int) for n in (start, end, step)) or m.dtype == torch.bool:
        raise NotLowerable
    count = math.prod(m.shape)
    index = m.indices((count,), strided_runs((count,), (1,)))
    scaled = index if step == 1 else m.mul(index, step)
    return scaled if start == 0 else m.add(scaled, start)


# ---------------------------------------------------------------------- activations
@lower(aten.relu.default)
def relu(m: LoweringBuilder, x: Operand) -> Operand:
    return m("maximum", x, 0.0 if m.dtype.is_floating_point else 0)


@lower(aten.threshold_backward.default)
def threshold_backward(m: LoweringBuilder, g: Operand, x: Operand, threshold: float) -> Operand:
    return m("where", m("le", x, threshold, dtype=torch.bool), 0.0, g)


@lower(aten.tanh_backward.default)
def tanh_backward(m: LoweringBuilder, g: Operand, y: Operand) -> Operand:
    return m.mul(g, m.sub(1.0, m("square", y)))


@lower(aten.sigmoid_backward.default)
def sigmoid_backward(m: LoweringBuilder, g: Operand, y: Operand) -> Operand:
    return m.mul(g, m.mul(y, m.sub(1.0, y)))


@lower(aten.silu.default)
def silu(m: LoweringBuilder, x: Operand) -> Operand:
    return m.mul(x, m("sigmoid", x))


@lower(aten.silu_backward.default)
def silu_backward(m: LoweringBuilder, g: Operand, x: Operand) -> Operand:
    s = m("sigmoid", x)
    return m.mul(m.mul(g, s), m.add(1.0, m.mul(x, m.sub(1.0, s))))


def _tanh_of_gelu(m: LoweringBuilder, x: Operand) -> tuple[Temporary, Temporary]:
    """tanh(u) of gelu's tanh approximation, and x squared."""
    squared = m("square", x)
    inside = m.mul(math.sqrt(2 / math.pi), m.mul(x, m.add(1.0, m.mul(0.044715, squared))))
    return m("tanh", inside), squared


@lower(aten.gelu.default)
def gelu(m: LoweringBuilder, x: Operand, approximate: str = "none") -> Operand:
    if approximate == "tanh":
        return m.mul(m.mul(0.5, x), m.add(1.0, _tanh_of_gelu(m, x)[0]))
    return m.mul(m.mul(0.5, x), m.add(1.0, m("erf", m.mul(x, math.sqrt(0.5)))))


@lower(aten.gelu_backward.default)
def gelu_backward(m: LoweringBuilder, g: Operand, x: Operand, approximate: str = "none") -> Operand:
    if approximate == "tanh":
        tanh, squared = _tanh_of_gelu(m, x)
        slope = m.mul(math.sqrt(2 / math.pi), m.add(1.0, m.mul(3 * 0.044715, squared)))
        right = m.mul(m.mul(m.mul(0.5, x), m.sub(1.0, m("square", tanh))), slope)
        return m.mul(g, m.add(m.mul(0.5, m.add(1.0, tanh)), right))
    cdf = m.mul(0.5, m.add(1.0, m("erf", m.mul(x, math.sqrt(0.5)))))
    pdf = m.mul(m("exp", m.mul(-0.5, m("square", x))), 1 / math.sqrt(2 * math.pi))
    return m.mul(g, m.add(cdf, m.mul(x, pdf)))


# ---------------------------------------------------------------------- random numbers
@lower(RANDOM_UNIFORM)
def random_uniform(
    m: LoweringBuilder, seed: fx.Node, op_id: int, shape: Sequence[int], strides: Sequence[int], offset: fx.Node
) -> Operand:
    index = strided_runs(tuple(shape), tuple(n if size > 1 else 0 for n, size in zip(strides, shape, strict=True)))
    return m("uniform", seed, offset, seed=op_id, index=index)


# ---------------------------------------------------------------------- norms
def _rows(m: LoweringBuilder, x: Operand, normalized: Sequence[int]) -> tuple[Shape, Shape, int]:
    """The shape of x, the shape of its statistics, and the number of columns."""
    shape = m.shape_of(x)
    outer_dims = len(shape) - len(normalized)
    cols = math.prod(shape[outer_dims:])
    if cols == 1 or tuple(normalized) != shape[outer_dims:]:
        raise NotLowerable
    return shape, (*shape[:outer_dims], *[1] * len(normalized)), cols


@lower(aten.native_layer_norm.default)
def layer_norm(
    m: LoweringBuilder, x: Operand, normalized: Sequence[int], weight: fx.Node | None, bias: fx.Node | None, eps: float
) -> tuple[Operand, ...]:
    shape, rows, cols = _rows(m, x, normalized)
    m.shape = shape

    def mean_of(value: Operand) -> Temporary:
        return m("div", m.reduce("rsum", value, "row", rows, cols), float(cols), shape=rows)

    mean = mean_of(x)
    centred = m.sub(x, mean)
    variance = mean_of(m("square", centred))
    rstd = m("rsqrt", m("add", variance, eps, shape=rows), shape=rows)
    y = m.mul(centred, rstd)
    y = y if weight is None else m.mul(y, weight)
    return (y if bias is None else m.add(y, bias)), mean, rstd


@lower(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    m: LoweringBuilder,
    g: Operand,
    x: Operand,
    normalized: Sequence[int],
    mean: Operand,
    rstd: Operand,
    weight: fx.Node | None,
    bias: fx.Node | None,
    mask: Sequence[bool],
) -> tuple[Operand | None, ...]:
    shape, rows, cols = _rows(m, x, normalized)
    m.shape, last = shape, tuple(normalized)
    hat = m.mul(m.sub(x, mean), rstd)
    gw = g if weight is None else m.mul(g, weight)

    def mean_of(value: Operand) -> Temporary:
        return m("div", m.reduce("rsum", value, "row", rows, cols), float(cols), shape=rows)

    inner = m.sub(m.sub(gw, mean_of(gw)), m.mul(hat, mean_of(m.mul(gw, hat))))
    dx = m.mul(inner, rstd)
    dw = m.reduce("csum", m.mul(g, hat), "col", last, cols) if mask[1] else None
    db = m.reduce("csum", g, "col", last, cols) if mask[2] else None
    return dx if mask[0] else None, dw, db
