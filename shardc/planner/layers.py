"""Equal layers, by the canonical form of their calls: what is decided for one is decided for all.

A part of the forward graph is written down with its values numbered in order: each call by its op, its arguments, the
types of its results, and for each operand either which call of the part made it, or its type and which of the part's
inputs, parameters or constants it is. Two parts are equal where these texts are. No name of a module, parameter or
value is in them; a number that differs, such as a dropout's probability or a scale, is.

    blocks.0, blocks.1, ..., also block1, block2 or enc_a, enc_b      parts are modules: the largest that repeat
    w1, w2, w3 used one after the other in one forward                runs of calls that repeat, where no module does
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.ir.schema import given
from shardc.planner.call_costs import trained_values

Form = tuple[object, ...]


@dataclass(frozen=True)
class EqualLayers:
    """`layers` are the classes of two parts or more, each part as its calls in order; `representative` maps each value
    of a part, its parameters included, and each call to that of the first part of its class."""

    layers: tuple[tuple[tuple[fx.Node, ...], ...], ...] = ()
    names: tuple[tuple[str, ...], ...] = ()  # of the modules that parts are, as the layers; "" for runs of calls
    representative: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def of(self, value: fx.Node) -> fx.Node:
        return self.representative.get(value, value)


def equal_layers(graph: Graph) -> EqualLayers:
    """The equal parts of a graph's forward."""
    calls = [n for n in graph.calls() if info(n).phase == "fwd" and not info(n).constant]
    modules = list(_repeated_modules(graph, calls))
    held = {call for parts, _ in modules for part in parts for call in part}
    runs = [(parts, ("",) * len(parts)) for parts in _repeated_runs(graph, [c for c in calls if c not in held])]
    representative: dict[fx.Node, fx.Node] = {}
    classes = [*modules, *runs]
    for parts, _ in classes:
        first = _values(graph, parts[0])
        for part in parts[1:]:
            for ours, theirs in zip(first, _values(graph, part), strict=True):
                representative.setdefault(theirs, representative.get(ours, ours))
    return EqualLayers(tuple(p for p, _ in classes), tuple(n for _, n in classes), representative)


def canonical_form(graph: Graph, calls: Sequence[fx.Node]) -> Form:
    """What a part of a graph computes, without any name."""
    ports = {n: p.role for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
    number: dict[fx.Node, object] = {}
    lines: list[object] = []
    for call in calls:
        used: list[object] = []
        for value in operands(call):
            if value not in number:
                kind = "constant" if info(value).constant else ports.get(value, "value")
                kind = "value" if kind == "input" else kind  # of the first layer of several
                number[value] = (kind, len(number), str(type_of(value)))
            used.append(number[value])
        arguments = _frozen(given(call))
        made = tuple(None if v is None else str(type_of(v)) for v in results(call))
        for v in results(call):
            if v is not None:
                number[v] = len(number)
        number.setdefault(call, len(number))
        lines.append((str(call.target), arguments, tuple(used), made))
    return tuple(lines)


def _frozen(value: object) -> object:
    """Arguments without values; the number of an op that draws random numbers is a name, too."""
    if isinstance(value, fx.Node):
        return "value"
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return tuple((k, "number" if k == "op_id" else _frozen(v)) for k, v in value.items())
    return (type(value).__name__, value)


def _values(graph: Graph, calls: Sequence[fx.Node]) -> list[fx.Node]:
    """The calls of a part, their results and the parameters that they read, each where it first appears."""
    ports = {n for p, n in zip(graph.inputs, graph.placeholders, strict=True) if p.role in ("param", "buffer")}
    seen: dict[fx.Node, None] = {}
    for call in calls:
        for value in [*(v for v in operands(call) if v in ports), call, *results(call)]:
            if value is not None:
                seen.setdefault(value)
    return list(seen)


def _repeated_modules(
    graph: Graph, calls: Sequence[fx.Node]
) -> Iterator[tuple[tuple[tuple[fx.Node, ...], ...], tuple[str, ...]]]:
    """The largest modules with an equal other one, class by class. Parts that share a parameter are not told apart."""
    inside: dict[str, list[fx.Node]] = {}
    for call in calls:
        segments = info(call).fqn.split(".") if info(call).fqn else []
        for i in range(1, len(segments) + 1):
            inside.setdefault(".".join(segments[:i]), []).append(call)
    trained = trained_values(graph)
    classes: dict[Form, list[str]] = {}
    for name, whole in inside.items():
        part = inside[name] = _own(whole, trained)
        if len(part) > 1:
            classes.setdefault(canonical_form(graph, part), []).append(name)
    taken: set[fx.Node] = set()
    for names in sorted(classes.values(), key=lambda names: -len(inside[names[0]])):
        free = [n for n in names if not taken.intersection(inside[n])]
        parts: list[tuple[fx.Node, ...]] = []
        shown: list[str] = []
        for name in free:
            part = tuple(inside[name])
            if not any(set(part) & set(other) for other in parts):
                parts.append(part)
                shown.append(name)
        if len(parts) > 1:
            taken.update(call for part in parts for call in part)
            yield tuple(parts), tuple(shown)


def _own(part: list[fx.Node], trained: frozenset[fx.Node]) -> list[fx.Node]:
    """The calls of a module but for those that other modules share: a mask, or positions, that the first one makes."""
    held = set(part)
    own: list[fx.Node] = []
    for call in part:
        values = [v for v in results(call) if v is not None]
        readers = {r for v in values for r in v.users if r.op == "call_function" and info(r).phase == "fwd"}
        if any(v in trained for v in values) or readers <= held | set(values):
            own.append(call)
    return own


def _repeated_runs(graph: Graph, calls: Sequence[fx.Node]) -> Iterator[tuple[tuple[fx.Node, ...], ...]]:
    """Runs of calls that follow each other and are equal, the shortest period first at each place."""
    keys = [(str(c.target), _frozen(given(c)), tuple(str(type_of(v)) for v in operands(c))) for c in calls]
    start = 0
    while start < len(calls):
        for period in range(2, (len(calls) - start) // 2 + 1):
            if keys[start : start + period] != keys[start + period : start + 2 * period]:
                continue
            form = canonical_form(graph, calls[start : start + period])
            stop = start + period
            while canonical_form(graph, calls[stop : stop + period]) == form:
                stop += period
            if stop - start > period:
                yield tuple(tuple(calls[i : i + period]) for i in range(start, stop, period))
                start = stop - 1
                break
        start += 1
