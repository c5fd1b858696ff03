"""Lowerings of the rarer functions of numbers: rounding, signs, logarithms, angles, the larger of two.

Each is what ATen computes, special values included: where ATen chooses, so does the kernel.
"""

from __future__ import annotations

import math

import torch

from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten
INF = float("inf")


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
    finite = m.choose(m("eq", x, -INF, dtype=torch.bool), limits.min if neginf is None else neginf, x)
    finite = m.choose(m("eq", x, INF, dtype=torch.bool), limits.max if posinf is None else posinf, finite)
    return m.choose(m("isnan", x, dtype=torch.bool), nan or 0.0, finite)


@lower(aten.sgn.default)
def sgn(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("sign", x)


@lower(aten.trunc.default)
def trunc(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("trunc", m.seen(x))


@lower(aten.frac.default)
def frac(m: Make, x: Operand) -> Operand:
    m.floating(x)
    x = m.seen(x)
    return m.sub(x, m("trunc", x))


@lower(aten.round.default)
def round_(m: Make, x: Operand) -> Operand:
    """Of two that are as near the even one."""
    m.floating(x)
    return m("round", m.seen(x))


def signed(m: Make, x: Operand) -> Inner:
    """Is its sign a minus, that of -0 too? A NaN's is the hardware's affair."""
    x = m.seen(x)
    turned = m("reciprocal", x, dtype=torch.float32)
    return m("or", m.less(x, 0.0), m("eq", turned, -INF, dtype=torch.bool), dtype=torch.bool)


@lower(aten.signbit.default)
def signbit(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return signed(m, x)


@lower(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(m: Make, x: Operand, by: Operand) -> Operand:
    m.floating(x, by)
    size = m("abs", x)
    if isinstance(by, (int, float)):
        return m("neg", size) if math.copysign(1.0, by) < 0 else size
    return m.choose(signed(m, by), m("neg", size), size)


@lower(aten.heaviside.default)
def heaviside(m: Make, x: Operand, at_0: Operand) -> Operand:
    m.floating(x, at_0)
    step = m.choose(m.less(x, 0.0), 0.0, 1.0)
    step = m.choose(m("isnan", x, dtype=torch.bool), 0.0, step)
    return m.choose(m("eq", x, 0.0, dtype=torch.bool), at_0, step)


@lower(aten.hypot.default)
def hypot(m: Make, a: Operand, b: Operand) -> Operand:
    """The squares may overflow where their root does not."""
    m.floating(a, b)
    a, b = m("abs", a), m("abs", b)
    large, small = m("maximum", a, b), m("minimum", a, b)
    root = m.mul(large, m("sqrt", m.add(1.0, m("square", m.div(small, large)))))
    root = m.choose(m("eq", large, 0.0, dtype=torch.bool), large, root)
    infinite = m("or", m("eq", a, INF, dtype=torch.bool), m("eq", b, INF, dtype=torch.bool), dtype=torch.bool)
    return m.choose(infinite, INF, root)


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


@lower(aten.lerp.Scalar)
def lerp(m: Make, a: Operand, b: Operand, weight: float) -> Operand:
    across = m.sub(b, a)
    return m.add(a, m.mul(across, weight)) if abs(weight) < 0.5 else m.sub(b, m.mul(across, 1 - weight))


@lower(aten.lerp.Tensor)
def lerp_by(m: Make, a: Operand, b: Operand, weight: Operand) -> Operand:
    m.floating(a, b, weight)
    across, near = m.sub(b, a), m.less(m("abs", weight), 0.5)
    return m.choose(near, m.add(a, m.mul(weight, across)), m.sub(b, m.mul(across, m.sub(1.0, weight))))


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
        product = m.choose(m("eq", a, 0.0, dtype=torch.bool), 0.0, product)
    return product if isinstance(b, (int, float)) else m.choose(m("isnan", b, dtype=torch.bool), b, product)


@lower(aten.logaddexp.default)
def logaddexp(m: Make, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    top = m("maximum", a, b)
    more = m("log1p", m("exp", m("neg", m("abs", m.sub(a, b)))))
    return m.choose(m("eq", m("abs", top), INF, dtype=torch.bool), top, m.add(top, more))


@lower(aten.logaddexp2.default)
def logaddexp2(m: Make, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    top = m("maximum", a, b)
    more = m.mul(m("log1p", m("exp2", m("neg", m("abs", m.sub(a, b))))), 1 / math.log(2))
    return m.choose(m("eq", m("abs", top), INF, dtype=torch.bool), top, m.add(top, more))


@lower(aten.logit.default)
def logit(m: Make, x: Operand, eps: float | None = None) -> Operand:
    m.floating(x)
    x = x if eps is None else m.limited(x, eps, 1 - eps)
    return m("log", m.div(x, m.sub(1.0, x)))


@lower(aten.logit_backward.default)
def logit_backward(m: Make, g: Operand, x: Operand, eps: float | None = None) -> Operand:
    m.floating(g, x)
    low, outside = (0.0, math.nan) if eps is None else (float(eps), 0.0)
    out = m("or", m.less(x, low), m.more(x, 1 - low), dtype=torch.bool)
    return m.choose(out, outside, m.div(g, m.mul(x, m.sub(1.0, x))))


# ---------------------------------------------------------------------- angles and hyperbolic functions
@lower(aten.tan.default)
def tan(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.div(m("sin", x), m("cos", x))


@lower(aten.atan.default)
def atan(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("atan", x)


@lower(aten.asin.default)
def asin(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m("atan", m.div(x, m("sqrt", m.mul(m.sub(1.0, x), m.add(1.0, x)))))


@lower(aten.acos.default)
def acos(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.mul(2.0, m("atan", m("sqrt", m.div(m.sub(1.0, x), m.add(1.0, x)))))


def _halves(m: Make, size: Operand) -> tuple[Inner, Inner]:
    """exp(size) / 2 and exp(-size) / 2: the first overflows where exp alone would earlier."""
    root = m("exp", m.mul(size, 0.5))
    return m.mul(m.mul(root, 0.5), root), m.div(0.5, m("square", root))


@lower(aten.cosh.default)
def cosh(m: Make, x: Operand) -> Operand:
    m.floating(x)
    return m.add(*_halves(m, m("abs", x)))


@lower(aten.sinh.default)
def sinh(m: Make, x: Operand) -> Operand:
    m.floating(x)
    size, less = m("abs", x), m("expm1", x)
    far = m.sub(*_halves(m, size))
    near = m.mul(m.add(less, m.div(less, m.add(less, 1.0))), 0.5)
    return m.choose(m.less(size, 1.0), near, m.choose(m.less(x, 0.0), m("neg", far), far))


@lower(aten.asinh.default)
def asinh(m: Make, x: Operand) -> Operand:
    m.floating(x)
    size = m("abs", x)
    square = m("square", x)
    near = m("log1p", m.add(size, m.div(square, m.add(1.0, m("sqrt", m.add(1.0, square))))))
    y = m.choose(m.more(size, 1e9), m.add(m("log", size), math.log(2)), near)
    return _odd(m, x, y)


def _odd(m: Make, x: Operand, y: Operand) -> Inner:
    """What is y of |x|, with the sign of x."""
    return m.choose(m("eq", x, 0.0, dtype=torch.bool), x, m.choose(m.less(x, 0.0), m("neg", y), y))


@lower(aten.acosh.default)
def acosh(m: Make, x: Operand) -> Operand:
    m.floating(x)
    more = m.sub(x, 1.0)
    near = m("log1p", m.add(more, m("sqrt", m.mul(more, m.add(x, 1.0)))))
    far = m.choose(m.more(x, 1e9), m.add(m("log", x), math.log(2)), near)
    return m.choose(m.less(x, 1.0), math.nan, far)  # whose square overflows


@lower(aten.atanh.default)
def atanh(m: Make, x: Operand) -> Operand:
    m.floating(x)
    size = m("abs", x)
    return _odd(m, x, m.mul(m("log1p", m.div(m.mul(2.0, size), m.sub(1.0, size))), 0.5))


# ---------------------------------------------------------------------- the larger, the smaller, of numbers alone
def _ignoring_nan(m: Make, op: str, a: Operand, b: Operand) -> Operand:
    m.floating(a, b)
    both = m(op, a, b)
    either = m.choose(m("isnan", b, dtype=torch.bool), a, both)
    return m.choose(m("isnan", a, dtype=torch.bool), b, either)


@lower(aten.fmax.default)
def fmax(m: Make, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "maximum", a, b)


@lower(aten.fmin.default)
def fmin(m: Make, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "minimum", a, b)
