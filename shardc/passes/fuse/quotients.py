"""Lowerings of quotients that are rounded, and of remainders: of integers, and of floats, exact as torch's.

What is left of a division jumps: of floats it is seen as eager torch sees them, and a quotient that is cut off is the
float nearest to it. Of two tensors of 16 bits eager torch rounds the quotient before: these stay calls. Integers that
are divided by 0 are the hardware's affair, as in torch.
"""

from __future__ import annotations

import math

import torch

from shardc.passes.fuse.integers import whole
from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten


def _seen(m: Make, a: Operand, b: Operand) -> tuple[Operand, ...]:
    """In the dtype that torch takes both to: 32767 is 32768 where a float16 divides it."""
    return tuple(_rounded(m, x) if isinstance(x, (int, float)) else m.seen(x) for x in m.compared(a, b))


def _rounded(m: Make, x: float) -> float:
    return float(torch.tensor(float(x), dtype=m.dtype))


def _divided(m: Make, a: Operand, b: Operand) -> tuple[Operand, ...]:
    """As `_seen`, but for a number, which torch divides by as it is."""
    if m.dtype.itemsize == 2 and not isinstance(a, (int, float)) and not isinstance(b, (int, float)):
        raise Unfit
    return tuple(float(x) if isinstance(x, (int, float)) else m.seen(x) for x in m.compared(a, b))


def _exact(x: Operand) -> bool:
    """Is it a number by which any other can be divided exactly?"""
    return isinstance(x, (int, float)) and 1 <= abs(x) <= 2**20 and math.frexp(abs(x))[0] == 0.5


def _turned(m: Make, rest: Operand, b: Operand) -> Inner:
    """Is there a rest, of another sign than the divisor?"""
    below = b < 0 if isinstance(b, (int, float)) else m.less(b, 0.0)
    other = m("xor", m.less(rest, 0.0), below, dtype=torch.bool)
    return m("and", m("ne", rest, 0.0, dtype=torch.bool), other, dtype=torch.bool)


# ---------------------------------------------------------------------- remainders
@lower(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(m: Make, a: Operand, b: Operand) -> Operand:
    if not m.dtype.is_floating_point:
        return m("remainder", *whole(m, a, b))
    if _exact(b):
        a = m.seen(a)
        rest = m.sub(a, m.mul(m("floor", m.mul(a, 1 / b)), b))  # type: ignore[operator]
        return m.choose(m("eq", rest, 0.0, dtype=torch.bool), m.mul(a, 0.0), rest)  # the sign of what was divided
    a, b = _seen(m, a, b)
    rest = m("fmod", a, b)
    return m.choose(_turned(m, rest, b), m.add(rest, b), rest)


@lower(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(m: Make, a: Operand, b: Operand) -> Operand:
    if m.dtype.is_floating_point:
        return m("fmod", *_seen(m, a, b))
    a, b = whole(m, a, b)
    return m.sub(a, m.mul(_to_zero(m, a, b), b))


# ---------------------------------------------------------------------- quotients
@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(m: Make, a: Operand, b: Operand) -> Operand:
    """Of floats, the exact quotient of what has no rest, rounded once more: as torch, never one too many."""
    if not m.dtype.is_floating_point:
        return m("floordiv", *whole(m, a, b))
    a, b = _divided(m, a, b)
    rest = m("fmod", a, b)
    quotient = m("div_rn", m.sub(a, rest), b)
    quotient = m.choose(_turned(m, rest, b), m.sub(quotient, 1.0), quotient)
    down = m("floor", quotient)
    down = m.choose(m.more(m.sub(quotient, down), 0.5), m.add(down, 1.0), down)
    ratio = m("div_rn", a, b)
    down = m.choose(m("eq", quotient, 0.0, dtype=torch.bool), m.mul(ratio, 0.0), down)
    if isinstance(b, (int, float)):
        return down if b else ratio
    return m.choose(m("eq", b, 0.0, dtype=torch.bool), ratio, down)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(m: Make, a: Operand, b: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return m.div(a, b)
    if rounding_mode == "floor":
        return floor_divide(m, a, b)  # type: ignore[return-value]
    if m.dtype.is_floating_point:
        return m("trunc", m("div_rn", *_divided(m, a, b)))
    return _to_zero(m, *whole(m, a, b))


def _to_zero(m: Make, a: Operand, b: Operand) -> Inner:
    """The quotient rounded down, and one more where it is negative and not exact."""
    q = m("floordiv", a, b)
    more = m("and", m("lt", q, 0, dtype=torch.bool), m("ne", m.mul(q, b), a, dtype=torch.bool), dtype=torch.bool)
    return m.add(q, more)
