"""Equal layers printed once: which runs of lines repeat from layer to layer, but for the layer's own number.

    %h.1.mlp.mm = mm(%h.0.add, %h.1.mlp.weight)       %h.2.mlp.mm = mm(%h.1.add, %h.2.mlp.weight)

are equal: each names its own layer, and the one before it, where the other does. What both name alike, a mask say, is
equal as well. A layer that reads another mask, or has a line more, is not equal, and is printed by itself. The first
layer of a sequence reads what is no layer's where each other reads what the layer before it yields: it counts as equal
where that is the only difference.

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
    """Neighbouring lines of one layer: their text without names, and their names."""

    start: int
    stop: int
    layer: str
    shape: tuple[str, ...]
    names: tuple[str, ...]


@dataclass
class _Class:
    """Equal runs. `relative` and `literal` are the names, by index, that may still be either."""

    runs: list[_Run]
    relative: set[int] = field(default_factory=set[int])
    literal: set[int] = field(default_factory=set[int])


def fold(lines: Sequence[Line]) -> list[Folded]:
    """The lines to print, in order. Runs that are equal to one of a lower layer, or a neighbour, are left out."""
    classes: dict[tuple[str, tuple[str, ...]], list[_Class]] = {}
    order: list[_Class] = []
    for run in _runs(lines):
        base, _ = list_and_index(run.layer)
        alike = classes.setdefault((base, run.shape), []) if run.layer else []
        if not any(_joins(run, known) for known in alike):
            every = set(range(len(run.names)))
            order.append(_Class([run], set(every), every))
            alike.append(order[-1])
    return list(_shown(order))


def described(layers: Sequence[str]) -> str:
    """`h.1 to h.31`, or where they do not follow each other, `h.0, h.2, h.4 and 13 more`."""
    base, _ = list_and_index(layers[0])
    numbers = sorted(list_and_index(layer)[1] for layer in layers)
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{base}.{numbers[0]} to {base}.{numbers[-1]}"
    shown = ", ".join(f"{base}.{number}" for number in numbers[:3])
    return shown + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")


def folded_text(lines: Sequence[Line], indent: str = "  ") -> list[str]:
    """The lines as text, with a comment before and after those that stand for several layers."""
    text: list[str] = []
    for part in fold(lines):
        body = [line.text for line in lines[part.start : part.stop]]
        if len(part.layers) > 1:
            shown = lines[part.start].layer
            body.insert(0, f"{indent}# x {len(part.layers)} layers: {described(part.layers)}, all as {shown}")
            body.append(f"{indent}# end of {described(part.layers)}")
        text += body
    return text


def _runs(lines: Sequence[Line]) -> Iterator[_Run]:
    start = 0
    for layer, run in groupby(line.layer for line in lines):
        stop = start + sum(1 for _ in run)
        texts = [line.text.partition("    # ")[0] for line in lines[start:stop]] if layer else []
        names = tuple(name for text in texts for name in NAME.findall(text))
        yield _Run(start, stop, layer, tuple(NAME.sub("%", text) for text in texts), names)
        start = stop


def _joins(run: _Run, known: _Class) -> bool:
    """Whether a run is equal to those of a class, which it then is one of."""
    last = known.runs[-1]
    pairs = list(zip(last.names, run.names, strict=True))
    relative = {i for i, (a, b) in enumerate(pairs) if _relative(a, last.layer) == _relative(b, run.layer)}
    literal = {i for i, (a, b) in enumerate(pairs) if a == b}
    relative, literal = relative & known.relative, literal & known.literal
    rest = set(range(len(pairs))) - relative - literal
    if rest and (len(known.runs) > 1 or not _carried(rest, last, run)):
        return False
    known.runs.append(run)
    known.relative, known.literal = relative | rest, literal
    return True


def _carried(rest: Iterable[int], first: _Run, second: _Run) -> bool:
    """Whether all that differs is what the first layer of a sequence is given, and the next gets from the first."""
    given: dict[str, str] = {}
    taken: dict[str, str] = {}
    _, position = list_and_index(first.layer)
    _, following = list_and_index(second.layer)
    for i in rest:
        a, b = first.names[i], second.names[i]
        from_first = _relative(b, second.layer).startswith(f"<{position - following}>")
        in_layer = _relative(a, first.layer) != a
        if abs(position - following) != 1 or in_layer or not from_first or not (a[0] == b[0] == "%"):
            return False
        if given.setdefault(a, b) != b or taken.setdefault(b, a) != a:
            return False
    return True


def _relative(name: str, layer: str) -> str:
    """A name with the layer in it as a distance: `%<0>.mlp.mm`, `%<-1>.add`; unchanged where it is in no such list."""
    if name.startswith("op_id="):
        return "op_id"
    base, index = list_and_index(layer)
    match = re.search(rf"(?<!\w){re.escape(base)}\.(\d+)(?!\w)", name)
    if match is None:
        return name
    distance = int(match[1]) - index
    return f"<{distance}>{name[: match.start()]}@{name[match.end() :]}"


def _shown(order: Sequence[_Class]) -> Iterator[Folded]:
    """Each class where its first run is, by the run of its lowest layer."""
    for equal in order:
        lowest = min(equal.runs, key=lambda run: list_and_index(run.layer)[1])
        layers = tuple(dict.fromkeys(run.layer for run in equal.runs)) if equal.runs[0].layer else ()
        yield Folded(lowest.start, lowest.stop, layers)
