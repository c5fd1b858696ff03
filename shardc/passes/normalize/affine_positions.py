"""Whole numbers that are affine in the indices of a value, or quotients of such: positions, and the chunks they are in.

    arange(n)[:, None] - 3             row - 3
    arange(n)[None, :] // 8            key // 8: a quotient, of which chunk a key is in
    i - i % 8                          8 (row // 8): where the chunk of a row begins
    (arange(n)[:, None] - pad) // 8    a quotient of an unknown, `pad`, which is the same for all rows and keys

A difference of two such is compared with 0: `limit` is what that says of `key - row`, `chunks` what it says of
the chunks of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.schema import given

aten = torch.ops.aten
ADDED = (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar)
DIVIDED = (aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
REMAINDERS = (aten.remainder.Scalar, aten.remainder.Tensor)
SHIFTED = (aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)


class Chunks(NamedTuple):
    """`chunk of the key - chunk of the row` is from `first` to `last`, and so `key - row` from `nearest` to `farthest`.
    Where `shift` is None, chunks begin at an unknown place, or those of rows and keys do not begin together."""

    size: int
    shift: int | None
    first: float
    last: float
    nearest: float
    farthest: float


class Floor(NamedTuple):
    """factor * (of // by)."""

    factor: int
    of: Affine
    by: int


@dataclass(frozen=True)
class Affine:
    """const + sum of coefficient * index, a coefficient for each dim, + quotients, + unknown numbers that are the same
    along the last two dims, each with a factor."""

    const: int
    coefficients: tuple[int, ...] = ()
    floors: tuple[Floor, ...] = ()
    unknown: tuple[tuple[fx.Node, int], ...] = ()

    def times(self, factor: int) -> Affine:
        return Affine(
            factor * self.const,
            tuple(factor * c for c in self.coefficients),
            tuple(floor._replace(factor=factor * floor.factor) for floor in self.floors),
            tuple((node, factor * n) for node, n in self.unknown),
        )

    def plus(self, other: Affine) -> Affine:
        ndim = max(len(self.coefficients), len(other.coefficients))
        ours, theirs = ((0,) * (ndim - len(x.coefficients)) + x.coefficients for x in (self, other))
        floors = {(floor.of, floor.by): 0 for floor in (*self.floors, *other.floors)}
        for floor in (*self.floors, *other.floors):
            floors[floor.of, floor.by] += floor.factor
        unknown = dict.fromkeys([node for node, _ in (*self.unknown, *other.unknown)], 0)
        for node, n in (*self.unknown, *other.unknown):
            unknown[node] += n
        return Affine(
            self.const + other.const,
            tuple(a + b for a, b in zip(ours, theirs, strict=True)),
            tuple(Floor(factor, of, by) for (of, by), factor in floors.items() if factor),
            tuple((node, n) for node, n in unknown.items() if n),
        )

    def moved(self, coefficients: Callable[[tuple[int, ...]], tuple[int, ...]], ndim: int) -> Affine:
        """With other coefficients for those of so many dims."""
        padded = (0,) * (ndim - len(self.coefficients)) + self.coefficients
        floors = tuple(floor._replace(of=floor.of.moved(coefficients, ndim)) for floor in self.floors)
        return replace(self, coefficients=coefficients(padded), floors=floors)

    def of_shape(self, shape: Sequence[int]) -> Affine:
        """As of a value of a shape: of a dim of size 1 there is one index, 0, and it may be broadcast."""
        return self.moved(lambda old: tuple(0 if n == 1 else c for c, n in zip(old, shape, strict=True)), len(shape))

    @property
    def fixed(self) -> bool:
        """Is it one number?"""
        return not (any(self.coefficients) or self.floors or self.unknown)

    @property
    def open(self) -> bool:
        return bool(self.unknown) or any(floor.of.open for floor in self.floors)

    def ends(self, shape: Sequence[int]) -> tuple[float, float]:
        """The lowest and the highest element, or what is below and above them, of a shape of as many dims."""
        if self.open:
            return -math.inf, math.inf
        last = [c * (n - 1) for c, n in zip(self.coefficients, shape, strict=True)]
        low, high = self.const + sum(min(0, end) for end in last), self.const + sum(max(0, end) for end in last)
        for floor in self.floors:
            ends = sorted(floor.factor * (int(end) // floor.by) for end in floor.of.ends(shape))
            low, high = low + ends[0], high + ends[1]
        return low, high

    # ---------------------------------------------------------------- what it says that this is not above 0
    def limit(self, strict: int) -> tuple[float, float] | None:
        """From where to where `key - row` is, where this is below 0, or (not `strict`) 0; None if that is not said."""
        if self.floors or self.unknown or len(self.coefficients) < 2 or any(self.coefficients[:-2]):
            return None
        row, key = self.coefficients[-2:]
        if row != -key or not key:
            return None
        end = (-self.const - strict) // abs(key)
        return (-math.inf, end) if key > 0 else (-end, math.inf)

    def chunks(self, strict: int) -> Chunks | None:
        """The same of chunks: (key // c) - (row // c) + const, or such as key - c (row // c) + const."""
        if self.unknown or len(self.coefficients) < 2 or any(self.coefficients[:-2]):
            return None
        const, floors = self.const + strict, self.floors
        if len(floors) == 1 and sum(map(abs, self.coefficients)) == 1:
            (floor,), sign = floors, sum(self.coefficients)
            if floor.factor != -sign * floor.by:
                return None
            # x <= c f - const: (x + const - 1) // c <= f - 1. Turned over, x >= c f + const: (x - const) // c >= f.
            place = Affine(const - 1 if sign > 0 else -const, tuple(sign * c for c in self.coefficients))
            floors, const = (Floor(sign, place, floor.by), floor._replace(factor=-sign)), int(sign > 0)
        elif any(self.coefficients):
            return None
        if len(floors) != 2 or floors[0].factor != -floors[1].factor or floors[0].by != floors[1].by:
            return None
        upper, lower = sorted(floors, key=lambda floor: -floor.factor)  # factor (upper - lower) + const <= 0
        most, size = -const // upper.factor, upper.by
        ofs = [floor.of for floor in (upper, lower)]
        if any(of.floors or sum(map(abs, of.coefficients)) != 1 for of in ofs) or {*ofs[0].unknown} != {
            *ofs[1].unknown
        }:
            return None
        tails = [of.coefficients[-2:] for of in ofs]
        if tails not in ([(0, 1), (1, 0)], [(1, 0), (0, 1)]):
            return None
        by_key = tails[0] == (0, 1)
        key, row = ofs if by_key else reversed(ofs)
        apart = key.const - row.const
        first, last = (-math.inf, most) if by_key else (-most, math.inf)
        known = not row.open and apart % size == 0
        return Chunks(
            size,
            row.const % size if known else None,
            first - apart // size,
            last - apart // size,
            (first - 1) * size + 1 - apart,
            (last + 1) * size - 1 - apart,
        )


@dataclass
class Numbers:
    """Reads whole numbers of a graph."""

    _known: dict[fx.Node, Affine | None] = field(default_factory=dict[fx.Node, "Affine | None"])

    def affine(self, value: Any) -> Affine | None:
        """A whole number that is affine in its indices."""
        if isinstance(value, int) and not isinstance(value, bool):
            return Affine(value)
        if not isinstance(value, fx.Node) or value.op != "call_function":
            return None
        if value not in self._known:
            of_indices = type_of(value).dtype in (torch.int64, torch.int32) if _typed(value) else False
            made = self._made(value) if of_indices else None
            shape = type_of(value).shape if of_indices else ()
            if made is None and of_indices and type_of(value).dtype == torch.int64 and math.prod(shape[-2:]) == 1:
                made = Affine(0, (0,) * len(shape), unknown=((value, 1),))
            if made is not None:
                made = made.of_shape(shape)
                limits = torch.iinfo(type_of(value).dtype)
                lowest, highest = made.ends(shape)
                if made.open:  # 64 bits are enough for what is counted
                    lowest = highest = 0
                if lowest < limits.min or highest > limits.max:  # it wraps around
                    made = None
            self._known[value] = made
        return self._known[value]

    def _made(self, value: fx.Node) -> Affine | None:
        target, args, shape = value.target, value.args, type_of(value).shape
        if target is aten.full.default:
            return Affine(args[1], (0,) * len(shape)) if isinstance(args[1], int) else None
        if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
            said = given(value)
            start, step = said.get("start", 0), said.get("step", 1)
            return Affine(start, (step,)) if isinstance(start, int) and isinstance(step, int) else None
        if target in ADDED:
            ours, theirs = (self.affine(arg) for arg in args[:2])
            factor = given(value).get("alpha", 1)
            if ours is None or theirs is None or not isinstance(factor, int):
                return None
            if target is aten.rsub.Scalar:
                return theirs.plus(ours.times(-factor))
            return ours.plus(theirs.times(factor if "add" in str(target) else -factor))
        if target in (aten.mul.Tensor, aten.mul.Scalar):
            one, other = (self.affine(arg) for arg in args[:2])
            if one is None or other is None or not (one.fixed or other.fixed):
                return None
            return one.times(other.const) if other.fixed else other.times(one.const)
        if target is aten.neg.default:
            inner = self.affine(args[0])
            return None if inner is None else inner.times(-1)
        if target is aten._to_copy.default:
            return self.affine(args[0])
        if target in (*DIVIDED, *REMAINDERS, *SHIFTED):
            return self._divided(value)
        return self._viewed(value)

    def _divided(self, value: fx.Node) -> Affine | None:
        """A quotient that is rounded down, or what is left of a division."""
        inner, by = (self.affine(arg) for arg in value.args[:2])
        if inner is None or by is None or not by.fixed or inner.floors:
            return None
        size = 2**by.const if value.target in SHIFTED and 0 <= by.const < 31 else by.const
        if size < 1 or (value.target in SHIFTED and size != 2**by.const):
            return None
        rounding = given(value).get("rounding_mode", "floor")
        if rounding != "floor" and (rounding != "trunc" or inner.open or inner.ends(type_of(value).shape)[0] < 0):
            return None
        quotient = Affine(0, (0,) * type_of(value).ndim, (Floor(1, inner, size),))
        return inner.plus(quotient.times(-size)) if value.target in REMAINDERS else quotient

    def _viewed(self, value: fx.Node) -> Affine | None:
        if value.target not in (
            *(aten.unsqueeze.default, aten.expand.default, aten.view.default, aten.slice.Tensor),
            *(aten.transpose.int, aten.squeeze.dim, aten.permute.default),
        ):
            return None
        args, shape = value.args, type_of(value).shape
        inner = self.affine(args[0])
        if inner is None:
            return None
        before = type_of(args[0]).shape  # type: ignore[arg-type]
        if inner.open:  # what is unknown lies as it does along all dims but those that are put in front
            return (
                inner.moved(lambda old: (0,) * (len(shape) - len(old)) + old, len(before))
                if (value.target is aten.expand.default and shape[len(shape) - len(before) :] == before)
                else None
            )
        if value.target is aten.expand.default:
            return inner.moved(
                lambda old: (
                    (0,) * (len(shape) - len(before))
                    + tuple(0 if n == 1 else c for c, n in zip(old, before, strict=True))
                ),
                len(before),
            )
        if value.target is aten.slice.Tensor:
            said = given(value)
            dim, start, step = said.get("dim", 0) % len(before), said.get("start") or 0, said.get("step", 1)
            start = min(max(start + before[dim] if start < 0 else start, 0), before[dim])
            return _sliced(inner, dim, start, step, len(before))
        if value.target in (aten.transpose.int, aten.permute.default):
            order = list(range(len(shape)))
            if value.target is aten.transpose.int:
                a, b = (int(d) % len(shape) for d in args[1:3])  # type: ignore[call-overload]
                order[a], order[b] = b, a
            else:
                order = [int(d) % len(shape) for d in args[1]]  # type: ignore[union-attr, call-overload]
            return inner.moved(lambda old: tuple(old[d] for d in order), len(before))
        # A view: dims of size 1 come and go, the others stay in order.
        if [n for n in before if n != 1] != [n for n in shape if n != 1]:
            return None

        def viewed(old: tuple[int, ...]) -> tuple[int, ...]:
            left = [c for c, n in zip(old, before, strict=True) if n != 1]
            return tuple(0 if n == 1 else left.pop(0) for n in shape)

        return inner.moved(viewed, len(before))


def _sliced(inner: Affine, dim: int, start: int, step: int, ndim: int) -> Affine:
    padded = (0,) * (ndim - len(inner.coefficients)) + inner.coefficients
    return Affine(
        inner.const + padded[dim] * start,
        (*padded[:dim], padded[dim] * step, *padded[dim + 1 :]),
        tuple(floor._replace(of=_sliced(floor.of, dim, start, step, ndim)) for floor in inner.floors),
    )


def _typed(value: fx.Node) -> bool:
    about = value.meta.get("shardc")
    return about is not None and about.type is not None
