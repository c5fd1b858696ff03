"""Equal layers printed once: which runs of lines repeat from layer to layer, but for the layer's own number.

    %h.1.mlp.mm = mm(%h.0.add, %h.1.mlp.weight)       %h.2.mlp.mm = mm(%h.1.add, %h.2.mlp.weight)

are equal: each names its own layer, and the one before it, where the other does. What both name alike, a mask say, is
equal as well. A layer that reads another mask, or has a line more, is not equal, and is printed by itself. The first
layer of a sequence reads what is no layer's where each other reads what the layer before it yields: it counts as equal
where that is the only difference. Lines of no layer between two layers, such as a residual sum of the model itself, go
with the layer before them.

Whatever is printed line by line folds here: the text of a graph, a list of collectives, a table of parameters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from shardc.ir.layers import list_and_index

# What may differ between equal layers: names of values and tensors, and the number of an op that draws numbers.
NAME = re.compile(r'%"(?:[^"\\]|\\.)*"|%[\w.\-/:]+|"[\w.:]+"|op_id=\d+')


Between = dict[str, tuple[str, int]]  # a value of no layer, the layer that it goes with, and its place there


class Line(NamedTuple):
    text: str
    layer: str = ""  # that it belongs to; "" for none


class Folded(NamedTuple):
    """Lines `start` to `stop`, and the equal layers that they stand for, in the order of the lines; () for none."""

    start: int
    stop: int
    layers: tuple[str, ...] = ()


@dataclass
class _Run:
    """Neighbouring lines of one layer: their text without names, and their names, as written and as distances."""

    start: int
    stop: int
    layer: str
    shape: tuple[str, ...]
    names: tuple[tuple[str, str], ...]


@dataclass
class _Class:
    """Equal runs. `relative` and `literal` are the names, by index, that may still be either."""

    runs: list[_Run]
    relative: set[int] = field(default_factory=set[int])
    literal: set[int] = field(default_factory=set[int])


def fold(lines: Sequence[Line], between: Between | None = None) -> list[Folded]:
    """The lines to print, in order: of runs of equal layers that of the lowest, where the first of them is.

    Sections of one text, its forward and its backward, are folded one by one, with one `between`.
    """
    between = {} if between is None else between
    classes: dict[tuple[str, tuple[str, ...]], list[_Class]] = {}
    order: list[_Class] = []
    for run in _runs(lines, between):
        base, _ = list_and_index(run.layer)
        alike = classes.setdefault((base, run.shape), []) if run.layer else []
        if not any(_joins(run, known) for known in alike):
            every = set(range(len(run.names)))
            order.append(_Class([run], set(every), every))
            alike.append(order[-1])
    return list(_shown(order))


def described(layers: Sequence[str]) -> str:
    """`h.1 to 31`, or where they do not follow each other, `h.0, h.2, h.4 and 13 more`."""
    base, _ = list_and_index(layers[0])
    numbers = sorted(list_and_index(layer)[1] for layer in layers)
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{base}.{numbers[0]} to {numbers[-1]}"
    shown = ", ".join(f"{base}.{number}" for number in numbers[:3])
    return shown + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")


def folded_text(lines: Sequence[Line], between: Between | None = None, indent: str = "  ") -> list[str]:
    """The lines as text, with a comment before and after those that stand for several layers."""
    text: list[str] = []
    for part in fold(lines, between):
        body = [line.text for line in lines[part.start : part.stop]]
        if len(part.layers) > 1:
            shown = lines[part.start].layer
            body.insert(0, f"{indent}# x {len(part.layers)} layers: {described(part.layers)}, all as {shown}")
            body.append(f"{indent}# end of {described(part.layers)}")
        text += body
    return text


def _runs(lines: Sequence[Line], between: Between) -> Iterator[_Run]:
    """What lies between two layers of a list and is of no layer, a residual sum say, goes with the layer before it."""
    spans: list[tuple[str, int, int]] = []
    for layer, run in groupby(line.layer for line in lines):
        start = spans[-1][2] if spans else 0
        spans.append((layer, start, start + sum(1 for _ in run)))
        if len(spans) > 2 and not spans[-2][0] and _follows(spans[-3][0], layer):
            _, _, stop = spans.pop(-2)
            spans[-2] = (spans[-2][0], spans[-2][1], stop)
    for layer, start, stop in spans:
        names = [name for line in lines[start:stop] if layer and not line.layer for name in _defined(line.text)]
        between |= {name: (layer, i) for i, name in enumerate(names)}
    for layer, start, stop in spans:
        texts = [line.text.partition("    # ")[0] for line in lines[start:stop]] if layer else []
        written = [name for text in texts for name in NAME.findall(text)]
        names = tuple((name, _relative(name, layer, between)) for name in written)
        yield _Run(start, stop, layer, tuple(NAME.sub("%", text) for text in texts), names)


def _follows(layer: str, other: str) -> bool:
    (base, index), (other_base, other_index) = list_and_index(layer), list_and_index(other)
    return bool(layer and other) and base == other_base and abs(index - other_index) == 1


def _defined(text: str) -> list[str]:
    results, equals, _ = text.partition(" = ")
    return NAME.findall(results) if equals else []


def _joins(run: _Run, known: _Class) -> bool:
    """Whether a run is equal to those of a class, which it then is one of."""
    last = known.runs[-1]
    pairs = list(zip(last.names, run.names, strict=True))
    relative = {i for i, ((_, a), (_, b)) in enumerate(pairs) if a == b} & known.relative
    literal = {i for i, ((a, _), (b, _)) in enumerate(pairs) if a == b} & known.literal
    rest = set(range(len(pairs))) - relative - literal
    if rest and (len(known.runs) > 1 or not _carried(rest, last, run)):
        return False
    known.runs.append(run)
    known.relative, known.literal = relative | rest, literal
    return True


def _carried(rest: Iterable[int], first: _Run, second: _Run) -> bool:
    """Whether all that differs is what the first layer of a sequence is given, and the next gets from the first."""
    outside: dict[str, str] = {}  # by what the first layer reads of no layer: what the second reads of the first
    carried: dict[str, str] = {}  # and the other way round
    distance = list_and_index(first.layer)[1] - list_and_index(second.layer)[1]
    for i in rest:
        (a, a_relative), (b, b_relative) = first.names[i], second.names[i]
        from_first = b_relative.startswith(f"<{distance}>")
        in_layer = a_relative != a
        if abs(distance) != 1 or in_layer or not from_first or not (a[0] == b[0] == "%"):
            return False
        outside[a], carried[b] = b, a
    pairs = [(a, b) for (a, _), (b, _) in zip(first.names, second.names, strict=True)]
    return all(outside.get(a, b) == b and carried.get(b, a) == a for a, b in pairs)


def _relative(name: str, layer: str, between: Between) -> str:
    """A name with the layer in it as a distance: `%<0>.mlp.mm`, `%<-1>.add`; unchanged where it is in no such list."""
    if name.startswith("op_id="):
        return "op_id"
    base, index = list_and_index(layer)
    if name in between:
        (other, other_index), place = list_and_index(between[name][0]), between[name][1]
        return f"<{other_index - index}>{place}" if other == base else name
    match = re.search(rf"(?<!\w){re.escape(base)}\.(\d+)(?!\w)", name)
    if match is None:
        return name
    return f"<{int(match[1]) - index}>{name[: match.start()]}@{name[match.end() :]}"


def _shown(order: Sequence[_Class]) -> Iterator[Folded]:
    """Each class where its first run is, by the run of its lowest layer."""
    for equal in order:
        lowest = min(equal.runs, key=lambda run: list_and_index(run.layer)[1])
        layers = tuple(dict.fromkeys(run.layer for run in equal.runs)) if equal.runs[0].layer else ()
        yield Folded(lowest.start, lowest.stop, layers)
