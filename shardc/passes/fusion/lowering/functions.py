"""Lowerings of rarer functions of numbers: rounding, signs, logarithms, angles, the larger of two.

Each computes what ATen does, special values included: where ATen selects, so does the kernel.
"""

from __future__ import annotations

import math

import torch

from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten
INF = float("inf")


# ---------------------------------------------------------------------- numbers
@lower(aten.isinf.default)
def isinf(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("or", m("eq", x, INF, dtype=torch.bool), m("eq", x, -INF, dtype=torch.bool))


@lower(aten.isposinf.default)
def isposinf(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("eq", x, INF)


@lower(aten.isneginf.default)
def isneginf(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("eq", x, -INF)


@lower(aten.nan_to_num.default)
def nan_to_num(
    m: LoweringBuilder, x: Operand, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Operand:
    m.require_floats(x)
    limits = torch.finfo(m.dtype)
    finite = m.where(m("eq", x, -INF, dtype=torch.bool), limits.min if neginf is None else neginf, x)
    finite = m.where(m("eq", x, INF, dtype=torch.bool), limits.max if posinf is None else posinf, finite)
    return m.where(m("isnan", x, dtype=torch.bool), nan or 0.0, finite)


@lower(aten.sgn.default)
def sgn(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("sign", x)


@lower(aten.trunc.default)
def trunc(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("trunc", m.as_stored(x))


@lower(aten.frac.default)
def frac(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    x = m.as_stored(x)
    return m.sub(x, m("trunc", x))


@lower(aten.round.default)
def round_(m: LoweringBuilder, x: Operand) -> Operand:
    """Ties are rounded to even."""
    m.require_floats(x)
    return m("round", m.as_stored(x))


def has_minus_sign(m: LoweringBuilder, x: Operand) -> Temporary:
    """Is the sign a minus? It is for -0. The sign of a NaN depends on the hardware."""
    x = m.as_stored(x)
    turned = m("reciprocal", x, dtype=torch.float32)
    return m("or", m.less(x, 0.0), m("eq", turned, -INF, dtype=torch.bool), dtype=torch.bool)


@lower(aten.signbit.default)
def signbit(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return has_minus_sign(m, x)


@lower(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(m: LoweringBuilder, x: Operand, by: Operand) -> Operand:
    m.require_floats(x, by)
    size = m("abs", x)
    if isinstance(by, (int, float)):
        return m("neg", size) if math.copysign(1.0, by) < 0 else size
    return m.where(has_minus_sign(m, by), m("neg", size), size)


@lower(aten.heaviside.default)
def heaviside(m: LoweringBuilder, x: Operand, at_0: Operand) -> Operand:
    m.require_floats(x, at_0)
    step = m.where(m.less(x, 0.0), 0.0, 1.0)
    step = m.where(m("isnan", x, dtype=torch.bool), 0.0, step)
    return m.where(m("eq", x, 0.0, dtype=torch.bool), at_0, step)


@lower(aten.hypot.default)
def hypot(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    """The larger operand is factored out: the squares may overflow where the root of their sum does not."""
    m.require_floats(a, b)
    a, b = m("abs", a), m("abs", b)
    large, small = m("maximum", a, b), m("minimum", a, b)
    root = m.mul(large, m("sqrt", m.add(1.0, m("square", m.div(small, large)))))
    root = m.where(m("eq", large, 0.0, dtype=torch.bool), large, root)
    infinite = m("or", m("eq", a, INF, dtype=torch.bool), m("eq", b, INF, dtype=torch.bool), dtype=torch.bool)
    return m.where(infinite, INF, root)


@lower(aten.log10.default)
def log10(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.mul(m("log2", x), math.log10(2))


@lower(aten.deg2rad.default)
def deg2rad(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.mul(x, math.pi / 180)


@lower(aten.rad2deg.default)
def rad2deg(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.mul(x, 180 / math.pi)


@lower(aten.positive.default)
def positive(m: LoweringBuilder, x: Operand) -> Operand:
    return m("same", x)


@lower(aten.lerp.Scalar)
def lerp(m: LoweringBuilder, a: Operand, b: Operand, weight: float) -> Operand:
    across = m.sub(b, a)
    return m.add(a, m.mul(across, weight)) if abs(weight) < 0.5 else m.sub(b, m.mul(across, 1 - weight))


@lower(aten.lerp.Tensor)
def lerp_by(m: LoweringBuilder, a: Operand, b: Operand, weight: Operand) -> Operand:
    m.require_floats(a, b, weight)
    across, near = m.sub(b, a), m.less(m("abs", weight), 0.5)
    return m.where(near, m.add(a, m.mul(weight, across)), m.sub(b, m.mul(across, m.sub(1.0, weight))))


@lower(aten.xlogy.Tensor, aten.xlogy.Scalar_Other, aten.xlogy.Scalar_Self)
def xlogy(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    m.require_floats(a, b)
    if isinstance(b, (int, float)):
        if not 0 < b < INF:
            raise NotLowerable
        log: Operand = math.log(b)
    else:
        log = m("log", b)
    if isinstance(a, (int, float)) and a == 0:
        raise NotLowerable
    product = m.mul(a, log)
    if not isinstance(a, (int, float)):
        product = m.where(m("eq", a, 0.0, dtype=torch.bool), 0.0, product)
    return product if isinstance(b, (int, float)) else m.where(m("isnan", b, dtype=torch.bool), b, product)


@lower(aten.logaddexp.default)
def logaddexp(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    m.require_floats(a, b)
    top = m("maximum", a, b)
    more = m("log1p", m("exp", m("neg", m("abs", m.sub(a, b)))))
    return m.where(m("eq", m("abs", top), INF, dtype=torch.bool), top, m.add(top, more))


@lower(aten.logaddexp2.default)
def logaddexp2(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    m.require_floats(a, b)
    top = m("maximum", a, b)
    more = m.mul(m("log1p", m("exp2", m("neg", m("abs", m.sub(a, b))))), 1 / math.log(2))
    return m.where(m("eq", m("abs", top), INF, dtype=torch.bool), top, m.add(top, more))


@lower(aten.logit.default)
def logit(m: LoweringBuilder, x: Operand, eps: float | None = None) -> Operand:
    m.require_floats(x)
    x = x if eps is None else m.clamp(x, eps, 1 - eps)
    return m("log", m.div(x, m.sub(1.0, x)))


@lower(aten.logit_backward.default)
def logit_backward(m: LoweringBuilder, g: Operand, x: Operand, eps: float | None = None) -> Operand:
    m.require_floats(g, x)
    low, outside = (0.0, math.nan) if eps is None else (float(eps), 0.0)
    out = m("or", m.less(x, low), m.greater(x, 1 - low), dtype=torch.bool)
    return m.where(out, outside, m.div(g, m.mul(x, m.sub(1.0, x))))


# ---------------------------------------------------------------------- angles and hyperbolic functions
@lower(aten.tan.default)
def tan(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.div(m("sin", x), m("cos", x))


@lower(aten.atan.default)
def atan(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("atan", x)


@lower(aten.asin.default)
def asin(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m("atan", m.div(x, m("sqrt", m.mul(m.sub(1.0, x), m.add(1.0, x)))))


@lower(aten.acos.default)
def acos(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.mul(2.0, m("atan", m("sqrt", m.div(m.sub(1.0, x), m.add(1.0, x)))))


def _half_exponentials(m: LoweringBuilder, size: Operand) -> tuple[Temporary, Temporary]:
    """exp(size) / 2 and exp(-size) / 2. The first overflows later than exp(size) would."""
    root = m("exp", m.mul(size, 0.5))
    return m.mul(m.mul(root, 0.5), root), m.div(0.5, m("square", root))


@lower(aten.cosh.default)
def cosh(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    return m.add(*_half_exponentials(m, m("abs", x)))


@lower(aten.sinh.default)
def sinh(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    size, less = m("abs", x), m("expm1", x)
    far = m.sub(*_half_exponentials(m, size))
    near = m.mul(m.add(less, m.div(less, m.add(less, 1.0))), 0.5)
    return m.where(m.less(size, 1.0), near, m.where(m.less(x, 0.0), m("neg", far), far))


@lower(aten.asinh.default)
def asinh(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    size = m("abs", x)
    square = m("square", x)
    near = m("log1p", m.add(size, m.div(square, m.add(1.0, m("sqrt", m.add(1.0, square))))))
    y = m.where(m.greater(size, 1e9), m.add(m("log", size), math.log(2)), near)
    return _with_sign_of(m, x, y)


def _with_sign_of(m: LoweringBuilder, x: Operand, y: Operand) -> Temporary:
    """y, a function of |x|, with the sign of x."""
    return m.where(m("eq", x, 0.0, dtype=torch.bool), x, m.where(m.less(x, 0.0), m("neg", y), y))


@lower(aten.acosh.default)
def acosh(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    more = m.sub(x, 1.0)
    near = m("log1p", m.add(more, m("sqrt", m.mul(more, m.add(x, 1.0)))))
    far = m.where(m.greater(x, 1e9), m.add(m("log", x), math.log(2)), near)
    return m.where(m.less(x, 1.0), math.nan, far)  # `far`: the square would overflow


@lower(aten.atanh.default)
def atanh(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    size = m("abs", x)
    return _with_sign_of(m, x, m.mul(m("log1p", m.div(m.mul(2.0, size), m.sub(1.0, size))), 0.5))


# ---------------------------------------------------------------------- the larger and the smaller, without NaNs
def _ignoring_nan(m: LoweringBuilder, op: str, a: Operand, b: Operand) -> Operand:
    m.require_floats(a, b)
    both = m(op, a, b)
    either = m.where(m("isnan", b, dtype=torch.bool), a, both)
    return m.where(m("isnan", a, dtype=torch.bool), b, either)


@lower(aten.fmax.default)
def fmax(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "maximum", a, b)


@lower(aten.fmin.default)
def fmin(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    return _ignoring_nan(m, "minimum", a, b)
