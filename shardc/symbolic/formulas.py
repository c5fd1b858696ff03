"""What a program costs a rank, as formulas of its extents, of the sizes of mesh axes and of the number of equal layers.

    formulas = program.symbolic()
    print(formulas)                               bytes by collective, FLOPs, memory
    formulas.at(B=512, S=8192, dp=8, tp=4, L=48)  the numbers, without compiling

The program is compiled at a few sizes. All compiles must have the same calls, collectives and lifetimes of storages
(`measure`), and each number of them an exact expression (`expression`). That holds for the sizes of `domain`:

    extents   between the smallest and the largest that were compiled
    axes      of the sizes that were compiled, or between them where there were four or more
    shards    every atom divides by its axes, as it did in all compiles

`at` raises ShardcError (SC232) for other sizes: compile for them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from shardc.frontend.size_guards import SizeGuards
from shardc.ir.collectives import CollectiveKind, sent
from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Phase
from shardc.ir.types import Axes
from shardc.plan.symbols import LAYERS
from shardc.symbolic.expression import Expression, Point
from shardc.symbolic.layers import Candidate, Layers
from shardc.symbolic.template import whole

Key = tuple[Phase, Axes, CollectiveKind]
HINT = "compile for these sizes, or ask for formulas over wider ranges: program.symbolic(ranges={...})"


@dataclass(frozen=True)
class Transfer:
    """Equal collectives: how many, `fixed + each * L` in a step, and the payload of one."""

    phase: Phase
    axes: Axes
    kind: CollectiveKind
    op: str
    payload: Expression
    fixed: int
    each: int


@dataclass(frozen=True)
class Work:
    """FLOPs of a phase, `fixed + each * L`."""

    phase: Phase
    fixed: Expression
    each: Expression


@dataclass(frozen=True)
class Costs:
    """The numbers at one point: bytes that a rank sends by phase, axes and kind; FLOPs by phase; memory."""

    bytes: Mapping[Key, int]
    flops: Mapping[Phase, int]
    peak: int | None  # None where memory has no formula: notes say why
    stored: int | None

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes.values())

    @property
    def total_flops(self) -> int:
        return sum(self.flops.values())


@dataclass(frozen=True)
class Domain:
    """Where formulas hold."""

    ranges: Mapping[str, tuple[int, int]]
    axes: Mapping[str, tuple[int, ...]]  # the sizes that were compiled
    fixed: Mapping[str, int]  # axes that are no symbols
    shards: tuple[tuple[Expression, Axes, int], ...]  # with the fewest elements that a rank had in a compile
    layers: Layers
    guards: SizeGuards

    @property
    def meshes(self) -> list[dict[str, int]]:
        """Every size of the axes that are symbols."""
        sizes = [range(min(s), max(s) + 1) if len(s) > 3 else s for s in self.axes.values()]
        return [dict(zip(self.axes, chosen, strict=True)) for chosen in product(*sizes)]

    def check(self, point: Point) -> None:
        """Raise ShardcError (SC232) for a point outside."""
        names = {*self.ranges, *self.axes, *([LAYERS] if self.layers.count else [])}
        known = {**self.fixed, **({} if self.layers.count else {LAYERS: -1})}
        if unknown := [name for name in point if name not in names and point[name] != known.get(name)]:
            said = f"'{unknown[0]}' is no symbol here" + (
                f", but {known[unknown[0]]}" if known.get(unknown[0], -1) > 0 else ""
            )
            raise error("SC232", said, hint=f"symbols: {', '.join(sorted(names))}")
        if missing := sorted(names - point.keys()):
            raise error(
                "SC232", f"'{missing[0]}' is not given", hint=f"give a size of each of {', '.join(sorted(names))}"
            )
        for name, (low, high) in self.ranges.items():
            if not low <= point[name] <= high:
                raise _outside(f"{name}={point[name]} is not between {low} and {high}")
        for name, sizes in self.axes.items():
            between = len(sizes) > 3 and min(sizes) <= point[name] <= max(sizes)
            if not between and point[name] not in sizes:
                raise _outside(f"{name}={point[name]} is not among {', '.join(map(str, sizes))}")
        if (guard := self.guards.broken(point)) is not None:
            raise ShardcError(guard.diagnostic(point))
        if self.layers.count and point[LAYERS] < 2:
            raise _outside(f"{LAYERS}={point[LAYERS]} is less than 2")
        sizes = {**point, **self.fixed}
        for atom, axes, least in self.shards:
            value = atom.at(point)
            ranks = math.prod(sizes.get(axis, 1) for axis in axes)
            if value.denominator != 1 or value.numerator % ranks:
                raise _outside(f"{atom} = {value} does not divide by {'.'.join(axes)} = {ranks}")
            if value == ranks and least > 1:  # which lies in memory otherwise
                raise _outside(f"{atom} = {value} over {'.'.join(axes)} = {ranks} leaves a rank one element")

    def __str__(self) -> str:
        lines = [f"{name}: {low} to {high}" for name, (low, high) in self.ranges.items()]
        for name, sizes in self.axes.items():
            lines.append(
                f"{name}: " + (f"{min(sizes)} to {max(sizes)}" if len(sizes) > 3 else ", ".join(map(str, sizes)))
            )
        lines += [f"{name}: {size} alone" for name, size in self.fixed.items()]
        if self.layers.count:
            lines.append(f"{LAYERS}: layers of {self.layers.name}, 2 or more")
        lines += [
            f"{guard.expression}" + (f"  ({guard.location})" if guard.location else "") for guard in self.guards.guards
        ]
        divided = dict.fromkeys(f"{'.'.join(axes)} | {atom}" for atom, axes, _ in self.shards)
        return "\n".join([*lines, *([f"divides: {'; '.join(divided)}"] if divided else [])])


def _outside(message: str) -> Exception:
    return error("SC232", f"the formulas do not hold there: {message}", hint=HINT)


@dataclass(frozen=True)
class Formulas:
    """Formulas of one rank and step. `memory` is the peak's candidates: the most of them is the peak."""

    transfers: tuple[Transfer, ...]
    work: tuple[Work, ...]
    memory: tuple[Candidate, ...]
    stored: tuple[Expression, Expression] | None
    domain: Domain
    memory_layers: int = 0  # the number of layers that `memory` is for; 0: any from `memory_from` on
    memory_from: int = 0
    notes: tuple[str, ...] = ()  # what has no formula, and why

    def at(self, point: Point | None = None, /, **sizes: int) -> Costs:
        """The numbers for these sizes. Raises ShardcError (SC232) where the formulas do not hold."""
        values = {**(point or {}), **sizes}
        self.domain.check(values)
        return self._at(values)

    def _at(self, values: Point) -> Costs:
        count, ranks = values.get(LAYERS, 0), {**values, **self.domain.fixed}
        moved: dict[Key, int] = {}
        for t in self.transfers:
            group = math.prod(ranks.get(axis, 1) for axis in t.axes)
            key = (t.phase, t.axes, t.kind)
            bytes_once = sent(t.kind, whole(t.payload, values), group)
            moved[key] = moved.get(key, 0) + (t.fixed + t.each * count) * bytes_once
        flops: dict[Phase, int] = {w.phase: whole(w.fixed + w.each.times(count), values) for w in self.work}
        known = self.memory_layers in (0, count) and count >= self.memory_from
        held = [c for c in self.memory if known and count >= c.fewest]
        peak = max((whole(c.fixed + c.each.times(count), values) for c in held), default=None)
        stored = None if self.stored is None else whole(self.stored[0] + self.stored[1].times(count), values)
        return Costs(moved, flops, peak, stored)

    # ------------------------------------------------------------------ closed forms
    @property
    def bytes(self) -> dict[Key, Any]:
        """By phase, axes and kind: a sympy expression of the bytes that a rank sends in a step."""
        forms: dict[Key, Any] = {}
        for t in self.transfers:
            key = (t.phase, t.axes, t.kind)
            forms[key] = forms.get(key, 0) + self.count(t) * self.sent(t)
        return forms

    def sent(self, transfer: Transfer) -> Any:
        """What a rank sends in one of these collectives, in sympy: rounded up where it may be no whole number."""
        import sympy

        group = sympy.Mul(*(self._axis(axis) for axis in transfer.axes))
        factor = {"all_reduce": 2 * (group - 1) / group, "permute": sympy.Integer(1)}.get(
            transfer.kind, (group - 1) / group
        )
        whole_shares = transfer.kind == "permute" or self._divides(transfer.payload, transfer.axes)
        form = factor * transfer.payload.sympy()
        return form if whole_shares else sympy.ceiling(form)

    def _divides(self, payload: Expression, axes: Axes) -> bool:
        """Is a payload sure to divide by the axes, wherever the formulas hold?"""
        for powers, c in payload.terms:
            named = zip(payload.symbols, powers, strict=True)
            ranks = {name: -power for name, power in named if name not in self.domain.ranges}
            for axis in axes:
                ranks[axis] = ranks.get(axis, 0) + 1
            divisors = [(atom, axes) for atom, axes, _ in self.domain.shards]
            if not self._whole(powers, c, payload.symbols, ranks, divisors):
                return False
        return True

    def _whole(self, powers: Any, c: Any, symbols: Any, ranks: Mapping[str, int], divisors: Any) -> bool:
        """Does c times the extents divide by axes, told by which atoms do? Each factor is used once."""
        rest, number = dict(ranks), int(c) if c.denominator == 1 else 0
        extents = {name: power for name, power in zip(symbols, powers, strict=True) if power > 0}
        for atom, axes in sorted(divisors, key=lambda one: -len(one[1])):
            if not all(rest.get(axis, 0) > 0 for axis in axes) or len(atom.terms) != 1:
                continue
            (own, coefficient) = atom.terms[0]
            needs = {name: power for name, power in zip(atom.symbols, own, strict=True) if power > 0}
            size = int(coefficient) if coefficient.denominator == 1 else 0
            if not size or number % size or any(extents.get(name, 0) < power for name, power in needs.items()):
                continue
            number //= size
            for name, power in needs.items():
                extents[name] -= power
            for axis in axes:
                rest[axis] -= 1
        return number > 0 and not any(
            power > 0
            for name, power in rest.items()
            if name not in self.domain.fixed or number % self.domain.fixed[name]
        )

    def _axis(self, axis: str) -> Any:
        import sympy

        return sympy.Integer(self.domain.fixed[axis]) if axis in self.domain.fixed else _symbol(axis)

    def count(self, transfer: Transfer) -> Any:
        """How many of these there are in a step, in sympy."""
        return transfer.fixed + transfer.each * _symbol(LAYERS)

    @property
    def flops(self) -> dict[Phase, Any]:
        """By phase, a sympy expression of a rank's FLOPs in a step."""
        import sympy

        return {
            w.phase: sympy.factor_terms(sympy.expand(w.fixed.sympy() + w.each.sympy() * _symbol(LAYERS)))
            for w in self.work
        }

    @property
    def peak(self) -> Any:
        """A sympy expression of a rank's peak memory, for 3 layers or more; None where there is none."""
        import sympy

        if not self.memory:
            return None
        return self.peaks[0] if len(self.memory) == 1 else sympy.Max(*self.peaks, evaluate=False)

    @property
    def peaks(self) -> list[Any]:
        """The forms that the peak is the most of."""
        import sympy

        return [sympy.expand(c.fixed.sympy() + c.each.sympy() * _symbol(LAYERS)) for c in self.memory]

    def lambdify(self, form: Any) -> Callable[..., int]:
        """One closed form (of `bytes`, `flops`, or `peak`) as a function of the symbols by name, for many sizes. It
        does not check that the form holds there: `domain.check` does."""
        import sympy

        names = sorted(form.free_symbols, key=str)
        function = sympy.lambdify(names, form, modules=[{"Max": max}, "sympy"])
        return lambda **sizes: int(function(*(sympy.Integer(sizes[str(name)]) for name in names)))

    def __str__(self) -> str:
        return _shown(self)


def _symbol(name: str) -> Any:
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


SHOWN = 6  # forms of the peak
NAMES = {"fwd": "forward", "bwd": "backward", "opt": "optimizer"}


def _shown(formulas: Formulas) -> str:
    """All formulas, and where they hold."""
    rows = [("phase", "axis", "count", "collective", "of bytes", "sent by a rank, each")]
    rows += [_row(formulas, t) for t in formulas.transfers]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "FLOPs of a rank"]
    lines += [f"  {NAMES[phase]}: {form}" for phase, form in formulas.flops.items()]
    if formulas.memory:
        lines += ["", "bytes of a rank at the peak, the most of"]
        lines += [f"  {form}" for form in formulas.peaks[:SHOWN]]
        more = len(formulas.memory) - SHOWN
        lines += [f"  and {more} more, at other calls"] if more > 0 else []
    lines += ["", "where", *(f"  {line}" for line in str(formulas.domain).splitlines())]
    return "\n".join([*lines, *(f"note: {note}" for note in formulas.notes)])


def _row(formulas: Formulas, t: Transfer) -> tuple[str, ...]:
    count = str(formulas.count(t))
    kind = f"{t.kind} ({t.op})" if t.op else t.kind
    return t.phase, ".".join(t.axes), count, kind, str(t.payload), _compact(formulas.sent(t))


def _compact(form: Any) -> str:
    import sympy

    return str(form if form.has(sympy.ceiling) else sympy.factor(form))
