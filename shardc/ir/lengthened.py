"""A graph with a few equal layers, with all of them again: see `equal_layers.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from typing import Any, TypeVar

from torch import fx

from shardc.ir.equal_layers import READ, LayerPair, LayerView
from shardc.ir.gc_pause import made_old
from shardc.ir.graph import FIELD_VALUES, Graph, info, info_of, set_info
from shardc.ir.units import UnequalError, Units
from shardc.torch_compat import add_node

T = TypeVar("T")
OfUnit = Callable[[int], Any]


def lengthened(short: Graph, units: Units) -> Graph:
    """A copy with the units between `first` and `last` made like these two. Raises UnequalError where they differ."""
    lengthening = _Lengthening(short, units)
    try:
        with made_old():
            return lengthening.graph()
    finally:
        vars(lengthening).clear()  # it holds functions that hold it: garbage for the collector, as large as the graph


@dataclass(frozen=True, slots=True)
class _Form:
    """How twins in two units are those of any: functions of the unit, None where all have the same; and of what is said
    of the twin in `first`, all `fields`, those that differ by their places."""

    args: OfUnit | None
    kwargs: OfUnit | None
    fields: tuple[Any, ...]
    differing: list[tuple[int, OfUnit]]


class _Lengthening:
    """See `lengthened`. Of two twins in `first` and `last` one is made for each unit from the one to the other."""

    def __init__(self, short: Graph, units: Units) -> None:
        self.short, self.units = short, units
        self.view = LayerView(short, units.path, units.period)
        self.pair = pair = LayerPair(self.view, units.first, units.last, units.slot)
        if not pair.holds():
            raise UnequalError(f"{units.path}: units {units.first} and {units.last} are compiled differently")
        distance = units.last - units.first
        if any(step % distance or step // distance not in units.steps for step in pair.steps):
            raise UnequalError(f"{units.path}: numbers that do not count units")
        self.kept: dict[fx.Node, fx.Node] = {}
        self.made: dict[int, dict[str, fx.Node]] = {unit: {} for unit in range(units.first, units.last + 1)}
        self.forms: dict[fx.Node, _Form] = {}
        self.texts: dict[str, OfUnit] = {}
        self.betweens: dict[tuple[int, int], tuple[OfUnit | None, Any, Any]] = {}  # of twins, by what they are

    def graph(self) -> Graph:
        short, unit = self.short, self.view.unit
        ports = dict(zip(short.placeholders, short.inputs, strict=True))
        inputs = [
            self._between(ports[x], ports[y], at) if y is not None else ports[x]
            for x, y, at in self._spread(short.placeholders, unit.get)
        ]
        self.whole = whole = Graph(fx.Graph(), short.mesh, inputs, [], short.name)
        calls = [node for node in short.fx.nodes if node.op == "call_function"]
        for x, y, at in (*self._spread(short.placeholders, unit.get), *self._spread(calls, unit.get)):
            if y is None:
                self._keep(x)
            else:
                self._make(x, y, at)
        returned = zip(short.outputs, short.output_values, strict=True)
        outputs = self._pairs(returned, lambda each: unit.get(each[1]))
        whole.outputs = tuple(port for port, _ in outputs)
        whole.fx.output([value for _, value in outputs])
        there = set(short.fx.nodes)  # passes may have erased values that these tables still hold
        whole.activations, whole.gradients = (
            dict(self._pairs(((k, v) for k, v in table.items() if v in there), lambda each: unit.get(each[1])))
            for table in (short.activations, short.gradients)
        )
        stored, seeds = short.stored.items(), short.seeds.items()
        whole.stored = dict(self._pairs((each for each in stored if each[0] in there), lambda each: unit.get(each[0])))
        whole.seeds = dict(self._pairs((each for each in seeds if each[0] in there), lambda each: unit.get(each[0])))
        whole.priorities = self._priorities()
        whole.diagnostics, whole.microbatches, whole.halves = list(short.diagnostics), short.microbatches, short.halves
        whole.tokens, whole.gathers_once, whole.units = short.tokens, short.gathers_once, short.units[:-1]
        whole.taken = self._names()
        return whole

    def _spread(self, items: Iterable[T], unit: Callable[[T], int | None]) -> Iterator[tuple[T, T | None, int]]:
        """Items in the order that they have in the whole: with its twin and its unit what is made, alone what is kept.

        What belongs to `first` and `last` has to lie side by side, in either order."""
        first, last = self.units.first, self.units.last
        groups = [(of, list(group)) for of, group in groupby(items, unit)]
        each = iter(groups)
        for of, group in each:
            if of not in (first, last):
                yield from ((item, None, 0) for item in group)
                continue
            beside, others = next(each, (None, []))
            if {of, beside} != {first, last} or len(group) != len(others):
                raise UnequalError(f"{self.units.path}: units {first} and {last} do not lie side by side")
            order = range(first, last + 1) if of == first else range(last, first - 1, -1)
            pairs = list(zip(group, others, strict=True) if of == first else zip(others, group, strict=True))
            if not all(self.pair.same(x, y) for x, y in pairs):
                raise UnequalError(f"{self.units.path}: units {first} and {last} have another order")
            yield from ((x, y, at) for at in order for x, y in pairs)

    def _pairs(self, items: Iterable[T], unit: Callable[[T], int | None]) -> list[T]:
        return [self._kept(x, None) if y is None else self._between(x, y, at) for x, y, at in self._spread(items, unit)]

    def _keep(self, node: fx.Node) -> None:
        unit = self.view.unit.get(node)
        args, kwargs = self._kept(node.args, unit), self._kept(node.kwargs, unit)
        self.kept[node] = copy = add_node(self.whole.fx, node.op, node.target, args, kwargs, node.name)
        set_info(copy, info(node))

    def _make(self, x: fx.Node, y: fx.Node, at: int) -> None:
        name = x.name if at == self.units.first else y.name if at == self.units.last else f"{x.name}_{at}"
        target = name if x.op == "placeholder" else x.target
        form = self.forms.get(x)
        if form is None:
            form = self.forms[x] = self._form(x, y)
        args = x.args if form.args is None else form.args(at)
        kwargs = x.kwargs if form.kwargs is None else form.kwargs(at)
        self.made[at][self.view.key[x]] = copy = add_node(self.whole.fx, x.op, target, args, kwargs, name)
        if at == self.units.first:
            set_info(copy, info(x))
            return
        fields = list(form.fields)
        for k, of_unit in form.differing:
            fields[k] = of_unit(at)
        set_info(copy, info_of(fields))

    def _form(self, x: fx.Node, y: fx.Node) -> _Form:
        fields = FIELD_VALUES(info(x))
        pairs = enumerate(zip(fields, FIELD_VALUES(info(y)), strict=True))
        differing = [(k, self._varying(a, b)) for k, (a, b) in pairs if a is not b]
        return _Form(
            self._varying(x.args, y.args),
            self._varying(x.kwargs, y.kwargs),
            fields,
            [(k, of_unit) for k, of_unit in differing if of_unit is not None],
        )

    def _kept(self, value: Any, unit: int | None) -> Any:
        """A part of a call of a unit that is kept, or of none. It may read of `first` and `last` what is beside it."""

        def operand(node: fx.Node) -> fx.Node:
            of = self.view.unit.get(node)
            if of not in (self.units.first, self.units.last):
                return self._there(self.kept, node)
            if unit != of + (1 if of == self.units.last else -1):
                raise UnequalError(f"{info(node).name} is read outside of its layer and the next")
            return self._there(self.made[of], self.view.key[node])

        if type(value) is tuple:
            return tuple(self._kept(each, unit) for each in value)
        return fx.map_arg(value, operand)

    def _between(self, x: T, y: T, at: int) -> T:
        """What a unit has where `first` has `x` and `last` has `y`."""
        known = self.betweens.get((id(x), id(y)))
        if known is None:
            known = self.betweens[id(x), id(y)] = self._varying(x, y), x, y
        return x if known[0] is None else known[0](at)

    def _varying(self, x: Any, y: Any) -> OfUnit | None:
        """What each unit has where `first` has `x` and `last` has `y`; None where all of them have `x`."""
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
            return lambda at: x + step * (at - first)
        return None

    def _items(self, x: Sequence[Any], y: Sequence[Any], make: Callable[[list[Any]], Any]) -> OfUnit | None:
        each = [self._varying(a, b) for a, b in zip(x, y, strict=True)]
        varying = [(k, of_unit) for k, of_unit in enumerate(each) if of_unit is not None]
        if not varying:
            return None

        def of_unit(at: int) -> Any:
            items = list(x)
            for k, item in varying:
                items[k] = item(at)
            return make(items)

        return of_unit

    def _operand(self, x: fx.Node, y: fx.Node) -> OfUnit:
        if x is y:
            if self.view.unit.get(x) in (self.units.first, self.units.last):
                raise UnequalError(f"{info(x).name} is read by every layer")
            return lambda at: self._there(self.kept, x)
        unit, key = self.view.unit[x], self.view.key[x]
        behind = self.units.slot(unit) - self.units.slot(self.units.first)
        if abs(behind) > 1:
            raise UnequalError(f"{info(x).name} is read outside of its layer and the next")

        def of_unit(at: int) -> fx.Node:
            twins = self.made.get(at + behind)  # by key; None of a unit that is kept
            if twins is not None:
                return self._there(twins, key)
            return self._there(self.kept, self.view.members[at + behind][key])

        return of_unit

    @staticmethod
    def _there(values: Mapping[Any, fx.Node], key: object) -> fx.Node:
        if key not in values:
            raise UnequalError(f"{key} is read before it is there")
        return values[key]

    def _retold(self, text: str) -> OfUnit:
        """A text of `first`, for each unit once: many values say the same."""
        if text not in self.texts:
            parts, period, slot = self.view.index.split(text), self.units.period, self.units.slot
            if len(parts) == 3:  # as nearly all
                unit, element = divmod(int(parts[1]), period)
                before, behind, after = f"{parts[0]}{self.units.path}.", slot(unit) - slot(self.units.first), parts[2]
                self.texts[text] = cache(lambda at: f"{before}{(at + behind) * period + element}{after}")
            else:
                self.texts[text] = cache(partial(self._text, text))
        return self.texts[text]

    def _text(self, text: str, at: int) -> str:
        """A text of `first`, for the unit `at`."""
        parts = self.view.index.split(text)
        for k in range(1, len(parts), 2):
            unit, element = divmod(int(parts[k]), self.units.period)
            beside = at + self.units.slot(unit) - self.units.slot(self.units.first)
            parts[k] = f"{self.units.path}.{beside * self.units.period + element}"
        return "".join(parts)

    def _priorities(self) -> dict[fx.Node, dict[tuple[int, str], int]]:
        there: dict[fx.Node, dict[tuple[int, str], int]] = {}
        for node, priorities in self.short.priorities.items():
            unit = self.view.unit.get(node)
            if node in self.kept:
                there[self.kept[node]] = priorities
            elif unit is not None and unit == self.units.first:
                key = self.view.key[node]
                there |= {made[key]: priorities for made in self.made.values()}
        return there

    def _names(self) -> dict[str, int]:
        """The names that are taken, those of values that passes erased too."""
        names = self.short.taken
        for name, count in self.short.taken.items():
            found = self.view.index.search(name)
            if found is not None and int(found[1]) // self.units.period == self.units.first:
                names |= dict.fromkeys(map(self._retold(name), self.units.removed), count)
        return names
