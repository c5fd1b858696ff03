"""Lowerings of the rarer pointwise ops, of activations above all, in the words that kernels have already.

Each is what ATen computes, special values included: where ATen chooses, so does the kernel.
"""

from __future__ import annotations

import math

import torch

from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten
INF = float("inf")


def _less(m: Make, a: Operand, b: Operand) -> Inner:
    return m("lt", a, b, dtype=torch.bool)


def _more(m: Make, a: Operand, b: Operand) -> Inner:
    return m("gt", a, b, dtype=torch.bool)


def _at_most(m: Make, a: Operand, b: Operand) -> Inner:
    return m("le", a, b, dtype=torch.bool)


def _between(m: Make, x: Operand, low: float, high: float) -> Inner:
    return m("and", _more(m, x, low), _less(m, x, high), dtype=torch.bool)


def _choose(m: Make, condition: Operand, a: Operand, b: Operand) -> Inner:
    return m("where", condition, a, b)


# ---------------------------------------------------------------------- numbers
@lower(aten.isinf.default)
def isinf(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("or", m("eq", x, INF, dtype=torch.bool), m("eq", x, -INF, dtype=torch.bool))


@lower(aten.isposinf.default)
def isposinf(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("eq", x, INF)


@lower(aten.isneginf.default)
def isneginf(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("eq", x, -INF)


@lower(aten.nan_to_num.default)
def nan_to_num(
    m: Make, x: Operand, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Operand:
    m.floating(x)
    limits = torch.finfo(m.dtype)
    finite = _choose(m, m("eq", x, -INF, dtype=torch.bool), limits.min if neginf is None else neginf, x)
    finite = _choose(m, m("eq", x, INF, dtype=torch.bool), limits.max if posinf is None else posinf, finite)
    return _choose(m, m("isnan", x, dtype=torch.bool), nan or 0.0, finite)


@lower(aten.sgn.default)
def sgn(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("sign", x)


@lower(aten.trunc.default)
def trunc(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return _trunc(m, x)


def _trunc(m: Make, x: Operand) -> Inner:
    return _choose(m, _less(m, x, 0.0), m("ceil", x), m("floor", x))


@lower(aten.frac.default)
def frac(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.sub(x, _trunc(m, x))


@lower(aten.log10.default)
def log10(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(m("log2", x), math.log10(2))


@lower(aten.deg2rad.default)
def deg2rad(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(x, math.pi / 180)


@lower(aten.rad2deg.default)
def rad2deg(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(x, 180 / math.pi)


@lower(aten.positive.default)
def positive(m: Make, x: Operand) -> Operand:
    return m("same", x)


@lower(aten.lerp.Tensor)
def lerp(m: Make, a: Operand, b: Operand, weight: Operand) -> Operand:
    m.floating(a, b, weight)
    across, near = m.sub(b, a), _less(m, m("abs", weight), 0.5)
    return _choose(m, near, m.add(a, m.mul(weight, across)), m.sub(b, m.mul(across, m.sub(1.0, weight))))


@lower(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(m: Make, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    if isinstance(b, (int, float)):
        if not 0 < b < INF:
            raise Unfit
        log: Operand = math.log(b)
    else:
        log = m("log", b)
    if isinstance(a, (int, float)) and a == 0:
        raise Unfit
    product = m.mul(a, log)
    if not isinstance(a, (int, float)):
        product = _choose(m, m("eq", a, 0.0, dtype=torch.bool), 0.0, product)
    return product if isinstance(b, (int, float)) else _choose(m, m("isnan", b, dtype=torch.bool), b, product)


@lower(aten.logaddexp.default)
def logaddexp(m: Make, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    top = m("maximum", a, b)
    more = m("log1p", m("exp", m("neg", m("abs", m.sub(a, b)))))
    return _choose(m, m("eq", m("abs", top), INF, dtype=torch.bool), top, m.add(top, more))


# ---------------------------------------------------------------------- the larger, the smaller, of numbers alone
def _ignoring_nan(m: Make, op: str, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    both = m(op, a, b)
    either = _choose(m, m("isnan", b, dtype=torch.bool), a, both)
    return _choose(m, m("isnan", a, dtype=torch.bool), b, either)


@lower(aten.fmax.default)
def fmax(m: Make, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "maximum", a, b)


@lower(aten.fmin.default)
def fmin(m: Make, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "minimum", a, b)


# ---------------------------------------------------------------------- integers
def _whole(m: Make, *args: Operand) -> None:
    """Of int64 alone: other integers wrap. What is divided by 0 is the hardware's affair, as in torch."""
    if m.dtype != torch.int64 or any(m.dtype_of(arg) != torch.int64 for arg in args):
        raise Unfit


@lower(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(m: Make, a: Operand, b: Operand) -> Operand:
    _whole(m, a, b)
    return m("remainder", a, b)


@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(m: Make, a: Operand, b: Operand) -> Operand:
    _whole(m, a, b)
    return m("floordiv", a, b)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(m: Make, a: Operand, b: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return m.div(a, b)
    if rounding_mode != "floor":
        raise Unfit
    _whole(m, a, b)
    return m("floordiv", a, b)


# ---------------------------------------------------------------------- activations
@lower(aten.hardtanh.default)
def hardtanh(m: Make, x: Operand, low: float = -1.0, high: float = 1.0) -> Operand:
    m.floating(x)
    return _limited(m, x, low, high)


def _limited(m: Make, x: Operand, low: float, high: float) -> Inner:
    return m("minimum", m("maximum", x, float(low)), float(high))


@lower(aten.hardtanh_backward.default)
def hardtanh_backward(m: Make, g: Operand, x: Operand, low: float, high: float) -> Operand:
    m.floating(g, x)
    outside = m("or", _at_most(m, x, low), m("ge", x, high, dtype=torch.bool), dtype=torch.bool)
    return _choose(m, outside, 0.0, g)


@lower(aten.relu6.default)
def relu6(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return _limited(m, x, 0.0, 6.0)


def _gate(m: Make, x: Operand) -> Inner:
    """min(max(x + 3, 0), 6)"""
    return _limited(m, m.add(x, 3.0), 0.0, 6.0)


@lower(aten.hardsigmoid.default)
def hardsigmoid(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.div(_gate(m, x), 6.0)


@lower(aten.hardsigmoid_backward.default)
def hardsigmoid_backward(m: Make, g: Operand, x: Operand) -> Operand:
    m.floating(g, x)
    return _choose(m, _between(m, x, -3.0, 3.0), m.mul(g, 1 / 6), 0.0)


@lower(aten.hardswish.default)
def hardswish(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.div(m.mul(x, _gate(m, x)), 6.0)


@lower(aten.leaky_relu.default)
def leaky_relu(m: Make, x: Operand, slope: float = 0.01) -> Operand:
    m.floating(x)
    return _choose(m, _more(m, x, 0.0), x, m.mul(x, float(slope)))


@lower(aten.leaky_relu_backward.default)
def leaky_relu_backward(m: Make, g: Operand, x: Operand, slope: float, is_result: bool) -> Operand:
    m.floating(g, x)
    return _choose(m, _more(m, x, 0.0), g, m.mul(g, float(slope)))


@lower(aten._prelu_kernel.default)
def prelu(m: Make, x: Operand, weight: Operand) -> Operand:
    m.floating(x, weight)
    return _choose(m, _more(m, x, 0.0), x, m.mul(weight, x))


@lower(aten.threshold.default)
def threshold(m: Make, x: Operand, least: float, value: float) -> Operand:
    m.floating(x)
    return _choose(m, _at_most(m, x, least), float(value), x)


@lower(aten.elu.default)
def elu(m: Make, x: Operand, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Operand:
    m.floating(x)
    low = m.mul(m("expm1", m.mul(x, float(input_scale))), float(alpha * scale))
    return _choose(m, _at_most(m, x, 0.0), low, m.mul(x, float(scale)))


@lower(aten.elu_backward.default)
def elu_backward(
    m: Make, g: Operand, alpha: float, scale: float, input_scale: float, is_result: bool, x: Operand
) -> Operand:
    """`x` is the input, or the result."""
    m.floating(g, x)
    least = float(alpha * scale)
    if is_result:
        low = m.mul(m.mul(g, float(input_scale)), m.add(x, least))
    else:
        low = m.mul(m.mul(g, float(input_scale * least)), m("exp", m.mul(x, float(input_scale))))
    return _choose(m, _at_most(m, x, 0.0), low, m.mul(g, float(scale)))


@lower(aten.softplus.default)
def softplus(m: Make, x: Operand, beta: float = 1, most: float = 20) -> Operand:
    m.floating(x)
    scaled = m.mul(x, float(beta))
    curved = m.div(m("log1p", m("exp", scaled)), float(beta))
    return _choose(m, _more(m, scaled, float(most)), x, curved)


@lower(aten.softplus_backward.default)
def softplus_backward(m: Make, g: Operand, x: Operand, beta: float, most: float) -> Operand:
    m.floating(g, x)
    scaled = m.mul(x, float(beta))
    z = m("exp", scaled)
    return _choose(m, _more(m, scaled, float(most)), g, m.div(m.mul(g, z), m.add(z, 1.0)))


@lower(aten.mish.default)
def mish(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(x, m("tanh", m("log1p", m("exp", x))))


@lower(aten.mish_backward.default)
def mish_backward(m: Make, g: Operand, x: Operand) -> Operand:
    m.floating(g, x)
    t = m("tanh", m("log1p", m("exp", x)))
    slope = m.mul(m.mul(x, m("sigmoid", x)), m.sub(1.0, m("square", t)))
    return m.mul(g, m.add(t, slope))
