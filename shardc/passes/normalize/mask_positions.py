"""What masks say of positions: which keys a row sees, where that follows from how far apart they are.

    kv <= q                              0 keys ahead            causal
    kv > q - w                           w - 1 keys behind       a window of w
    (q - kv < w) & (kv <= q) & padding   both, and `padding`     which is what is left of the mask

Values that are computed from `arange` are affine in their indices, so a comparison of two of them is a bound on
`key - row`, or always true. And, or and not join bounds; an additive mask is 0 where a row sees a key and -inf where it
does not. All else is left of a mask as it is.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.schema import given

aten = torch.ops.aten
LOWEST = tuple(torch.finfo(dtype).min for dtype in (torch.float32, torch.float64, torch.bfloat16))


@dataclass(frozen=True)
class Part:
    """What is left of a mask: a value, or its negation, with dims of size 1 put in at these places from the end."""

    value: fx.Node
    negated: bool = False
    unsqueezed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Seen:
    """A row sees keys of which `key - row` is from `first` to `last`, of those that all `parts` let it see. With
    `lowest`, hidden keys have a score that is very low and not -inf: a row that sees none at all attends to all."""

    first: float = -math.inf
    last: float = math.inf
    parts: tuple[Part, ...] = ()
    lowest: bool = False

    def __and__(self, other: Seen) -> Seen:
        return Seen(
            max(self.first, other.first),
            min(self.last, other.last),
            (*self.parts, *(part for part in other.parts if part not in self.parts)),
            self.lowest or other.lowest,
        )


@dataclass(frozen=True)
class _Affine:
    """const + sum of coefficient * index, a coefficient for each dim."""

    const: int
    coefficients: tuple[int, ...] = ()

    def times(self, factor: int) -> _Affine:
        return _Affine(factor * self.const, tuple(factor * c for c in self.coefficients))

    def plus(self, other: _Affine) -> _Affine:
        ndim = max(len(self.coefficients), len(other.coefficients))
        ours, theirs = ((0,) * (ndim - len(x.coefficients)) + x.coefficients for x in (self, other))
        return _Affine(self.const + other.const, tuple(a + b for a, b in zip(ours, theirs, strict=True)))

    def ends(self, shape: Sequence[int]) -> tuple[int, int]:
        """The lowest and the highest element, of a shape of as many dims."""
        last = [c * (n - 1) for c, n in zip(self.coefficients, shape, strict=True)]
        return self.const + sum(min(0, end) for end in last), self.const + sum(max(0, end) for end in last)


COMPARED: Mapping[Any, Callable[[Any, Any], bool]] = {
    aten.le.Tensor: operator.le,
    aten.lt.Tensor: operator.lt,
    aten.ge.Tensor: operator.ge,
    aten.gt.Tensor: operator.gt,
    aten.le.Scalar: operator.le,
    aten.lt.Scalar: operator.lt,
    aten.ge.Scalar: operator.ge,
    aten.gt.Scalar: operator.gt,
}
OPPOSITE = {operator.le: operator.gt, operator.gt: operator.le, operator.lt: operator.ge, operator.ge: operator.lt}
AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)
OR = (aten.bitwise_or.Tensor, aten.logical_or.default)
NOT = (aten.bitwise_not.default, aten.logical_not.default)


@dataclass
class Positions:
    """Reads the values of a graph."""

    _known: dict[fx.Node, _Affine | None] = field(default_factory=dict[fx.Node, "_Affine | None"])

    # ------------------------------------------------------------------ masks
    def seen(self, mask: fx.Node) -> Seen | None:
        """What a mask of scores says; None where it can not be told apart."""
        return self._read(mask, True) if type_of(mask).dtype == torch.bool else self._added(mask)

    def _read(self, mask: fx.Node, positive: bool) -> Seen:
        """Of a boolean mask, or its negation."""
        target, args = mask.target, mask.args
        if target in NOT and type_of(args[0]).dtype == torch.bool:  # type: ignore[arg-type]
            return self._read(args[0], not positive)  # type: ignore[arg-type]
        if target in (aten.eq.Scalar, aten.ne.Scalar) and args[1] == 0 and self._is_flag(args[0]):
            return self._read(args[0], positive == (target is aten.ne.Scalar))  # type: ignore[arg-type]
        flags = all(isinstance(a, fx.Node) and type_of(a).dtype == torch.bool for a in args[:2])
        if target in (AND if positive else OR) and flags:
            return self._read(args[0], positive) & self._read(args[1], positive)  # type: ignore[arg-type]
        if target in COMPARED:
            how = COMPARED[target]
            if (bound := self._bound(mask, args, how if positive else OPPOSITE[how])) is not None:
                return bound
        if target in (aten.tril.default, aten.triu.default) and self.constant(args[0]) == 1:
            diagonal = int(given(mask).get("diagonal", 0))
            lower = target is aten.tril.default
            if lower == positive:
                return Seen(last=diagonal if lower else diagonal - 1)
            return Seen(first=diagonal if not lower else diagonal + 1)
        if self.constant(mask) == int(positive):
            return Seen()
        moved = self._moved(mask, positive)
        return Seen(parts=(Part(mask, not positive),)) if moved is None else moved

    def _is_flag(self, value: Any) -> bool:
        """Is it true or false, or a triangle of ones?"""
        triangle = value.target in (aten.tril.default, aten.triu.default) and self.constant(value.args[0]) == 1
        return triangle or type_of(value).dtype == torch.bool

    def _moved(self, mask: fx.Node, positive: bool) -> Seen | None:
        """Of a view that leaves rows and keys the last two dims."""
        ndim = type_of(mask).ndim
        if mask.target is aten.expand.default:
            (source, *_), inner = mask.args, type_of(mask.args[0])  # type: ignore[arg-type]
            seen = self._read(source, positive)  # type: ignore[arg-type]
            # Bounds are on what was compared: dims that are repeated have none.
            return seen if inner.shape[-2:] == type_of(mask).shape[-2:] or not _bounded(seen) else None
        if mask.target is aten.unsqueeze.default:
            source, dim = mask.args
            place = int(dim) % ndim - ndim  # type: ignore[call-overload]
            if place > -3:
                return None
            seen = self._read(source, positive)  # type: ignore[arg-type]
            parts = tuple(Part(p.value, p.negated, (*p.unsqueezed, place)) for p in seen.parts)
            return Seen(seen.first, seen.last, parts, seen.lowest)
        if mask.target is aten.view.default:
            (source, *_), inner = mask.args, type_of(mask.args[0])  # type: ignore[arg-type]
            if inner.ndim < 2 or inner.shape[-2:] != type_of(mask).shape[-2:]:
                return None
            seen = self._read(source, positive)  # type: ignore[arg-type]
            return None if seen.parts else seen
        return None

    def _bound(self, mask: fx.Node, args: Sequence[Any], how: Callable[[Any, Any], bool]) -> Seen | None:
        """What it says of `key - row` that one value is below another."""
        ours, theirs = (self.affine(arg) for arg in args[:2])
        if ours is None or theirs is None:
            return None
        shape = type_of(mask).shape
        difference = ours.plus(theirs.times(-1))
        coefficients = (0,) * (len(shape) - len(difference.coefficients)) + difference.coefficients
        coefficients = tuple(0 if n == 1 else c for c, n in zip(coefficients, shape, strict=True))
        lowest, highest = _Affine(difference.const, coefficients).ends(shape)
        if how(lowest, 0) and how(highest, 0):
            return Seen()
        if len(shape) < 2 or any(coefficients[:-2]) or coefficients[-1] not in (1, -1):
            return None
        if coefficients[-2] != -coefficients[-1]:
            return None
        sign, const = coefficients[-1], difference.const
        if sign < 0:  # row - key + const: turn it over
            const, how = (
                -const,
                {operator.le: operator.ge, operator.ge: operator.le}.get(how)
                or (operator.gt if how is operator.lt else operator.lt),
            )
        strict = int(how in (operator.lt, operator.gt))
        if how in (operator.le, operator.lt):
            return Seen(last=-const - strict)
        return Seen(first=-const + strict)

    def _added(self, mask: fx.Node) -> Seen | None:
        """Of a mask that is added to scores."""
        target, args = mask.target, mask.args
        if (
            target is aten.add.Tensor
            and all(isinstance(a, fx.Node) for a in args[:2])
            and given(mask).get("alpha", 1) == 1
        ):
            both = [self._added(a) for a in args]  # type: ignore[arg-type]
            return both[0] & both[1] if both[0] is not None and both[1] is not None else None
        if target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
            condition, yes, no = args
            return self._chosen(condition, self.constant(yes), self.constant(no))  # type: ignore[arg-type]
        if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            x, hidden, fill = args
            return self._chosen(hidden, self.constant(fill), self.constant(x))  # type: ignore[arg-type]
        if target in (aten.triu.default, aten.tril.default):
            fill, diagonal = self.constant(args[0]), int(given(mask).get("diagonal", 0))
            if _hides(fill):
                lowest = fill != -math.inf
                if target is aten.triu.default:
                    return Seen(last=diagonal - 1, lowest=lowest)
                return Seen(first=diagonal + 1, lowest=lowest)
        if target is aten._to_copy.default and type_of(args[0]).dtype.is_floating_point:  # type: ignore[arg-type]
            inner = self._added(args[0])  # type: ignore[arg-type]
            return inner if inner is not None and not inner.parts and not inner.lowest else None
        if target in (aten.expand.default, aten.unsqueeze.default, aten.view.default):
            inner = args[0]
            kept = type_of(inner).ndim >= 2 and type_of(inner).shape[-2:] == type_of(mask).shape[-2:]  # type: ignore[arg-type]
            seen = self._added(inner) if kept else None  # type: ignore[arg-type]
            return seen if seen is not None and not seen.parts else None
        return None

    def _chosen(self, condition: fx.Node, yes: float | None, no: float | None) -> Seen | None:
        for kept, hidden, positive in ((yes, no, True), (no, yes, False)):
            if kept == 0 and _hides(hidden):
                seen = self._read(condition, positive)
                return Seen(seen.first, seen.last, seen.parts, hidden != -math.inf)
        return None

    # ------------------------------------------------------------------ numbers
    def constant(self, value: Any) -> float | None:
        """The number that all elements of a value are."""
        copied = False
        while isinstance(value, fx.Node):
            if value.target is aten.full.default:
                value = value.args[1]
            elif value.target in (aten.expand.default, aten.view.default, aten.unsqueeze.default):
                value = value.args[0]
            elif value.target is aten._to_copy.default:
                value, copied = value.args[0], True
            else:
                return None
        known = float(value) if isinstance(value, (bool, int, float)) else None
        return None if copied and known not in (0, 1, -math.inf) else known  # these are the same in any dtype

    def affine(self, value: Any) -> _Affine | None:
        """A whole number that is affine in its indices."""
        if isinstance(value, int) and not isinstance(value, bool):
            return _Affine(value)
        if not isinstance(value, fx.Node) or value.op != "call_function":
            return None
        if value not in self._known:
            of_indices = type_of(value).dtype in (torch.int64, torch.int32) if _typed(value) else False
            made = self._made(value) if of_indices else None
            if made is not None:  # of a dim of size 1 there is one index, 0, and it may be broadcast
                shape = type_of(value).shape
                coefficients = (0,) * (len(shape) - len(made.coefficients)) + made.coefficients
                made = _Affine(made.const, tuple(0 if n == 1 else c for c, n in zip(coefficients, shape, strict=True)))
                limits = torch.iinfo(type_of(value).dtype)
                lowest, highest = made.ends(shape)
                if lowest < limits.min or highest > limits.max:  # it wraps around
                    made = None
            self._known[value] = made
        return self._known[value]

    def _made(self, value: fx.Node) -> _Affine | None:
        target, args, shape = value.target, value.args, type_of(value).shape
        if target is aten.full.default:
            return _Affine(args[1], (0,) * len(shape)) if isinstance(args[1], int) else None
        if target in (aten.arange.default, aten.arange.start, aten.arange.start_step):
            said = given(value)
            start, step = said.get("start", 0), said.get("step", 1)
            return _Affine(start, (step,)) if isinstance(start, int) and isinstance(step, int) else None
        if target in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar, aten.rsub.Scalar):
            ours, theirs = (self.affine(arg) for arg in args[:2])
            factor = given(value).get("alpha", 1)
            if ours is None or theirs is None or not isinstance(factor, int):
                return None
            if target is aten.rsub.Scalar:
                return theirs.plus(ours.times(-factor))
            return ours.plus(theirs.times(factor if "add" in str(target) else -factor))
        if target is aten.neg.default:
            inner = self.affine(args[0])
            return None if inner is None else inner.times(-1)
        if target is aten._to_copy.default:
            return self.affine(args[0])
        return self._viewed(value)

    def _viewed(self, value: fx.Node) -> _Affine | None:
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
        coefficients = (0,) * (len(before) - len(inner.coefficients)) + inner.coefficients
        if value.target is aten.expand.default:
            moved = (0,) * (len(shape) - len(before)) + tuple(
                0 if n == 1 else c for c, n in zip(coefficients, before, strict=True)
            )
            return _Affine(inner.const, moved)
        if value.target is aten.slice.Tensor:
            said = given(value)
            dim, start, step = said.get("dim", 0) % len(before), said.get("start") or 0, said.get("step", 1)
            start = min(max(start + before[dim] if start < 0 else start, 0), before[dim])
            const = inner.const + coefficients[dim] * start
            return _Affine(const, (*coefficients[:dim], coefficients[dim] * step, *coefficients[dim + 1 :]))
        if value.target in (aten.transpose.int, aten.permute.default):
            order = list(range(len(shape)))
            if value.target is aten.transpose.int:
                a, b = (int(d) % len(shape) for d in args[1:3])  # type: ignore[call-overload]
                order[a], order[b] = b, a
            else:
                order = [int(d) % len(shape) for d in args[1]]  # type: ignore[union-attr, call-overload]
            return _Affine(inner.const, tuple(coefficients[d] for d in order))
        # A view: dims of size 1 come and go, the others stay in order.
        left = [c for c, n in zip(coefficients, before, strict=True) if n != 1]
        if [n for n in before if n != 1] != [n for n in shape if n != 1]:
            return None
        return _Affine(inner.const, tuple(0 if n == 1 else left.pop(0) for n in shape))


def _typed(value: fx.Node) -> bool:
    about = value.meta.get("shardc")
    return about is not None and about.type is not None


def _bounded(seen: Seen) -> bool:
    return (seen.first, seen.last) != (-math.inf, math.inf)


def _hides(fill: float | None) -> bool:
    return fill is not None and (fill == -math.inf or fill in LOWEST)
