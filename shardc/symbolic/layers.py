"""Numbers of equal layers as numbers of how many there are: `L` layers, of a program compiled with five or more.

    collectives, products, storages    what the layers but the first and the last have in common, once more each
    memory at an action of layer i     as many layers more lie behind it (i counted from the first), or before it (from
                                       the last): each holds what a layer far from i holds then

Between the second layer and the last but one, an action's memory grows in equal steps, so its most is at either end.
Whatever is not so has no formula in L: its number of layers stays the one that was compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import NamedTuple, TypeVar

from shardc.ir.layers import list_and_index
from shardc.symbolic.expression import Expression
from shardc.symbolic.measure import Frame

FEWEST = 5
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Layers:
    """The list of equal layers, `transformer.h`, and how many it has; none if `count` is 0."""

    name: str = ""
    count: int = 0
    why: str = ""  # there is none

    @classmethod
    def of(cls, frame: Frame) -> Layers:
        names = {item.layer for item in (*frame.products, *frame.held) if item.layer}
        lists = Counter(list_and_index(name)[0] for name in names)
        if not lists:
            return cls(why="no modules lie in a list")
        name, count = max(lists.items(), key=lambda item: item[1])
        if count < FEWEST:
            return cls(why=f"{name} has {count} layers: compile with {FEWEST} or more")
        if {list_and_index(n)[1] for n in names if list_and_index(n)[0] == name} != set(range(count)):
            return cls(why=f"some layers of {name} hold and compute nothing")
        return cls(name, count)

    def index(self, layer: str) -> int:
        """The place of a layer in the list; -1 for what lies in none."""
        name, index = list_and_index(layer)
        return index if name == self.name and self.count else -1

    def counted(self, keys: Iterable[tuple[str, Key]]) -> dict[Key, tuple[int, int]] | None:
        """How often each key comes, as `fixed + each * L`, of keys with their layers; None if layers differ."""
        of: dict[int, Counter[Key]] = {}
        for layer, key in keys:
            of.setdefault(self.index(layer), Counter())[key] += 1
        total = sum(of.values(), Counter[Key]())
        if not self.count:
            return {key: (count, 0) for key, count in total.items()}
        inner = [of.get(i, Counter[Key]()) for i in range(1, self.count - 1)]
        if any(other != inner[0] for other in inner):
            return None
        return {key: (count - self.count * inner[0][key], inner[0][key]) for key, count in total.items()}


@dataclass(frozen=True)
class Candidate:
    """Memory at one action, `fixed + each * L`, of programs with `fewest` layers or more."""

    fixed: Expression
    each: Expression
    fewest: int = 0


class Peaks(NamedTuple):
    """What may be a rank's peak, of programs with so many layers or more."""

    candidates: list[Candidate]
    layers: int = 0


def candidates(frame: Frame, sizes: Sequence[Expression], layers: Layers, arena: Expression) -> Peaks | None:
    """What may be a rank's peak: the memory at each action, without those that others always exceed. None where the
    layers of the list do not hold the same."""
    zero = arena.times(0)
    timeline: list[Expression] = []
    by_layer: list[list[Expression]] = []  # at each action, of each layer
    born: dict[int, list[int]] = {}
    dead: dict[int, list[int]] = {}
    total, held = arena, [zero] * layers.count

    def add(place: int, sign: int) -> None:
        nonlocal total
        change, index = sizes[place].times(sign), layers.index(frame.held[place].layer)
        total += change
        if index >= 0:
            held[index] += change

    for place, item in enumerate(frame.held):
        if item.born < 0:
            add(place, 1)
        elif item.counted:
            born.setdefault(item.born, []).append(place)
            dead.setdefault(item.dies, []).append(place)
    for moment in range(len(frame.moments)):
        for place in born.get(moment, ()):
            add(place, 1)
        timeline.append(total)
        by_layer.append(list(held))
        for place in dead.get(moment, ()):
            add(place, -1)
    if not timeline:
        return Peaks([Candidate(total, zero)])
    if not layers.count:
        return Peaks(_largest([Candidate(value, zero) for value in timeline]))
    return _with_layers(_places(frame, layers), timeline, by_layer, layers)


def _places(frame: Frame, layers: Layers) -> list[int]:
    """The layer of each action; what is of none goes with the one before it, or with the first."""
    known = [layers.index(layer) for layer in frame.moments]  # begins and waits go with the call before
    last = next((index for index in known if index >= 0), 0)
    places: list[int] = []
    for index in known:
        last = index if index >= 0 else last
        places.append(last)
    return places


def _with_layers(
    places: Sequence[int], timeline: Sequence[Expression], by_layer: Sequence[Sequence[Expression]], layers: Layers
) -> Peaks | None:
    """The layers at either end that others are not like: one, or, where there are enough to tell, more. With fewer
    layers those at the ends would be the same."""
    for border in range(1, (layers.count - 2) // 3 + 1):
        found = _beside(border, places, timeline, by_layer, layers.count)
        if found is not None:
            return Peaks(found, 2 if border == 1 else 3 * border + 1)
    return None


def _beside(
    border: int,
    places: Sequence[int],
    timeline: Sequence[Expression],
    by_layer: Sequence[Sequence[Expression]],
    count: int,
) -> list[Candidate] | None:
    """What may be the peak where the `border` layers at either end are not like the others; None where these differ."""
    far = {i: range(i + 1 + border, count - border) for i in range(border + 1)}
    far |= {count - 1 - i: range(border, count - 1 - i - border) for i in range(border + 1)}
    if not _in_equal_steps(places, timeline, border, count):
        return None
    every: list[Candidate] = []
    for moment, place in enumerate(places):
        if place not in far:
            continue
        distant = [by_layer[moment][i] for i in far[place]]
        if any(other != distant[0] for other in distant):
            return None
        fewest = 2 + min(place, count - 1 - place)
        every.append(Candidate(timeline[moment] - distant[0].times(count), distant[0], fewest))
    return _largest(every)


def _in_equal_steps(places: Sequence[int], timeline: Sequence[Expression], border: int, count: int) -> bool:
    """Does memory change alike from each inner layer to the next, action by action?"""
    runs: list[tuple[int, list[Expression]]] = []
    for place, value in zip(places, timeline, strict=True):
        if not runs or runs[-1][0] != place:
            runs.append((place, []))
        runs[-1][1].append(value)
    for (a, first), (b, second), (c, third) in zip(runs, runs[1:], runs[2:], strict=False):
        if not (min(a, b, c) >= border and max(a, b, c) < count - border and abs(a - c) == 2):
            continue
        if not len(first) == len(second) == len(third):
            return False
        if any(y - x != z - y for x, y, z in zip(first, second, third, strict=True)):
            return False
    return True


def _largest(every: Sequence[Candidate]) -> list[Candidate]:
    """Without candidates that another covers wherever symbols are positive."""
    kept: list[Candidate] = []
    for one in dict.fromkeys(every):
        if not any(_covers(other, one) for other in kept):
            kept = [*(other for other in kept if not _covers(one, other)), one]
    return kept


def _covers(other: Candidate, one: Candidate) -> bool:
    """With as many layers as `one` needs, or more."""
    if other.fewest > one.fewest:
        return False
    least = one.fewest
    here, there = other.fixed + other.each.times(least), one.fixed + one.each.times(least)
    return here.covers(there) and other.each.covers(one.each)


def pruned(
    every: Sequence[Candidate], lowest: Mapping[str, int], meshes: Sequence[Mapping[str, int]]
) -> list[Candidate]:
    """Without candidates that another covers on each of these meshes, with extents from the `lowest` on.

    On one mesh a candidate is a polynomial of what extents are beyond their lowest: it covers another where no
    coefficient of the difference is negative.
    """
    if len(every) < 2:
        return list(every)
    least = min(c.fewest for c in every)  # a candidate that covers there, and grows as fast, covers from there on
    rows = [
        [_shifted(form, lowest, mesh) for mesh in meshes for form in (c.fixed + c.each.times(least), c.each)]
        for c in every
    ]
    keys = sorted({(i, powers) for row in rows for i, terms in enumerate(row) for powers in terms})
    table = [[row[i].get(powers, Fraction(0)) for i, powers in keys] for row in rows]
    kept: list[int] = []
    for i, row in enumerate(table):
        if any(j != i and every[j].fewest <= every[i].fewest and _all_least(row, table[j]) for j in kept):
            continue
        kept = [j for j in kept if every[i].fewest > every[j].fewest or not _all_least(table[j], row)] + [i]
    return [every[i] for i in kept]


def _all_least(row: Sequence[Fraction], other: Sequence[Fraction]) -> bool:
    return all(a <= b for a, b in zip(row, other, strict=True))


def _shifted(form: Expression, lowest: Mapping[str, int], mesh: Mapping[str, int]) -> dict[tuple[int, ...], Fraction]:
    """Its coefficients in extents beyond their lowest, with the axes of a mesh put in."""
    terms: dict[tuple[int, ...], Fraction] = {}
    for powers, c in form.terms:
        extents: list[tuple[int, int]] = []
        for name, power in zip(form.symbols, powers, strict=True):
            if name in mesh:
                c *= Fraction(mesh[name]) ** power
            else:
                extents.append((lowest[name], power))
        for chosen in product(*(range(power + 1) for _, power in extents)):
            factor = math.prod(math.comb(p, k) * low ** (p - k) for (low, p), k in zip(extents, chosen, strict=True))
            terms[chosen] = terms.get(chosen, Fraction(0)) + c * factor
    return terms
