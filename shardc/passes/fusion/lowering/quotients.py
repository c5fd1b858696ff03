"""Lowerings of quotients that are rounded, and of remainders: of integers, and of floats, exact as torch's.

A remainder is discontinuous. Float operands are therefore rounded as eager torch rounds them, and a quotient that is
truncated is the nearest float to the exact one. Eager torch rounds the quotient of two 16-bit tensors first: these stay
calls. An integer division by 0 depends on the hardware, as in torch.
"""

from __future__ import annotations

import math

import torch

from shardc.passes.fusion.lowering.integers import integer_operands
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten


def _eager_operands(m: LoweringBuilder, a: Operand, b: Operand) -> tuple[Operand, ...]:
    """Both operands in the dtype to which torch promotes them: 32767 is 32768 where a float16 divides it."""
    return tuple(_rounded(m, x) if isinstance(x, (int, float)) else m.as_stored(x) for x in m.comparison_operands(a, b))


def _rounded(m: LoweringBuilder, x: float) -> float:
    return float(torch.tensor(float(x), dtype=m.dtype))


def _quotient_operands(m: LoweringBuilder, a: Operand, b: Operand) -> tuple[Operand, ...]:
    """As `_eager_operands`, but torch does not round a number that it divides by."""
    if m.dtype.itemsize == 2 and not isinstance(a, (int, float)) and not isinstance(b, (int, float)):
        raise NotLowerable
    return tuple(float(x) if isinstance(x, (int, float)) else m.as_stored(x) for x in m.comparison_operands(a, b))


def _divides_exactly(x: Operand) -> bool:
    """Is it a number by which every float can be divided exactly: a power of two?"""
    return isinstance(x, (int, float)) and 1 <= abs(x) <= 2**20 and math.frexp(abs(x))[0] == 0.5


def _needs_correction(m: LoweringBuilder, rest: Operand, b: Operand) -> Temporary:
    """Is there a remainder with another sign than the divisor's?"""
    below = b < 0 if isinstance(b, (int, float)) else m.less(b, 0.0)
    other = m("xor", m.less(rest, 0.0), below, dtype=torch.bool)
    return m("and", m("ne", rest, 0.0, dtype=torch.bool), other, dtype=torch.bool)


# ---------------------------------------------------------------------- remainders
@lower(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    if not m.dtype.is_floating_point:
        return m("remainder", *integer_operands(m, a, b))
    if _divides_exactly(b):
        a = m.as_stored(a)
        rest = m.sub(a, m.mul(m("floor", m.mul(a, 1 / b)), b))  # type: ignore[operator]
        return m.where(m("eq", rest, 0.0, dtype=torch.bool), m.mul(a, 0.0), rest)  # a zero has the dividend's sign
    a, b = _eager_operands(m, a, b)
    rest = m("fmod", a, b)
    return m.where(_needs_correction(m, rest, b), m.add(rest, b), rest)


@lower(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    if m.dtype.is_floating_point:
        return m("fmod", *_eager_operands(m, a, b))
    a, b = integer_operands(m, a, b)
    return m.sub(a, m.mul(_truncated_quotient(m, a, b), b))


# ---------------------------------------------------------------------- quotients
@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(m: LoweringBuilder, a: Operand, b: Operand) -> Operand:
    """For floats, the remainder is subtracted first, so that the quotient is exact and then rounded: as in torch, it is
    never one too large."""
    if not m.dtype.is_floating_point:
        return m("floordiv", *integer_operands(m, a, b))
    a, b = _quotient_operands(m, a, b)
    rest = m("fmod", a, b)
    quotient = m("div_rn", m.sub(a, rest), b)
    quotient = m.where(_needs_correction(m, rest, b), m.sub(quotient, 1.0), quotient)
    down = m("floor", quotient)
    down = m.where(m.greater(m.sub(quotient, down), 0.5), m.add(down, 1.0), down)
    ratio = m("div_rn", a, b)
    down = m.where(m("eq", quotient, 0.0, dtype=torch.bool), m.mul(ratio, 0.0), down)
    if isinstance(b, (int, float)):
        return down if b else ratio
    return m.where(m("eq", b, 0.0, dtype=torch.bool), ratio, down)


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(m: LoweringBuilder, a: Operand, b: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return m.div(a, b)
    if rounding_mode == "floor":
        return floor_divide(m, a, b)  # type: ignore[return-value]
    if m.dtype.is_floating_point:
        return m("trunc", m("div_rn", *_quotient_operands(m, a, b)))
    return _truncated_quotient(m, *integer_operands(m, a, b))


def _truncated_quotient(m: LoweringBuilder, a: Operand, b: Operand) -> Temporary:
    """The quotient rounded down, plus one where it is negative and inexact."""
    q = m("floordiv", a, b)
    more = m("and", m("lt", q, 0, dtype=torch.bool), m("ne", m.mul(q, b), a, dtype=torch.bool), dtype=torch.bool)
    return m.add(q, more)
