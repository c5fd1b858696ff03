"""Which values of a graph with few equal layers lie in blocks, and the order of a graph with all of them.

A block is what stands from the first value of a unit to that of the next: mostly the unit's own values, and those of
units near it that passes put off or make early.

    A  [b1 a2 c1]  [b2 a3 c2]  C        units 1 and 2 of the short graph: a2 is made early, in the block of 1
    A  [b1 a2 c1]  [b2 a3 c2]  [b3 a4 c3]  ...  [b9 a10 c9]  C

Of two blocks that lie side by side and say the same, one is made for each unit between the two. What stands outside of
blocks is kept. Forward has two such blocks, backward two, and so has each table of a graph that goes by values.

Units go by their places: the short graph has `first` and the next in two blocks, the whole those from `first` to `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import fx

from shardc.ir.equal_layers import LayerPair, LayerView
from shardc.ir.units import UnequalError, Units

T = TypeVar("T")


class LayerBlocks:
    """The blocks of a short graph, of which `lacking` says what the whole is without, too."""

    def __init__(self, view: LayerView, units: Units, lacking: Units | None) -> None:
        self.view, self.units, self.lacking = view, units, lacking
        self.first, self.end = units.first, units.last if lacking is None else lacking.slot(units.last)
        self._pair = LayerPair(view, units.first, units.last, units.slot)

    def slot(self, value: fx.Node) -> int:
        """The place of a value's unit in the short graph."""
        return self.units.slot(self.view.unit[value])

    def unit(self, place: int) -> int:
        """The unit in a place of the whole."""
        return place if self.lacking is None else self.lacking.at(place)

    def spread(self, items: Iterable[T], value_of: Callable[[T], fx.Node]) -> Iterator[tuple[T, T | None, int]]:
        """Items in the order that they have in the whole: with its twin and the place of the block what is made, alone
        what is kept, with its own place, -1 outside of layers. Raises UnequalError where blocks are not alike."""
        items = list(items)
        values = list(map(value_of, items))
        blocks = dict(self._blocks(items, values))
        made = {self.view.key[values[x]]: self.slot(values[x]) for pairs in blocks.values() for x, _ in pairs}
        index = 0
        while index < len(items):
            pairs = blocks.get(index)
            if pairs is None:
                yield items[index], None, self._place_of_kept(values[index], made)
                index += 1
                continue
            places = range(self.first, self.end + 1)
            for at in places if pairs[0][0] == index else reversed(places):
                yield from ((items[x], items[y], at) for x, y in pairs)
            index += 2 * len(pairs)

    def _blocks(self, items: Sequence[Any], values: Sequence[fx.Node]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Where two blocks lie side by side, and the places of their items: that of `first` and that of `last`."""
        first, last = self.units.first, self.units.last
        unit, key = self.view.unit, self.view.key
        places: dict[tuple[int, str], int] = {}
        for index, value in enumerate(values):
            if (of := unit.get(value)) in (first, last):
                places.setdefault((of, key[value]), index)
        index, within = 0, set[str]()
        while index < len(items):
            of, twin = unit.get(values[index]), -1
            if of in (first, last) and key[values[index]] not in within:
                twin = places.get((last if of == first else first, key[values[index]]), -1)
            if twin <= index:  # it has none, or such values are made in other blocks
                index += 1
                continue
            ends = range(index, twin), range(twin, 2 * twin - index)
            pairs = list(zip(*(ends if of == first else reversed(ends)), strict=True))
            if ends[1].stop > len(items) or not all(self._alike(items[x], items[y]) for x, y in pairs):
                raise UnequalError(f"{self.units.path}: units {first} and {last} have another order")
            yield index, pairs
            within.update(key[values[x]] for x, _ in pairs)
            index = ends[1].stop

    def _alike(self, x: Any, y: Any) -> bool:
        """Are two items twins, that of the block of `first` and that of the block of `last`?"""
        if not isinstance(x, fx.Node):
            return self._pair.same(x, y)
        if not (self._pair.same(x, y) and self._pair.twins(x, y)):
            return False
        distance, steps = self.units.last - self.units.first, list(self._pair.steps)
        self._pair.steps.clear()
        return all(step % distance == 0 and step // distance in self.units.steps for step in steps)

    def _place_of_kept(self, value: fx.Node, made: Mapping[str, int]) -> int:
        """`made`: by key, the place of what is in the block of `first`: what lies before it counts from there."""
        if value not in self.view.unit:
            return -1
        slot = self.slot(value)
        return slot if slot <= made.get(self.view.key[value], self.first) else slot - self.first - 1 + self.end
