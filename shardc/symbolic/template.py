"""Programs of several sizes as one: equal but for numbers, each of which is an expression of the extents.

    view(%x, [16, 24, 4, 8])    view(%x, [40, 16, 4, 8])    ...    ->    view(%x, [B, S, 4, 8])

Compared is what a program's file holds of a graph (`ir.plain`): calls, operands, arguments, types. What differs in
anything but a number, or in a number that has no expression, fixes the extents: it is reported with its line (SC232).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.plain import Plain
from shardc.symbolic.expression import Expression, Fitter, Point

NUMBER = re.compile(r"\d+")
# Floats that hold a size: 1/(B*S) of a mean, 1/sqrt(S) of a scale.
FORMS: dict[str, tuple[Callable[[float], float], Callable[[int], float]]] = {
    "n": (lambda x: x, float),
    "1/n": (lambda x: 1 / x if x else math.nan, lambda n: 1 / n),
    "sqrt(n)": (lambda x: x * x, math.sqrt),
    "1/sqrt(n)": (lambda x: 1 / (x * x) if x else math.nan, lambda n: 1 / math.sqrt(n)),
    "n**-0.5": (lambda x: 1 / (x * x) if x else math.nan, lambda n: n**-0.5),
}


@dataclass(frozen=True)
class Hole:
    """A number, or a text with numbers, that depends on extents."""

    parts: tuple[str | Expression, ...]
    form: str = ""  # of a float: of FORMS; of a text: "text"

    def filled(self, point: Point) -> Any:
        """What stands here at a point. Raises ValueError where that is no whole number."""
        values = [part if isinstance(part, str) else whole(part, point) for part in self.parts]
        if self.form == "text":
            return "".join(map(str, values))
        number = cast(int, values[0])
        return FORMS[self.form][1](number) if self.form else number


def whole(expression: Expression, point: Point) -> int:
    value = expression.at(point)
    if value.denominator != 1:
        raise ValueError(f"{expression} is {value}")
    return value.numerator


class _DiffersError(Exception):
    """Values that are no numbers, or have no expression."""


def generalised(graphs: Sequence[Plain], fitter: Fitter) -> Plain:
    """One graph with holes for several. Raises ShardcError (SC232) with the first node that differs."""
    first = graphs[0]
    nodes: list[Any] = []
    for place, alike in enumerate(_aligned(graphs, fitter.points)):
        try:
            nodes.append(_merged(alike, fitter))
        except _DiffersError as differs:
            raise _guard(graphs, place, fitter.points, str(differs)) from None
    rest = [{key: value for key, value in graph.items() if key != "nodes"} for graph in graphs]
    try:
        return {**_merged(rest, fitter), "nodes": nodes}
    except _DiffersError as differs:
        raise error("SC232", f"the program of {first['name']} differs: {differs}", hint=HINT) from None


def merged(values: Sequence[Any], fitter: Fitter) -> Any:
    """One tree with holes for several; None where they differ in more than numbers, or a number has no expression."""
    try:
        return _merged(values, fitter)
    except _DiffersError:
        return None


HINT = "what depends on a size in another way than by numbers is compiled for each size"


def filled(tree: Any, point: Point) -> Any:
    """The graph of a template at a point. Raises ValueError where a number is not whole."""
    if isinstance(tree, Hole):
        return tree.filled(point)
    if isinstance(tree, dict):
        return {key: filled(value, point) for key, value in cast("Plain", tree).items()}
    return [filled(item, point) for item in cast("list[Any]", tree)] if isinstance(tree, list) else tree


def holes(tree: Any) -> list[Hole]:
    if isinstance(tree, Hole):
        return [tree]
    items = (
        cast("Plain", tree).values()
        if isinstance(tree, dict)
        else cast("list[Any]", tree)
        if isinstance(tree, list)
        else []
    )
    return [hole for item in items for hole in holes(item)]


def _aligned(graphs: Sequence[Plain], points: Sequence[Point]) -> list[tuple[Any, ...]]:
    """The nodes at one place, of all graphs. Raises ShardcError (SC232) where one has a node more, at that node."""
    counts = {len(graph["nodes"]) for graph in graphs}
    if len(counts) > 1:
        other = next(graph for graph in graphs if len(graph["nodes"]) != len(graphs[0]["nodes"]))
        pairs = enumerate(zip(graphs[0]["nodes"], other["nodes"], strict=False))
        place = next((i for i, (a, b) in pairs if _kind(a) != _kind(b)), min(counts) - 1)
        raise _guard([graphs[0], other], place, [points[0], points[list(graphs).index(other)]], "")
    return list(zip(*(graph["nodes"] for graph in graphs), strict=True))


def _kind(node: Plain) -> Any:
    return node["name"], node.get("call"), node.get("source")


def _guard(graphs: Sequence[Plain], place: int, points: Sequence[Point], what: str) -> ShardcError:
    """The error for the first node that is not the same at all points."""
    nodes = [graph["nodes"][min(place, len(graph["nodes"]) - 1)] for graph in graphs]
    first = nodes[0]
    other, point = next(
        ((n, p) for n, p in zip(nodes[1:], points[1:], strict=True) if _kind(n) != _kind(first)),
        (nodes[-1], points[-1]),
    )
    node = first if first.get("source") else other
    used = node if node.get("source") else next((n for n in graphs[0]["nodes"] if _takes(n, node["name"])), node)
    message = f"a size is fixed by %{node['name']}: "
    if _kind(first) != _kind(other):
        message += f"with {_said(points[0])} it is {_call(first)}, with {_said(point)} {_call(other)}"
    else:
        message += what
    return error(
        "SC232",
        message,
        location=used.get("source") or None,
        source_text=used.get("source_text") or None,
        fqn=used.get("fqn") or None,
        hint=HINT,
    )


def _takes(node: Plain, name: str) -> bool:
    """Is this the line of a call that takes a value, an input say, which has no line itself?"""
    return bool(node.get("source")) and {"ref": name} in node.get("args", [])


def _call(node: Plain) -> str:
    return f"%{node['name']} = {node.get('call', 'input')}"


def _said(point: Point) -> str:
    return ", ".join(f"{name}={size}" for name, size in point.items())


def _merged(values: Sequence[Any], fitter: Fitter) -> Any:
    first = values[0]
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        raise _DiffersError(_listed(values))
    if isinstance(first, dict):
        keys = list(cast("Plain", first))
        if any(list(value) != keys for value in values):
            raise _DiffersError(_listed([list(value) for value in values]))
        return {key: _merged([value[key] for value in values], fitter) for key in keys}
    if isinstance(first, list | tuple):
        if len({len(value) for value in values}) > 1:
            raise _DiffersError(_listed(values))
        return [_merged(items, fitter) for items in zip(*values, strict=True)]
    if all(value == first for value in values) and not isinstance(first, float):
        return first
    if isinstance(first, bool) or not isinstance(first, int | float | str):
        raise _DiffersError(_listed(values))
    if isinstance(first, int):
        return Hole((_expression(values, fitter),))
    return _text(values, fitter) if isinstance(first, str) else _float(values, fitter)


def _expression(values: Sequence[int], fitter: Fitter) -> Expression:
    expression = fitter.fitted(values)
    if expression is None:
        raise _DiffersError(_listed(values))
    return expression


def _text(values: Sequence[str], fitter: Fitter) -> Hole:
    if len({NUMBER.sub("#", value) for value in values}) > 1:
        raise _DiffersError(_listed(values))
    between = NUMBER.split(values[0])
    numbers = zip(*(map(int, NUMBER.findall(value)) for value in values), strict=True)
    parts: list[str | Expression] = [between[0]]
    for column, text in zip(numbers, between[1:], strict=True):
        expression = _expression(column, fitter)
        parts += [str(column[0]) if expression.is_constant else expression, text]
    return Hole(tuple(parts), "text")


def _float(values: Sequence[float], fitter: Fitter) -> Any:
    if all(value == values[0] or (value != value and values[0] != values[0]) for value in values):
        return values[0]
    for form, (inverse, forward) in FORMS.items():
        near = [inverse(abs(value)) for value in values]
        sign = math.copysign(1, values[0])
        if sign < 0 or not all(math.isfinite(n) for n in near):
            continue
        numbers = [round(n) for n in near]
        if all(n > 0 and forward(n) == value for n, value in zip(numbers, values, strict=True)):
            expression = fitter.fitted(numbers)
            if expression is not None:
                return Hole((expression,), form)
    raise _DiffersError(_listed(values))


def _listed(values: Sequence[Any]) -> str:
    said = [str(value)[:60] for value in values]
    return "it has " + ", ".join(dict.fromkeys(said)) + ", which no formula of the extents gives"


def expressions(tree: Any) -> list[Expression]:
    return [part for hole in holes(tree) for part in hole.parts if isinstance(part, Expression)]
