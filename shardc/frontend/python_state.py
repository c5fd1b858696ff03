"""What forward leaves behind on the model's own objects: undone after a trace, and reported where a step would read it.

A trace runs the user's own forward, loss function and hooks. What these keep in Python (`self.cache = x`, a counter, a
list appended to, a variable of an enclosing function) would be a fake tensor, or one count too many, afterwards: a
`Snapshot` puts everything back. And a compiled step has no such
memory. Where the next step would read what this one left, the program computes every step as the first, which is said
(SC109). It is found by tracing a second step over what the first has left, if it has left anything:

    self.last = h                                  the same graph again: nobody reads it
    x = x + self.last; self.last = h               another graph: `last` is carried
    self.calls += 1                                counts on in the second step, whatever for
    if self.cos is None: self.cos = table()        made from no input: the same value whenever it is made
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardc.frontend.function_caches import Cache, forget
from shardc.frontend.model_tree import modules
from shardc.frontend.state_holders import (
    ABSENT,
    CONTAINERS,
    Container,
    Context,
    Holder,
    Position,
    Variables,
    held_by_class,
    holders_of,
    holds_nothing,
    inside,
)
from shardc.ir.diagnostic import error
from shardc.ir.gc_pause import all_objects_seen

_OWN = ("_parameters", "_buffers", "_modules")  # what is in these goes by its own name alone
_LEAVES = frozenset((bool, int, float, complex, str, bytes, type(None)))  # which hold nothing
_EXACT = frozenset(CONTAINERS)
_DEPTH = 4  # of containers and plain objects below a module


class Place(NamedTuple):
    """Where a value lies: the module that holds it, and the way to it as the user would write it."""

    module: str = ""
    path: str = ""
    depth: int = 0

    def attribute(self, name: str) -> Place:
        path = self.path if name in _OWN else f"{self.path}.{name}".lstrip(".")
        return Place(self.module, path, self.depth + 1)

    def variable(self, name: str) -> Place:
        """Of a function: what it reads lies no deeper than the function itself, however many call one another."""
        return Place(self.module, f"{self.path}.{name}".lstrip("."), self.depth)

    def item(self, key: object) -> Place:
        if self.path == self.module:  # of _parameters, _buffers, _modules
            return self.attribute(str(key))
        return Place(self.module, f"{self.path}[{key!r}]", self.depth + 1)


class _Step(Enum):
    """From a value to one that it holds. Behind BEGIN a module's own name is all that is said of the way to it."""

    ATTRIBUTE = "attribute"
    VARIABLE = "variable"
    ITEM = "item"
    BEGIN = "begin"


# The way to a value, from a place or by another value's: its own place, of which hardly anybody asks. Plain tuples, as
# there are tens of thousands.
_Way = tuple["Place | _Way", _Step, object]


def _place(way: Place | _Way) -> Place:
    ways: list[_Way] = []
    while not isinstance(way, Place):
        ways.append(way)
        way = way[0]
    place = way
    for _, step, key in reversed(ways):
        if step is _Step.BEGIN:
            place = Place(place.path, place.path)
        elif step is _Step.VARIABLE:
            place = place.variable(str(key))
        else:
            place = place.attribute(str(key)) if step is _Step.ATTRIBUTE else place.item(key)
    return place


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
        both = [len(value) for value in (self.before, self.after) if isinstance(value, CONTAINERS)]
        return len(both) == 2 and both[0] != both[1]


# The way to a value, how deep it lies, and the value; its place, and what that held, in order. Of a container that was
# empty there is no holder until somebody asks.
_Held = tuple["Place | _Way", int, Any, "Holder | None", Mapping[object, Any]]


class Snapshot:
    """Every module's attributes, and the containers and plain objects that they hold; of functions their variables."""

    def __init__(self, *roots: object) -> None:
        all_modules = [module for root in roots if isinstance(root, nn.Module) for module in modules(root)]
        classes = dict.fromkeys(cls for kind in dict.fromkeys(map(type, all_modules)) for cls in kind.__mro__)
        by_class = {cls: held_by_class(cls) for cls in classes}
        functions = [function for _, of_class in by_class.values() for function in of_class]
        self._held: list[_Held] = [
            (Place("", cls.__name__), 0, cls, holder, holder.items())
            for cls, (holder, _) in by_class.items()
            if holder is not None
        ]
        todo = [*self._of_holders(), *((Place(), 0, root) for root in (*functions, *reversed(roots)))]
        for way, depth, value, places in _walked(todo, holds_nothing):
            if places is _EMPTY:
                self._held.append((way, depth, value, None, _NOTHING))
            else:
                self._held += [(way, depth, value, holder, items) for holder, items in places]

    def changes(self) -> list[Change]:
        """What differs now, item by item."""
        changes: list[Change] = []
        for way, _, value, holder, items in self._held:
            if holder is None:
                if not value:
                    continue
                holder = Container(value)
            elif type(holder) is Container and holder.holds(items):
                continue
            current = holder.items()
            for key in {**items, **current}:
                before, after = items.get(key, ABSENT), current.get(key, ABSENT)
                if not _same(before, after):
                    changes.append(Change(_place((way, _step_in(holder), key)), before, after))
        return changes

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that lay in all those places."""
        return (value for _, _, value, _ in _walked(list(self._of_holders())) if isinstance(value, Tensor))

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """The arrays of numpy, and how the user would write each."""
        for way, _, value, _ in _walked(list(self._of_holders()), _holds_no_array):
            if type(value).__name__ == "ndarray":
                yield _place(way).path, value

    def _of_holders(self) -> Iterator[tuple[Place | _Way, int, Any]]:
        attribute = _Step.ATTRIBUTE
        for way, depth, _, _, items in self._held:
            for key, value in items.items():
                if type(value) not in _LEAVES:
                    yield (way, attribute, key), depth + 1, value

    def caches(self) -> list[Cache]:
        """The functions with `lru_cache`."""
        return [holder for _, _, _, holder, _ in self._held if isinstance(holder, Cache)]

    def clear_caches(self) -> None:
        """Let the functions with `lru_cache` forget what they remember more than they did."""
        for cache in self.caches():
            cache.restore({})

    def restore(self) -> None:
        for _, _, value, holder, items in self._held:
            if holder is not None:
                holder.restore(items)
            elif value:
                Container(value).restore(items)

    def restores_all(self) -> bool:
        """Can everything be put back? Not the position of an iterator, nor that a context variable has no value."""
        return not any(
            (isinstance(holder, Position) and not holder.of_library()) or (isinstance(holder, Context) and not items)
            for _, _, _, holder, items in self._held
        )


def reachable(root: object, place: Place | None = None) -> Iterator[tuple[Place, Any]]:
    """All that a value holds, itself first: through modules, containers, plain objects and functions.

    Numbers, strings and None that others hold are left out.
    """
    place = place or Place()
    return ((_place(way), value) for way, _, value, _ in _walked([(place, place.depth, root)]))


def instances(root: object, classes: tuple[type, ...]) -> Iterator[tuple[Place, Any]]:
    """What of all that is of certain classes."""

    def barren(cls: type) -> bool:
        return holds_nothing(cls) and not issubclass(cls, classes)

    found = _walked([(Place(), 0, root)], barren)
    return ((_place(way), value) for way, _, value, _ in found if isinstance(value, classes))


_Todo = list[tuple["Place | _Way", int, Any]]
_Places = Sequence[tuple[Holder, Mapping[object, Any]]]
_EMPTY: _Places = ()
_NOTHING: Mapping[object, Any] = {}


def _walked(
    todo: _Todo, barren: Callable[[type], bool] = lambda _: False
) -> Iterator[tuple[Place | _Way, int, Any, _Places]]:
    """What values hold, themselves first, but for what others hold that is of a `barren` class: the way to it, how deep
    it lies, and its places with their items; `_EMPTY` of a container without any."""
    seen: dict[int, Any] = {}  # the values are kept, so that no other takes the place of one
    left_out = _LeftOut(barren)
    begin = _Step.BEGIN
    while todo:
        way, depth, value = todo.pop()
        if isinstance(value, nn.Module):
            way, depth = (way, begin, None), 0
        if id(value) in seen or depth > _DEPTH:
            continue
        seen[id(value)] = value
        kind = type(value)
        if kind in _EXACT and not value:
            yield way, depth, value, _EMPTY
            continue
        places = [(holder, holder.items()) for holder in holders_of(value)]
        yield way, depth, value, places
        # Not by going from an object to its class, or to a method.
        if parts := inside(value):
            deeper = isinstance(value, (tuple, partial))
            todo += [
                ((way, _Step.ITEM, i), depth + 1, part) if deeper else (way, depth, part)
                for i, part in enumerate(parts)
                if id(part) not in seen
            ]
        for holder, items in places:
            step = _step_in(holder)
            below = depth if step is _Step.VARIABLE else depth + 1
            todo += [
                ((way, step, key), below, item)
                for key, item in items.items()
                if not left_out[type(item)] and id(item) not in seen  # most of what modules hold
            ]


class _LeftOut(dict[type, bool]):
    """By class, whether values that others hold are left out of a walk."""

    def __init__(self, barren: Callable[[type], bool]) -> None:
        super().__init__()
        self._barren = barren

    def __missing__(self, cls: type) -> bool:
        self[cls] = left_out = cls in _LEAVES or self._barren(cls)
        return left_out


def _holds_no_array(cls: type) -> bool:
    return holds_nothing(cls) and cls.__name__ != "ndarray"


def _step_in(holder: Holder) -> _Step:
    if isinstance(holder, Variables):
        return _Step.VARIABLE
    return _Step.ATTRIBUTE if holder.named else _Step.ITEM


def left_tensors(changes: Iterable[Change]) -> list[Tensor]:
    """The tensors that were left behind."""
    return [t for change in changes for _, t in reachable(change.after, place=change.place) if isinstance(t, Tensor)]


def refuse_kept(tensors: Sequence[Tensor]) -> None:
    """Raise ShardcError (SC109) for tensors of a trace that Python still holds, in places that no snapshot knows.

    The model would meet them in its next call outside of a program. A cache of functools is emptied instead.
    """
    if not tensors:
        return
    with all_objects_seen():
        forget(tensors)
        # One walk over all objects, not one a tensor: a process has a million of them.
        places = [place for place in gc.get_referrers(*tensors) if place is not tensors]
        kinds = dict.fromkeys(type(place).__name__ for place in places if not isinstance(place, FrameType))
    if kinds:
        message = f"forward keeps tensors of a step where they cannot be taken back from: in a {' and a '.join(kinds)}"
        hint = "keep them on the model, or in a container that forward names; a table made once can be a buffer"
        raise error("SC109", message, hint=hint)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    return type(a) is type(b) and isinstance(a, int | float | str | bytes) and a == b
