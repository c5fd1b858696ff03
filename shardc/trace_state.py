"""What forward leaves behind on the model's own objects: undone after a trace, and reported where a step would read it.

A trace runs the user's own forward. What that keeps in Python (`self.cache = x`, a counter, a list appended to) would
be a fake tensor, or one count too many, afterwards: a `Snapshot` puts everything back. And a compiled step has no such
memory. Where the next step would read what this one left, the program computes every step as the first, which is said
(SC109). It is found by tracing a second step over what the first has left, if it has left anything:

    self.last = h                                  the same graph again: nobody reads it
    x = x + self.last; self.last = h               another graph: `last` is carried
    self.calls += 1                                counts on in the second step, whatever for
    if self.cos is None: self.cos = table()        made from no input: the same value whenever it is made
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, cast

from torch import Tensor, nn

_DICTS = (dict, OrderedDict, defaultdict, Counter)
_OPAQUE = (Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, str, bytes, int, float, tuple)
_OWN = ("_parameters", "_buffers", "_modules")  # what is in these goes by its own name alone
_DEPTH = 4  # of containers and plain objects below a module
ABSENT = object()


@dataclass(frozen=True)
class Place:
    """Where a value lies: the module that holds it, and the way to it as the user would write it."""

    module: str = ""
    path: str = ""
    depth: int = 0

    def attribute(self, name: str) -> Place:
        path = self.path if name in _OWN else f"{self.path}.{name}".lstrip(".")
        return Place(self.module, path, self.depth + 1)

    def item(self, key: object) -> Place:
        if self.path == self.module:  # of _parameters, _buffers, _modules
            return self.attribute(str(key))
        return Place(self.module, f"{self.path}[{key!r}]", self.depth + 1)


@dataclass(frozen=True)
class Change:
    """An attribute or an item that is another than before, or ABSENT."""

    place: Place
    before: Any
    after: Any

    @property
    def attribute(self) -> str:
        return self.place.path.partition("[")[0]

    @property
    def counts(self) -> bool:
        """Is it a number that changed, or a container that grew? Of two steps on end, the mark of a running count."""
        if self.before is ABSENT or self.after is ABSENT:
            return "[" in self.place.path
        if all(isinstance(value, int | float | str) for value in (self.before, self.after)):
            return True
        both = [len(value) for value in (self.before, self.after) if _is_container(value)]
        return len(both) == 2 and both[0] != both[1]


@dataclass(frozen=True)
class _Held:
    place: Place
    holder: Any  # a container; of an object, its __dict__
    items: dict[object, Any]  # what it held, in order
    of_object: bool


class Snapshot:
    """Every module's attributes, and the containers and plain objects that they hold."""

    def __init__(self, root: object) -> None:
        self._held = [
            _Held(place, holder, _items(holder), holder is not value)
            for place, value in reachable(root)
            for holder in [_holder(value)]
            if holder is not None
        ]

    def changes(self) -> list[Change]:
        """What differs now, item by item."""
        found: list[Change] = []
        for held in self._held:
            now = _items(held.holder)
            for key in {**held.items, **now}:
                before, after = held.items.get(key, ABSENT), now.get(key, ABSENT)
                if not _same(before, after):
                    place = held.place.attribute(str(key)) if held.of_object else held.place.item(key)
                    found.append(Change(place, before, after))
        return found

    def restore(self) -> None:
        for held in self._held:
            if _untouched(held):
                continue
            held.holder.clear()
            if isinstance(held.holder, dict):
                for key, value in held.items.items():
                    held.holder[key] = value
            elif isinstance(held.holder, set):
                held.holder.update(held.items.values())
            else:
                held.holder.extend(held.items.values())


def reachable(root: object, place: Place | None = None) -> Iterator[tuple[Place, Any]]:
    """All that a value holds, itself first: through modules, plain containers and plain objects."""
    todo: list[tuple[Place, Any]] = [(place or Place(), root)]
    seen: set[int] = set()
    while todo:
        at, value = todo.pop()
        if isinstance(value, nn.Module):
            at = Place(at.path, at.path)
        if id(value) in seen or at.depth > _DEPTH:
            continue
        seen.add(id(value))
        yield at, value
        holder = value if isinstance(value, tuple) else _holder(value)
        if holder is None:
            continue
        own = holder is not value
        todo += [(at.attribute(str(k)) if own else at.item(k), v) for k, v in _items(holder).items()]


def left_tensors(changes: Iterable[Change]) -> list[Tensor]:
    """The tensors that were left behind."""
    return [t for change in changes for _, t in reachable(change.after, change.place) if isinstance(t, Tensor)]


def _untouched(held: _Held) -> bool:
    """The same items in the same order."""
    now = _items(held.holder)
    pairs = [*zip(now.values(), held.items.values(), strict=False)]
    pairs += zip(now, held.items, strict=False) if isinstance(held.holder, dict) else []
    return len(now) == len(held.items) and all(a is b for a, b in pairs)


def _holder(value: Any) -> Any:
    """The container that a value is, or keeps its attributes in."""
    if isinstance(value, _OPAQUE):
        return None
    return value if _is_container(value) else getattr(value, "__dict__", None)


def _is_container(value: Any) -> bool:
    return type(value) in (list, set, deque, *_DICTS)


def _items(holder: Any) -> dict[object, Any]:
    if isinstance(holder, dict):
        return dict(cast("dict[object, Any]", holder))
    if isinstance(holder, set):
        return {id(value): value for value in cast("set[object]", holder)}
    return dict(enumerate(holder))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, int | float | str) and a == b
