"""Equal layers of a graph: which of them say the same, a graph without most of them, and one with them again.

    model.layers.0   1   2   3   4   ...   28   29   30   31      32 layers, as traced
    model.layers.0   1   2                      29   30   31      shortened: what 29 reads of 28, it reads of 2
    model.layers.0   1   2   3   4   ...   28   29   30   31      lengthened: 3 to 28 are made like 2 and 29

Two layers say the same if each call of one has its twin in the other: the same op, arguments and types, operands that
are twins or one and the same value, and texts (names, causes) that differ by the layer's index alone. The numbers of
random calls count: from each layer to the next they grow by the same.

A pass that decides by a call and what is near it makes the same of equal layers, however many there are. So fewer of
them are compiled, and if of the result 2 and 29 say the same still, so would those between. What does not fit raises
`UnequalError`, and then all layers have to be compiled: values outside of layers that read several of them, calls of
one layer in the midst of another's, and decisions of a pass that span several layers (`Graph.units` tells it).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

from torch import fx
from torch._ops import OpOverload

from shardc.ir.graph import FIELD_VALUES, KEY, Graph, Port, Seed, info, set_info
from shardc.ir.layers import layer_of, list_and_index
from shardc.ir.provenance import Cause, Derivation, Requirement
from shardc.ir.schema import given, schema_of
from shardc.ir.units import UnequalError, Units
from shardc.torch_compat import add_node

T = TypeVar("T")
LEAST = 8  # units that are left out, or it is not worth the search
LONGEST_PERIOD = 6  # kinds of layers that take turns
NUMBER = "op_id"  # of a random call: which of the graph's it is
READ = {kind: operator.attrgetter(*kind.__slots__) for kind in (Cause, Requirement, Derivation, Seed, Port)}


def equal_layers(graph: Graph) -> Units | None:
    """The longest run of equal units, of the list of layers with the most calls that has one; None without any."""
    kinds: dict[str, dict[int, list[Any]]] = {}
    for node, layer in _layers(graph):
        path, index = list_and_index(layer)
        kinds.setdefault(path, {}).setdefault(index, []).append(node.target if node.op == "call_function" else "")
    for path, elements in sorted(kinds.items(), key=lambda item: -sum(map(len, item[1].values()))):
        if len(elements) < LEAST + 4 or max(elements) != len(elements) - 1:
            continue
        forms = [hash(tuple(elements[index])) for index in range(len(elements))]
        for period in range(1, LONGEST_PERIOD + 1):
            alike = sum(map(operator.eq, forms, forms[period:]))
            if alike >= max((LEAST + 3) * period, len(forms) // 2):
                found = _longest(LayerView(graph, path, period), len(forms) // period)
                if found is not None:
                    return found
    return None


def _longest(view: LayerView, count: int) -> Units | None:
    best, start, steps, of_best = range(0), 0, list[int](), list[int]()
    for unit in range(count - 1):
        pair = LayerPair(view, unit, unit + 1)
        if not pair.holds():
            start = unit + 1
            continue
        if unit == start or pair.steps != steps:
            start, steps = unit, pair.steps
        if unit + 2 - start > len(best):
            best, of_best = range(start, unit + 2), steps
    if len(best) < LEAST + 4:
        return None
    # The first and the last of them stay, too: passes may look further than a layer's neighbour.
    return Units(view.path, view.period, best[1], best[-2], frozenset(of_best))


def shortened(graph: Graph, units: Units) -> Graph:
    """A copy without the units that are `removed`. Raises UnequalError where others read more of them than the next."""
    view = LayerView(graph, units.path, units.period)
    short = Graph(fx.Graph(), graph.mesh, [], [], graph.name)
    table: dict[fx.Node, fx.Node] = {}
    beside = {(units.last, units.last - 1): units.first, (units.first, units.first + 1): units.last}
    for node in graph.fx.nodes:
        unit = view.unit.get(node)
        if unit in units.removed or node.op == "output":
            continue

        def operand(value: fx.Node, unit: int | None = unit) -> fx.Node:
            if (read := view.unit.get(value)) in units.removed:
                other = beside.get((unit, read)) if unit is not None and read is not None else None
                if other is None:
                    raise UnequalError(f"{info(value).name} is read outside of its layer and the next")
                value = view.members[other][view.key[value]]
            if value not in table:
                raise UnequalError(f"{info(value).name} is read before it is there")
            return table[value]

        args, kwargs = fx.map_arg(node.args, operand), fx.map_arg(node.kwargs, operand)
        table[node] = copy = add_node(short.fx, node.op, node.target, args, kwargs, node.name)
        set_info(copy, info(node))
    returned = [(port.name, node) for port, node in zip(graph.outputs, graph.output_values, strict=True)]
    for name, node in (*graph.gradients.items(), *returned):
        if (units.within(name)[0] in units.removed) != (view.unit.get(node) in units.removed):
            raise UnequalError(f"{name} is {info(node).name}")
    short.inputs = tuple(p for p, n in zip(graph.inputs, graph.placeholders, strict=True) if n in table)
    outputs = [(p, table[n]) for p, n in zip(graph.outputs, graph.output_values, strict=True) if n in table]
    short.outputs = tuple(port for port, _ in outputs)
    short.fx.output([value for _, value in outputs])

    def renamed(name: str, node: fx.Node) -> str:
        """What the next layer says of a value."""
        unit = units.within(name)[0]
        if unit not in units.removed:
            return name
        other = beside.get((view.unit.get(node, -1), unit or 0))
        if other is None:
            raise UnequalError(f"{info(node).name} is also {name}")
        return units.renamed(name, other)

    short.activations = {renamed(name, n): table[n] for name, n in graph.activations.items() if n in table}
    short.gradients = {name: table[n] for name, n in graph.gradients.items() if n in table}
    short.diagnostics, short.microbatches, short.halves = list(graph.diagnostics), graph.microbatches, graph.halves
    short.tokens, short.gathers_once, short.units = graph.tokens, graph.gathers_once, (*graph.units, units)
    assert not graph.seeds, "`seed` has run"
    return short


class LayerView:
    """A graph by units: of each value its unit, its name without the unit's number, and what the graph's tables say."""

    def __init__(self, graph: Graph, path: str, period: int) -> None:
        self.path, self.period = path, period
        self.index = re.compile(rf"(?<!\w){re.escape(path)}\.(\d+)(?!\w)")
        self.unit: dict[fx.Node, int] = {}
        self.key: dict[fx.Node, str] = {}
        self.members: dict[int, dict[str, fx.Node]] = {}
        for node, layer in _layers(graph):
            of, index = list_and_index(layer)
            if of == path:
                self.unit[node] = unit = index // period
                self.key[node] = key = self.key_of(info(node).name, unit)
                self.members.setdefault(unit, {})[key] = node
        self.said: dict[fx.Node, list[Any]] = {}
        for value, word in tables_of(graph):
            self.said.setdefault(value, []).append(word)

    def key_of(self, name: str, unit: int) -> str:
        parts = self.index.split(name)
        parts[1::2] = [f"<{int(index) - unit * self.period}>" for index in parts[1::2]]
        return "".join(parts)

    def units_in(self, text: str) -> list[int]:
        """The units that a text names."""
        if self.path not in text:
            return []
        return [int(index) // self.period for index in self.index.findall(text)]

    def retold(self, text: str, of: Callable[[int], int]) -> str:
        """A text with other units, as `of` says."""
        parts = self.index.split(text)
        for k in range(1, len(parts), 2):
            unit, element = divmod(int(parts[k]), self.period)
            parts[k] = f"{self.path}.{of(unit) * self.period + element}"
        return "".join(parts)


class LayerPair:
    """Two units of a view that may say the same. `slot` says where a unit is among those that the view has."""

    def __init__(self, view: LayerView, here: int, there: int, slot: Callable[[int], int] = int) -> None:
        self.view, self.here, self.there, self.slot = view, here, there, slot
        self.apart = slot(there) - slot(here)
        self.steps: list[int] = []  # by what numbers differ, in turn

    def holds(self) -> bool:
        mine, others = (self.view.members.get(unit, {}) for unit in (self.here, self.there))
        return mine.keys() == others.keys() and all(self.twins(node, others[key]) for key, node in mine.items())

    def twins(self, x: fx.Node, y: fx.Node) -> bool:
        """Do two values of the units say the same?"""
        return (
            x.op == y.op
            and (x.op == "placeholder" or (x.target is y.target and self._arguments(x, y)))
            and self.same(FIELD_VALUES(x.meta[KEY]), FIELD_VALUES(y.meta[KEY]))
            and self.same(self.view.said.get(x), self.view.said.get(y))
        )

    def same(self, x: Any, y: Any) -> bool:
        """Are two parts of calls, or of what is known of them, equal or twins?"""
        if x is y:
            return True
        kind = type(x)
        if kind is not type(y):
            return False
        if kind is str:
            return x == y or self._texts(x, y)
        if kind is fx.Node:
            return self._beside(self.view.unit.get(x), self.view.unit.get(y)) and self.view.key[x] == self.view.key[y]
        if isinstance(x, tuple | list):
            return len(x) == len(y) and all(map(self.same, x, y))
        if isinstance(x, dict):
            return x.keys() == y.keys() and all(self.same(x[key], y[key]) for key in x)
        if kind in READ:
            return all(map(self.same, READ[kind](x), READ[kind](y)))
        return bool(x == y)

    def _arguments(self, x: fx.Node, y: fx.Node) -> bool:
        if not _is_numbered(x.target):
            return self.same(x.args, y.args) and self.same(x.kwargs, y.kwargs)
        mine, others = given(x), given(y)
        self.steps.append(others[NUMBER] - mine[NUMBER])
        return all(name == NUMBER or self.same(mine[name], others[name]) for name in mine)

    def _beside(self, x: int | None, y: int | None) -> bool:
        return x is not None and y is not None and self.slot(y) - self.slot(x) == self.apart

    def _texts(self, x: str, y: str) -> bool:
        mine, others, period = self.view.index.split(x), self.view.index.split(y), self.view.period
        return mine[::2] == others[::2] and all(
            self._beside(a // period, b // period) and a % period == b % period
            for a, b in zip(map(int, mine[1::2]), map(int, others[1::2]), strict=True)
        )


@cache
def _is_numbered(op: Any) -> bool:
    return isinstance(op, OpOverload) and any(argument.name == NUMBER for argument in schema_of(op).arguments)


def tables_of(graph: Graph) -> Iterator[tuple[fx.Node, tuple[str, Any]]]:
    """What a graph says of values beside the calls: the table, and what it has of the value."""
    for value, port in zip(graph.placeholders, graph.inputs, strict=True):
        yield value, ("input", port)
    for value, port in zip(graph.output_values, graph.outputs, strict=True):
        yield value, ("output", port)
    for table in ("activations", "gradients"):
        for name, value in getattr(graph, table).items():
            yield value, (table, name)
    for table in ("stored", "seeds", "priorities"):
        for value, of in getattr(graph, table).items():
            yield value, (table, of)


def _layers(graph: Graph) -> Iterator[tuple[fx.Node, str]]:
    """The values of layers, each with its layer: parameters, their states, and what is cut of them by their names."""
    homes = {n: port.parameter or port.name for n, port in zip(graph.placeholders, graph.inputs, strict=True)}
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        home = info(node).fqn or homes.get(node)
        if not home and len(node.all_input_nodes) == 1:
            home = homes.get(node.all_input_nodes[0])
        if home:
            homes[node] = home
            if layer := layer_of(home):
                yield node, layer
