"""What masks say of positions: which keys a row sees, where that follows from how far apart they are.

    kv <= q                              0 keys ahead            causal
    kv > q - w                           w - 1 keys behind       a window of w
    abs(q - kv) <= w                     w keys either way
    q // c == kv // c                    in its chunk of c       and so c - 1 keys either way
    (q - kv < w) & (kv <= q) & padding   both, and `padding`     which is what is left of the mask

Values that are computed from `arange` are affine in their indices, or quotients of such (`affine_positions`), so a
comparison of two of them is a bound on `key - row`, or on chunks, or always true. And, or and not join bounds; an
additive mask is 0 where a row sees a key and -inf where it does not. All else is left of a mask as it is. Chunks that
begin behind padding, of which each batch has its own, are left too; how far they reach is known all the same.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import type_of
from shardc.ir.schema import given
from shardc.passes.normalize.affine_positions import Affine, Numbers

aten = torch.ops.aten
LOWEST = tuple(torch.finfo(dtype).min for dtype in (torch.float32, torch.float64, torch.bfloat16))


@dataclass(frozen=True)
class Part:
    """What is left of a mask: a value, or its negation, with dims of size 1 put in at these places from the end."""

    value: fx.Node
    negated: bool = False
    unsqueezed: tuple[int, ...] = ()


@dataclass(frozen=True)
class InChunks:
    """A row sees keys of which `chunk of the key - chunk of the row` is from `first` to `last`, as `part` says too."""

    size: int
    shift: int
    first: float
    last: float
    part: Part


@dataclass(frozen=True)
class Seen:
    """A row sees keys of which `key - row` is from `first` to `last`, of those that all `chunks` and `parts` let it
    see. With `lowest`, hidden keys have a score that is very low and not -inf: a row that sees none at all attends to
    all."""

    first: float = -math.inf
    last: float = math.inf
    parts: tuple[Part, ...] = ()
    lowest: bool = False
    chunks: tuple[InChunks, ...] = ()

    def __and__(self, other: Seen) -> Seen:
        return Seen(
            max(self.first, other.first),
            min(self.last, other.last),
            (*self.parts, *(part for part in other.parts if part not in self.parts)),
            self.lowest or other.lowest,
            self.chunks + other.chunks,
        )

    def either(self, other: Seen) -> Seen | None:
        """What one of both lets a row see; None if that is no run of keys."""
        both = (self, other)
        for one, second in (both, both[::-1]):
            if one.first > one.last:
                return second
            if one == Seen():
                return one
        if (
            any(one.parts or one.chunks for one in both)
            or max(self.first, other.first) > min(self.last, other.last) + 1
        ):
            return None
        return Seen(min(self.first, other.first), max(self.last, other.last))

    def moved(self, part: Callable[[Part], Part]) -> Seen:
        """The same, of a view of the mask."""
        chunks = tuple(replace(each, part=part(each.part)) for each in self.chunks)
        return replace(self, parts=tuple(map(part, self.parts)), chunks=chunks)


COMPARED: Mapping[Any, Callable[[Any, Any], bool]] = {
    getattr(getattr(aten, name), kind): getattr(operator, name)
    for name in ("le", "lt", "ge", "gt", "eq", "ne")
    for kind in ("Tensor", "Scalar")
}
TURNED = {operator.le: operator.ge, operator.ge: operator.le, operator.lt: operator.gt, operator.gt: operator.lt}
HOLDS = {**{how: [how] for how in TURNED}, operator.eq: [operator.le, operator.ge]}
OPPOSITE = {
    operator.le: [operator.gt],
    operator.gt: [operator.le],
    operator.lt: [operator.ge],
    operator.ge: [operator.lt],
    operator.ne: [operator.le, operator.ge],
}
AND = (aten.bitwise_and.Tensor, aten.logical_and.default, aten.mul.Tensor)
OR = (aten.bitwise_or.Tensor, aten.logical_or.default)
NOT = (aten.bitwise_not.default, aten.logical_not.default)


class Positions(Numbers):
    """Reads the masks of a graph."""

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
        if target in (OR if positive else AND) and flags:
            either = self._read(args[0], positive).either(self._read(args[1], positive))  # type: ignore[arg-type]
            if either is not None:
                return either
        if target in COMPARED:
            how = COMPARED[target]
            hows = (HOLDS if positive else OPPOSITE).get(how, [])
            bounds = [self._bound(mask, args, each, Part(mask, not positive)) for each in hows]
            known = [bound for bound in bounds if bound is not None]
            if known and len(known) == len(hows):
                return known[0] & known[-1]
        triangle = target in (aten.tril.default, aten.triu.default)
        if triangle and positive and self.constant(args[0]) != 1 and self._is_flag(args[0]):  # of a mask
            diagonal = int(given(mask).get("diagonal", 0))
            bound = Seen(last=diagonal) if target is aten.tril.default else Seen(first=diagonal)
            return self._read(args[0], True) & bound  # type: ignore[arg-type]
        if triangle and self.constant(args[0]) == 1:
            diagonal = int(given(mask).get("diagonal", 0))
            lower = target is aten.tril.default
            if lower == positive:
                return Seen(last=diagonal if lower else diagonal - 1)
            return Seen(first=diagonal if not lower else diagonal + 1)
        if (known := self.constant(mask)) in (0, 1):
            return Seen() if known == int(positive) else Seen(math.inf, -math.inf)
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
            return seen.moved(lambda p: Part(p.value, p.negated, (*p.unsqueezed, place)))
        if mask.target is aten.view.default:
            (source, *_), inner = mask.args, type_of(mask.args[0])  # type: ignore[arg-type]
            if inner.ndim < 2 or inner.shape[-2:] != type_of(mask).shape[-2:]:
                return None
            seen = self._read(source, positive)  # type: ignore[arg-type]
            return None if seen.parts else seen.moved(lambda _: Part(mask, not positive))
        return None

    def _bound(self, mask: fx.Node, args: Sequence[Any], how: Callable[[Any, Any], bool], part: Part) -> Seen | None:
        """What it says of `key - row` that one value is below another, or not above it."""
        ours, theirs = args[:2]
        for a, b, turned in ((ours, theirs, how), (theirs, ours, TURNED[how])):
            if not isinstance(a, fx.Node) or a.target is not aten.abs.default:
                continue
            inner, limit = self.affine(a.args[0]), self.affine(b)
            if turned not in (operator.le, operator.lt) or inner is None or limit is None:
                return None
            both = [inner.times(sign).plus(limit.times(-1)) for sign in (1, -1)]
            bounds = [bound for value in both if (bound := self._distance(mask, value, turned, part)) is not None]
            return bounds[0] & bounds[1] if len(bounds) == 2 else None
        mine, other = self.affine(ours), self.affine(theirs)
        if mine is None or other is None:
            return None
        return self._distance(mask, mine.plus(other.times(-1)), how, part)

    def _distance(self, mask: fx.Node, value: Affine, how: Callable[[Any, Any], bool], part: Part) -> Seen | None:
        """What it says of `key - row` that a value compares so with 0."""
        shape = type_of(mask).shape
        value = value.of_shape(shape)
        lowest, highest = value.ends(shape)
        if how(lowest, 0) and how(highest, 0):
            return Seen()
        if how in (operator.ge, operator.gt):  # turn it over
            value, how = value.times(-1), TURNED[how]
        strict = int(how is operator.lt)
        if (limit := value.limit(strict)) is not None:
            return Seen(limit[0], limit[1])
        if (chunks := value.chunks(strict)) is None:
            return None
        reach = Seen(chunks.nearest, chunks.farthest)
        if chunks.shift is None:
            return reach & Seen(parts=(part,))
        return reach & Seen(chunks=(InChunks(chunks.size, chunks.shift, chunks.first, chunks.last, part),))

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
            plain = inner is not None and not inner.parts and len(inner.chunks) < 2 and not inner.lowest
            return inner if plain else None
        if target in (aten.expand.default, aten.unsqueeze.default, aten.view.default):
            inner = args[0]
            kept = type_of(inner).ndim >= 2 and type_of(inner).shape[-2:] == type_of(mask).shape[-2:]  # type: ignore[arg-type]
            seen = self._added(inner) if kept else None  # type: ignore[arg-type]
            return seen if seen is not None and not seen.parts and len(seen.chunks) < 2 else None
        return None

    def _chosen(self, condition: fx.Node, yes: float | None, no: float | None) -> Seen | None:
        for kept, hidden, positive in ((yes, no, True), (no, yes, False)):
            if kept == 0 and _hides(hidden):
                seen = self._read(condition, positive)
                return replace(seen, lowest=hidden != -math.inf)
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


def _bounded(seen: Seen) -> bool:
    return (seen.first, seen.last) != (-math.inf, math.inf) or bool(seen.chunks)


def _hides(fill: float | None) -> bool:
    return fill is not None and (fill == -math.inf or fill in LOWEST)
