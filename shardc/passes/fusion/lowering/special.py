"""Lowerings of special functions, and of other functions that few models use.

Each computes what ATen does, special values included: where ATen selects, so does the kernel. What libdevice or
`kernels_triton.library.kernels.special` provides is one op of the kernels' table; the rest is written with these ops.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardc.passes.fusion.lowering.functions import INF, has_minus_sign
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten
NAN = math.nan
NAMED = {
    "erfc": (aten.erfc,),
    "erfcx": (aten.special_erfcx,),
    "erfinv": (aten.erfinv,),
    "ndtri": (aten.special_ndtri,),
    "lgamma": (aten.lgamma,),
    "digamma": (aten.digamma,),
    "i0": (aten.i0, aten.special_modified_bessel_i0),
    "i1": (aten.special_i1, aten.special_modified_bessel_i1),
    "k0": (aten.special_modified_bessel_k0,),
    "k1": (aten.special_modified_bessel_k1,),
    "scaled_k0": (aten.special_scaled_modified_bessel_k0,),
    "scaled_k1": (aten.special_scaled_modified_bessel_k1,),
}


def _named(op: str, *packets: Any) -> None:
    @lower(*(packet.default for packet in packets))
    def unary(m: LoweringBuilder, x: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        m.require_floats(x)
        return m(op, x)


for name, packets in NAMED.items():
    _named(name, *packets)


def _is_nan(m: LoweringBuilder, x: Operand) -> Temporary:
    return m("isnan", x, dtype=torch.bool)


def _is(m: LoweringBuilder, x: Operand, number: float) -> Temporary:
    return m("eq", x, number, dtype=torch.bool)


# ---------------------------------------------------------------------- angles
@lower(aten.atan2.default)
def atan2(m: LoweringBuilder, y: Operand, x: Operand) -> Operand:
    """The arctangent of a ratio up to 1, moved to its octant. Of zeros and infinities only the signs matter."""
    m.require_floats(y, x)
    height, width = m("abs", y), m("abs", x)
    large, small = m("maximum", height, width), m("minimum", height, width)
    same = m("or", _is(m, large, 0.0), _is(m, small, INF), dtype=torch.bool)
    ratio = m.where(same, m.where(_is(m, large, 0.0), 0.0, 1.0), m.div(small, large))
    turned = m("atan", ratio)
    turned = m.where(m.greater(height, width), m.sub(math.pi / 2, turned), turned)
    turned = m.where(has_minus_sign(m, x), m.sub(math.pi, turned), turned)
    turned = m.where(has_minus_sign(m, y), m("neg", turned), turned)
    return m.where(m("or", _is_nan(m, x), _is_nan(m, y), dtype=torch.bool), NAN, turned)


@lower(aten.angle.default)
def angle(m: LoweringBuilder, x: Operand) -> Operand:
    """Of a real number: 0 or pi."""
    m.require_floats(x)
    return m.where(_is_nan(m, x), x, m.where(m.less(x, 0.0), math.pi, 0.0))


@lower(aten.sinc.default)
def sinc(m: LoweringBuilder, x: Operand) -> Operand:
    m.require_floats(x)
    product = m.mul(x, math.pi)
    return m.where(_is(m, x, 0.0), 1.0, m.div(m("sin", product), product))


@lower(aten.special_spherical_bessel_j0.default)
def spherical_bessel_j0(m: LoweringBuilder, x: Operand) -> Operand:
    """sin(x) / x, near 0 by its series."""
    m.require_floats(x)
    square = m("square", x)
    series = m.add(m.mul(square, -1 / 5040), 1 / 120)
    series = m.add(m.mul(m.add(m.mul(series, square), -1 / 6), square), 1.0)
    far = m.where(_is(m, m("abs", x), INF), 0.0, m.div(m("sin", x), x))
    return m.where(m.less(m("abs", x), 0.5), series, far)


# ---------------------------------------------------------------------- logarithms and exponentials
@lower(aten.special_xlog1py.default, aten.special_xlog1py.other_scalar, aten.special_xlog1py.self_scalar)
def xlog1py(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    m.require_floats(a, b)
    if isinstance(a, (int, float)):
        if a == 0:
            raise NotLowerable
        return m.mul(a, m("log1p", b))
    if isinstance(b, (int, float)):
        if not -1 < b < INF:
            raise NotLowerable
        return m.where(_is(m, a, 0.0), 0.0, m.mul(a, math.log1p(b)))
    product = m.where(_is(m, a, 0.0), 0.0, m.mul(a, m("log1p", b)))
    return m.where(_is_nan(m, b), b, product)


@lower(aten.special_entr.default)
def entr(m: LoweringBuilder, x: Operand) -> Operand:
    """-x log x; 0 at 0."""
    m.require_floats(x)
    inside = m("neg", m.mul(x, m("log", x)))
    entropy = m.where(m.greater(x, 0.0), inside, m.where(_is(m, x, 0.0), 0.0, -INF))
    return m.where(_is_nan(m, x), x, entropy)


@lower(aten.special_log_ndtr.default)
def log_ndtr(m: LoweringBuilder, x: Operand) -> Operand:
    """In the left tail the distribution function itself would be 0."""
    m.require_floats(x)
    t = m.mul(x, math.sqrt(0.5))
    tail = m.sub(m("log", m.mul(m("erfcx", m("neg", t)), 0.5)), m("square", t))
    return m.where(m.less(x, -1.0), tail, m("log1p", m.mul(m("erfc", t), -0.5)))


@lower(aten.ldexp.Tensor)
def ldexp(m: LoweringBuilder, x: Operand, exponent: Operand) -> Operand:
    if not m.dtype.is_floating_point:
        raise NotLowerable
    return m.mul(x, m("pow", 2.0, exponent))


# ---------------------------------------------------------------------- the gamma function's, Bessel functions
@lower(aten.polygamma.default)
def polygamma(m: LoweringBuilder, n: int, x: Operand) -> Operand:
    m.require_floats(x)
    if n > 1:
        raise NotLowerable
    return m("trigamma" if n else "digamma", x)


@lower(aten.mvlgamma.default)
def mvlgamma(m: LoweringBuilder, x: Operand, p: int) -> Operand:
    m.require_floats(x)
    if p > 8:
        raise NotLowerable
    total: Operand = p * (p - 1) / 4 * math.log(math.pi)
    for j in range(p):
        total = m.add(m("lgamma", m.sub(x, j / 2)), total)
    return total


def _scaled(m: LoweringBuilder, op: str, x: Operand, terms: tuple[float, ...]) -> Operand:
    """exp(-|x|) I(x): past 20, where I overflows soon, by the asymptotic series in 1 / |x|."""
    m.require_floats(x)
    size = m("abs", x)
    near = m.mul(m("exp", m("neg", size)), m(op, size))
    inverse = m("reciprocal", size)
    series: Operand = terms[-1]
    for term in reversed(terms[:-1]):
        series = m.add(m.mul(inverse, series), term)
    far = m.mul(m("sqrt", m.mul(inverse, 1 / (2 * math.pi))), series)
    return m.where(m.less(size, 20.0), near, far)


@lower(aten.special_i0e.default)
def i0e(m: LoweringBuilder, x: Operand) -> Operand:
    return _scaled(m, "i0", x, (1.0, 1 / 8, 9 / 128, 225 / 3072, 11025 / 98304, 893025 / 3932160))


@lower(aten.special_i1e.default)
def i1e(m: LoweringBuilder, x: Operand) -> Operand:
    y = _scaled(m, "i1", x, (1.0, -3 / 8, -15 / 128, -315 / 3072, -14175 / 98304, -1091475 / 3932160))
    return m.where(m.less(x, 0.0), m("neg", y), y)


# ---------------------------------------------------------------------- thresholds
# As eager torch has them on a CPU. Its GPU kernels round the thresholds of softshrink and threshold to 16-bit inputs'
# dtype as well (0.3 to 0.30078 in bfloat16, torch 2.11 on an H200): there, an element that
# equals the threshold falls on the other side.
@lower(aten.hardshrink.default)
def hardshrink(m: LoweringBuilder, x: Operand, least: float = 0.5) -> Operand:
    m.require_floats(x)
    return m.where(_within(m, x, _of(m, x, least)), 0.0, x)


@lower(aten.hardshrink_backward.default, aten.softshrink_backward.default)
def shrink_backward(m: LoweringBuilder, g: Operand, x: Operand, least: float) -> Operand:
    m.require_floats(g, x)
    return m.where(_within(m, x, _of(m, x, least)), 0.0, g)


def _of(m: LoweringBuilder, x: Operand, least: float) -> float:
    """A threshold in the dtype of its operand, as torch rounds it."""
    return float(torch.tensor(least, dtype=m.dtype_of(x)))


def _within(m: LoweringBuilder, x: Operand, least: float) -> Temporary:
    return m("and", m("ge", x, -least, dtype=torch.bool), m.less_equal(x, least), dtype=torch.bool)


@lower(aten.softshrink.default)
def softshrink(m: LoweringBuilder, x: Operand, least: float = 0.5) -> Operand:
    m.require_floats(x)
    least = float(least)
    inside = m.where(m.less(x, -least), m.add(x, least), m.where(_is_nan(m, x), x, 0.0))
    return m.where(m.greater(x, least), m.sub(x, least), inside)


@lower(aten.native_dropout_backward.default)
def dropout_backward(m: LoweringBuilder, g: Operand, mask: Operand, scale: float) -> Operand:
    m.require_floats(g)
    return m.mul(m.mul(g, mask), float(scale))


# ---------------------------------------------------------------------- neighbours, decimals
@lower(aten.nextafter.default)
def nextafter(m: LoweringBuilder, x: Operand, to: Operand) -> Operand:
    """A kernel computes the neighbours of float32 only."""
    if not all(m.dtype_of(arg) == torch.float32 for arg in (x, to)) or m.dtype != torch.float32:
        raise NotLowerable
    return m("nextafter", x, to)


@lower(aten.round.decimals)
def round_decimals(m: LoweringBuilder, x: Operand, decimals: int = 0) -> Operand:
    if m.dtype != torch.float32 or abs(decimals) > 10:  # eager torch rounds the product of 16-bit floats
        raise NotLowerable
    power = float(10 ** abs(decimals))
    if decimals < 0:
        return m.mul(m("round", m("div_rn", x, power)), power)
    return m("div_rn", m("round", m.mul(x, power)), power)
