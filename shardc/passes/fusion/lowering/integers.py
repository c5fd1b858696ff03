"""Lowerings of integers and bools: logic, bitwise operations, shifts.

A kernel's integers are int64; a narrower integer is its low bits. A result that exceeds its dtype is truncated where it
is computed (`kernel_builder.WRAPS`).
"""

from __future__ import annotations

from typing import Any

import torch

from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, lower

aten = torch.ops.aten


# ---------------------------------------------------------------------- bools
def _as_bool(m: LoweringBuilder, x: Operand) -> Operand:
    """Is it not 0?"""
    return (
        x
        if m.dtype_of(x) == torch.bool
        else m("ne", x, 0.0 if m.dtype_of(x).is_floating_point else 0, dtype=torch.bool)
    )


def _logical(op: str, *ops: Any) -> None:
    @lower(*ops)
    def logical(m: LoweringBuilder, *args: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        return m(op, *(_as_bool(m, arg) for arg in args))


_logical("and", aten.logical_and.default)
_logical("or", aten.logical_or.default)
_logical("xor", aten.logical_xor.default)
_logical("not", aten.logical_not.default)


# ---------------------------------------------------------------------- bits
def integer_operands(m: LoweringBuilder, *args: Operand) -> tuple[Operand, ...]:
    """Integer operands, in the dtype to which torch promotes them."""
    if m.dtype.is_floating_point or m.dtype == torch.bool or any(m.dtype_of(arg).is_floating_point for arg in args):
        raise NotLowerable
    return m.promoted(*args)


def _bits(op: str, *ops: Any) -> None:
    @lower(*ops)
    def bits(m: LoweringBuilder, *args: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        if all(m.dtype_of(arg) == torch.bool for arg in args):
            return m(op, *args)
        return m(f"bit{op}", *integer_operands(m, *args))


_bits("and", aten.bitwise_and.Tensor, aten.bitwise_and.Scalar, aten.bitwise_and.Scalar_Tensor)
_bits("or", aten.bitwise_or.Tensor, aten.bitwise_or.Scalar, aten.bitwise_or.Scalar_Tensor)
_bits("xor", aten.bitwise_xor.Tensor, aten.bitwise_xor.Scalar, aten.bitwise_xor.Scalar_Tensor)
_bits("not", aten.bitwise_not.default)


def _shift(op: str, *ops: Any) -> None:
    @lower(*ops)
    def shift(m: LoweringBuilder, x: Operand, by: Operand) -> Operand:  # pyright: ignore[reportUnusedFunction]
        """By fewer bits than the dtype has; for others torch has rules of its own."""
        integer_operands(m, x)
        if type(by) is not int or not 0 <= by < 8 * m.dtype.itemsize - 1 or m.dtype_of(x) != m.dtype:
            raise NotLowerable
        return m(op, x, by)


_shift("shl", aten.__lshift__.Scalar, aten.bitwise_left_shift.Tensor_Scalar)
_shift("shr", aten.__rshift__.Scalar, aten.bitwise_right_shift.Tensor_Scalar)


def _shifted(m: LoweringBuilder, op: str, x: Operand, by: Operand, most: int, beyond: Operand) -> Operand:
    """Shift by a tensor of bit counts; the result is `beyond` where a count is negative or more than `most`."""
    inside = m("and", m("ge", by, 0, dtype=torch.bool), m.less_equal(by, most), dtype=torch.bool)
    return m.where(inside, m(op, x, m.where(inside, by, 0)), beyond)


@lower(aten.__lshift__.Tensor, aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Scalar_Tensor)
def left_shift(m: LoweringBuilder, x: Operand, by: Operand) -> Operand:
    x, by = integer_operands(m, x, by)
    return _shifted(m, "shl", x, by, 8 * m.dtype.itemsize - 1, 0)


@lower(aten.__rshift__.Tensor, aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Scalar_Tensor)
def right_shift(m: LoweringBuilder, x: Operand, by: Operand) -> Operand:
    """A shift by too many bits leaves the sign."""
    x, by = integer_operands(m, x, by)
    most = 8 * m.dtype.itemsize - (2 if m.dtype.is_signed else 1)
    past = min(most + 1, 63)
    return _shifted(m, "shr", x, by, most, x >> past if isinstance(x, int) else m("shr", x, past))
