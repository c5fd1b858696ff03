"""Lowerings of what integers and bools do: bits, shifts, quotients and remainders.

A kernel's integers are int64, of which the bits of a narrower one are the last; what a result has more than its dtype
is cut off where it is made (`kernels.WRAPS`). What is divided by 0 is the hardware's affair, as in torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten


# ---------------------------------------------------------------------- bools
def _true(m: Make, x: Operand) -> Operand:
    """Is it not 0?"""
    return (
        x
        if m.dtype_of(x) == torch.bool
        else m("ne", x, 0.0 if m.dtype_of(x).is_floating_point else 0, dtype=torch.bool)
    )


def _logical(op: str, *ops: Any) -> None:
    @lower(*ops)
    def logical(m: Make, *args: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return m(op, *(_true(m, arg) for arg in args))


_logical("and", aten.logical_and.default)
_logical("or", aten.logical_or.default)
_logical("xor", aten.logical_xor.default)
_logical("not", aten.logical_not.default)


# ---------------------------------------------------------------------- bits
def _whole(m: Make, *args: Operand) -> tuple[Operand, ...]:
    """Integers alone, as torch takes them to the dtype of the result."""
    if m.dtype.is_floating_point or m.dtype == torch.bool or any(m.dtype_of(arg).is_floating_point for arg in args):
        raise Unfit
    return m.alike(*args)


def _bits(op: str, *ops: Any) -> None:
    @lower(*ops)
    def bits(m: Make, *args: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        if all(m.dtype_of(arg) == torch.bool for arg in args):
            return m(op, *args)
        return m(f"bit{op}", *_whole(m, *args))


_bits("and", aten.bitwise_and.Tensor, aten.bitwise_and.Scalar)
_bits("or", aten.bitwise_or.Tensor, aten.bitwise_or.Scalar)
_bits("xor", aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar)
_bits("not", aten.bitwise_not.default)


def _shift(op: str, *ops: Any) -> None:
    @lower(*ops)
    def shift(m: Make, x: Operand, by: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        """By a number of bits that the dtype has; by others torch has rules of its own."""
        _whole(m, x)
        if type(by) is not int or not 0 <= by < 8 * m.dtype.itemsize - 1 or m.dtype_of(x) != m.dtype:
            raise Unfit
        return m(op, x, by)


_shift("shl", aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
_shift("shr", aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)


# ---------------------------------------------------------------------- quotients and remainders
def _exact(x: Operand) -> bool:
    """Is it a number by which any other can be divided exactly?"""
    return isinstance(x, (int, float)) and 1 <= abs(x) <= 2**20 and math.frexp(abs(x))[0] == 0.5


def _down(m: Make, a: Operand, b: Operand) -> Inner:
    return m("floordiv", a, b)


def _to_zero(m: Make, a: Operand, b: Operand) -> Inner:
    """The quotient rounded down, and one more where it is negative and not exact."""
    q = _down(m, a, b)
    more = m("and", m("lt", q, 0, dtype=torch.bool), m("ne", m.mul(q, b), a, dtype=torch.bool), dtype=torch.bool)
    return m.add(q, more)


@lower(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder(m: Make, a: Operand, b: Operand) -> Operand:
    if m.dtype.is_floating_point and _exact(b):
        a = m.seen(a)
        return m.sub(a, m.mul(m("floor", m.mul(a, 1 / b)), float(b)))  # type: ignore[operator]
    return m("remainder", *_whole(m, a, b))


@lower(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(m: Make, a: Operand, b: Operand) -> Operand:
    a, b = _whole(m, a, b)
    return m.sub(a, m.mul(_to_zero(m, a, b), b))


@lower(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(m: Make, a: Operand, b: Operand) -> Operand:
    return _down(m, *_whole(m, a, b))


@lower(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(m: Make, a: Operand, b: Operand, rounding_mode: str | None = None) -> Operand:
    if rounding_mode is None:
        return m.div(a, b)
    return (_down if rounding_mode == "floor" else _to_zero)(m, *_whole(m, a, b))
