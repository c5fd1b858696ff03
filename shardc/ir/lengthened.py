"""A graph with a few equal layers, with all of them again: see `equal_layers.py`.

The order is that of `layer_blocks.py`: of two blocks, one for each unit is made here. The rest is kept, and what it
says of units beyond those that are made is told anew.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeVar

from torch import fx

from shardc.ir.equal_layers import READ, LayerPair, LayerView
from shardc.ir.gc_pause import made_old
from shardc.ir.graph import FIELD_VALUES, Graph, Port, ValueInfo, info, info_of, set_info
from shardc.ir.layer_blocks import LayerBlocks
from shardc.ir.units import UnequalError, Units
from shardc.torch_compat import add_node, args_of, kwargs_of

T = TypeVar("T")
OfBlock = Callable[[int], Any]


def lengthened(short: Graph, units: Units, lacking: Units | None = None) -> Graph:
    """A copy with the units between `first` and `last` made like these two, but for those that it is `lacking` still.
    Raises UnequalError where the two differ."""
    with made_old(), _lengthening(short, units, lacking) as lengthening:
        return lengthening.graph()


def lengthened_ports(short: Graph, units: Units) -> tuple[list[Port], list[Port]]:
    """The inputs and outputs that a lengthened graph has. Raises UnequalError where the two units differ so that there
    is none, in any number of units."""
    with _lengthening(short, units, units.narrowed(1, 0)) as by_one:
        by_one.graph()
    with _lengthening(short, units, None) as whole:
        return whole.ports(short.inputs, short.placeholders), whole.ports(short.outputs, short.output_values)


@contextmanager
def _lengthening(short: Graph, units: Units, lacking: Units | None) -> Generator[_Lengthening]:
    lengthening = _Lengthening(short, units, lacking)
    try:
        yield lengthening
    finally:
        vars(lengthening).clear()  # it holds functions that hold it: garbage for the collector, as large as the graph


@dataclass(frozen=True, slots=True)
class _Form:
    """How twins in two blocks are those of any: functions of the block's place, None where all have the same; and of
    what is said of the twin in the block of `first`, all `fields`, those that differ by their places. The twins' unit
    lies so many places `behind` the block's."""

    args: OfBlock | None
    kwargs: OfBlock | None
    fields: tuple[Any, ...]
    differing: list[tuple[int, OfBlock]]
    behind: int
    key: str


class _Lengthening:
    """See `lengthened`."""

    def __init__(self, short: Graph, units: Units, lacking: Units | None) -> None:
        self.short, self.units, self.lacking = short, units, lacking
        self.view = view = LayerView(short, units.path, units.period)
        self.blocks = LayerBlocks(view, units, lacking)
        self.first, self.end = self.blocks.first, self.blocks.end
        self.outside: dict[fx.Node, fx.Node] = {}  # what is made of values outside of layers
        self.inside: dict[tuple[int, str], fx.Node] = {}  # what is made in layers, by place and key
        self.places: dict[fx.Node, int] = {}  # in the whole, of values that are kept
        self.ends: dict[fx.Node, int] = {}  # and of those of the two blocks
        self.forms: dict[fx.Node, _Form] = {}
        self.texts: dict[str, OfBlock] = {}
        self.betweens: dict[tuple[int, int], tuple[OfBlock | None, Any, Any]] = {}  # of twins, by what they are

    def graph(self) -> Graph:
        short = self.short
        calls = [node for node in short.fx.nodes if node.op == "call_function"]
        inputs = list(self.blocks.spread(short.placeholders, lambda node: node))
        ports = self.ports(short.inputs, short.placeholders)
        self.whole = whole = Graph(fx.Graph(), short.mesh, ports, [], short.name)
        for x, y, at in (*inputs, *self.blocks.spread(calls, lambda node: node)):
            if y is None:
                self._keep(x, at)
            else:
                self._make(x, y, at)
        self._check_complete()
        outputs = self._pairs(zip(short.outputs, short.output_values, strict=True), 1)
        whole.outputs = tuple(port for port, _ in outputs)
        whole.fx.output([value for _, value in outputs])
        there = set(short.fx.nodes)  # passes may have erased values that these tables still hold
        whole.activations, whole.gradients = (
            dict(self._pairs(((k, v) for k, v in table.items() if v in there), 1))
            for table in (short.activations, short.gradients)
        )
        whole.stored, whole.seeds, whole.priorities = (
            dict(self._pairs(((k, v) for k, v in table.items() if k in there), 0))
            for table in (short.stored, short.seeds, short.priorities)
        )
        whole.diagnostics, whole.microbatches, whole.halves = list(short.diagnostics), short.microbatches, short.halves
        whole.tokens, whole.gathers_once, whole.units = short.tokens, short.gathers_once, short.units[:-1]
        if self.lacking is not None:
            whole.units += (self.lacking,)
        whole.taken = self._names()
        return whole

    def ports(self, ports: Sequence[Port], values: Sequence[fx.Node]) -> list[Port]:
        """What the values of a graph are called, in the whole."""
        spread = self.blocks.spread(zip(ports, values, strict=True), operator.itemgetter(1))
        return [x[0] if y is None else self._between(x[0], y[0], at) for x, y, at in spread]

    def _pairs(self, items: Iterable[tuple[Any, Any]], place: int) -> list[tuple[Any, Any]]:
        """What a graph says of values, of all units; at the `place` of each item is the value."""
        found: list[tuple[Any, Any]] = []
        for x, y, at in self.blocks.spread(items, operator.itemgetter(place)):
            found.append(self._between(x, y, at) if y is not None else _Kept(self, x[place], at).item(x))
        return found

    def _check_complete(self) -> None:
        """Raises UnequalError where one unit lacks a value that another one has."""
        places, keys = range(self.first, self.end + 1), self.view.members.get(self.units.first, {})
        if not all((place, key) in self.inside for place in places for key in keys):
            raise UnequalError(f"{self.units.path}: values are put off differently in layers")
        if sum(place in places for place, _ in self.inside) != len(places) * len(keys):
            raise UnequalError(f"{self.units.path}: layers are compiled differently")

    # ------------------------------------------------------------------ what is kept
    def _keep(self, node: fx.Node, place: int) -> None:
        kept = _Kept(self, node, place)
        args, kwargs = kept.part(args_of), kept.part(kwargs_of)
        copy = add_node(self.whole.fx, node.op, node.target, args, kwargs, node.name)
        set_info(copy, kept.said())
        if place < 0:
            self.outside[node] = copy
        else:
            self._add(place, self.view.key[node], copy)
            self.places[node] = place

    def _add(self, place: int, key: str, value: fx.Node) -> None:
        if (place, key) in self.inside:
            raise UnequalError(f"{self.units.path}: {key} is there twice")
        self.inside[place, key] = value

    # ------------------------------------------------------------------ what is made
    def _make(self, x: fx.Node, y: fx.Node, at: int) -> None:
        name = x.name if at == self.first else y.name if at == self.end else f"{x.name}_{at}"
        target = name if x.op == "placeholder" else x.target
        form = self.forms.get(x)
        if form is None:
            form = self.forms[x] = self._form(x, y)
        args = x.args if form.args is None else form.args(at)
        kwargs = x.kwargs if form.kwargs is None else form.kwargs(at)
        copy = add_node(self.whole.fx, x.op, target, args, kwargs, name)
        place = at + form.behind
        self._add(place, form.key, copy)
        if at == self.first or at == self.end:
            self.ends[x if at == self.first else y] = place
        if form.differing:
            fields = list(form.fields)
            for k, of_block in form.differing:
                fields[k] = of_block(at)
            set_info(copy, info_of(fields))
        else:
            set_info(copy, info_of(form.fields))

    def _form(self, x: fx.Node, y: fx.Node) -> _Form:
        fields = FIELD_VALUES(info(x))
        pairs = enumerate(zip(fields, FIELD_VALUES(info(y)), strict=True))
        differing = [(k, self._varying(a, b)) for k, (a, b) in pairs if a is not b]
        return _Form(
            self._varying(x.args, y.args),
            self._varying(x.kwargs, y.kwargs),
            fields,
            [(k, of_block) for k, of_block in differing if of_block is not None],
            self.blocks.slot(x) - self.first,
            self.view.key[x],
        )

    def _between(self, x: T, y: T, at: int) -> T:
        """What the block of a unit has where that of `first` has `x` and that of `last` has `y`."""
        known = self.betweens.get((id(x), id(y)))
        if known is None:
            known = self.betweens[id(x), id(y)] = self._varying(x, y), x, y
        return x if known[0] is None else known[0](at)

    def _varying(self, x: Any, y: Any) -> OfBlock | None:
        """What the block of each unit has where that of `first` has `x` and that of `last` has `y`; None where all of
        them have `x`."""
        kind = type(x)
        if kind is fx.Node:
            return self._operand(x, y)
        if kind is str:
            return None if x == y else self._retold(x)
        if isinstance(x, tuple | list):
            make = tuple if isinstance(x, tuple) else kind
            return self._items(x, y, lambda items: make(items))
        if isinstance(x, dict):
            keys = list(x)
            values = list(x.values()), [y[key] for key in keys]
            return self._items(*values, lambda items: dict(zip(keys, items, strict=True)))
        if kind in READ and x != y:
            return self._items(READ[kind](x), READ[kind](y), lambda items: kind(*items))
        if kind is int and x != y:
            first, step = self.units.first, (y - x) // (self.units.last - self.units.first)
            return lambda at: x + step * (self.blocks.unit(at) - first)
        return None

    def _items(self, x: Sequence[Any], y: Sequence[Any], make: Callable[[list[Any]], Any]) -> OfBlock | None:
        each = [self._varying(a, b) for a, b in zip(x, y, strict=True)]
        varying = [(k, of_block) for k, of_block in enumerate(each) if of_block is not None]
        if not varying:
            return None

        def of_block(at: int) -> Any:
            items = list(x)
            for k, item in varying:
                items[k] = item(at)
            return make(items)

        return of_block

    def _operand(self, x: fx.Node, y: fx.Node) -> OfBlock:
        if x is y:
            return lambda at: self.read(x)
        key, behind = self.view.key[x], self.blocks.slot(x) - self.first
        return lambda at: self.read_inside(at + behind, key)

    def _retold(self, text: str) -> OfBlock:
        """A text of the block of `first`, in each block: made once, as many values say the same."""
        if text not in self.texts:
            view, slot, parts = self.view, self.units.slot, self.view.index.split(text)
            if len(parts) == 3:  # as nearly all
                unit, element = divmod(int(parts[1]), view.period)
                before, behind, after = f"{parts[0]}{view.path}.", slot(unit) - self.first, parts[2]
                self.texts[text] = cache(
                    lambda at: f"{before}{self.blocks.unit(at + behind) * view.period + element}{after}"
                )
            else:
                self.texts[text] = cache(
                    lambda at: view.retold(text, lambda unit: self.blocks.unit(at + slot(unit) - self.first))
                )
        return self.texts[text]

    # ------------------------------------------------------------------ places
    def place_of(self, value: fx.Node) -> int | None:
        """The place in the whole of a value of the short graph, None before it is there."""
        return self.places.get(value, self.ends.get(value))

    def read(self, node: fx.Node) -> fx.Node:
        """What is made of a value that is kept."""
        if node in self.view.unit:
            return self.read_inside(self.places.get(node, -1), self.view.key[node])
        if node not in self.outside:
            raise UnequalError(f"{info(node).name} is read before it is there")
        return self.outside[node]

    def read_inside(self, place: int, key: str) -> fx.Node:
        value = self.inside.get((place, key))
        if value is None:
            raise UnequalError(f"{key} is read before it is there, or by every layer")
        return value

    def _names(self) -> dict[str, int]:
        """The names that are taken, those of values that passes erased too."""
        names = self.short.taken
        for name, count in self.short.taken.items():
            found = self.view.index.search(name)
            if found is not None and int(found[1]) // self.units.period == self.units.first:
                names |= dict.fromkeys(map(self._retold(name), range(self.first + 1, self.end)), count)
        return names


class _Kept:
    """A value that is kept, or what is said of it, and its `place` in the whole: -1 outside of layers.

    In the short graph it may read another unit across those that are left out. It means this very unit (as all layers
    may read something of the first), or the one as many units away. Its `twin` in the unit beside it tells which.
    Raises UnequalError where it has none, and where a value outside of layers reads units that are made."""

    def __init__(self, of: _Lengthening, node: fx.Node, place: int) -> None:
        self.of, self.view, self.node, self.place = of, of.view, node, place
        self.moved = place - of.units.slot(of.view.unit[node]) if place >= 0 else 0

    def said(self) -> ValueInfo:
        """What is known of it."""
        about = info(self.node)
        return ValueInfo(*self.part(lambda node: FIELD_VALUES(info(node)))) if self._is_unclear(about) else about

    def part(self, of: Callable[[fx.Node], Any]) -> Any:
        """A part of what a node says, as it is in the whole."""
        part = of(self.node)
        return self._told(part, of(self.twin) if self._is_unclear(part) else part)

    def item(self, item: tuple[Any, Any]) -> tuple[Any, Any]:
        """What a graph's table says of it."""
        told = tuple(self._item(part) if part is self.node else part for part in item)
        if self._is_unclear([part for part in item if part is not self.node]):
            raise UnequalError(f"{info(self.node).name} is said to be of another layer")
        return told[0], told[1]

    def _item(self, node: fx.Node) -> fx.Node:
        return self.of.outside[node] if self.place < 0 else self.of.read_inside(self.place, self.view.key[node])

    @cached_property
    def twin(self) -> fx.Node:
        """The value of a unit beside its own that says the same."""
        slot, unit, key = self.of.units.slot, self.view.unit[self.node], self.view.key[self.node]
        for other in (each for each in self.view.members if abs(slot(each) - slot(unit)) == 1):
            twin = self.view.members[other].get(key)
            if twin is not None and LayerPair(self.view, other, unit, slot).twins(twin, self.node):
                return twin
        raise UnequalError(f"{info(self.node).name} may read one unit or another")

    def _as_far(self, unit: int) -> int:
        """The place in the whole that is as far away as a unit is in the short graph."""
        return self.moved + self.of.units.slot(unit)

    def _is_unclear(self, x: Any) -> bool:
        """Does it say something of a unit that may be another one in the whole?"""
        kind = type(x)
        if kind is fx.Node:
            unit = self.view.unit.get(x)
            if self.place < 0:
                ends, place = (self.of.units.first, self.of.units.last), self.of.places.get(x)
                if unit in ends or (place is not None and self.of.blocks.unit(place) != unit):
                    raise UnequalError(f"{info(x).name} is read outside of its layer and the next")
                return False
            return unit is not None and self._as_far(unit) != self.of.place_of(x)
        if kind is str:
            units = self.view.units_in(x) if self.place >= 0 else ()
            return any(self.of.blocks.unit(self._as_far(unit)) != unit for unit in units)
        if isinstance(x, tuple | list):
            return any(map(self._is_unclear, x))
        if isinstance(x, dict):
            return any(map(self._is_unclear, x.values()))
        if kind is ValueInfo:
            return any(map(self._is_unclear, FIELD_VALUES(x)))
        return kind in READ and any(map(self._is_unclear, READ[kind](x)))

    def _told(self, x: Any, y: Any) -> Any:
        """A part, where its twin has `y`."""
        kind = type(x)
        if kind is fx.Node:
            if x is y and self._is_unclear(x):
                return self.of.read(x)
            return self._operand(x)
        if kind is str:
            return x if x == y else self.view.retold(x, lambda unit: self.of.blocks.unit(self._as_far(unit)))
        if isinstance(x, tuple | list):
            return (tuple if isinstance(x, tuple) else kind)(map(self._told, x, y))
        if isinstance(x, dict):
            return {key: self._told(value, y[key]) for key, value in x.items()}
        if kind in READ:
            return x if x == y else kind(*map(self._told, READ[kind](x), READ[kind](y)))
        return x

    def _operand(self, x: fx.Node) -> fx.Node:
        if self.place < 0 or x not in self.view.unit:
            return self.of.read(x)
        return self.of.read_inside(self._as_far(self.view.unit[x]), self.view.key[x])
