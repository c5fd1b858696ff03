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
from shardc.frontend.model_tree import modules_of
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


# A value that was found from another: the way to that, the step from there, how deep it lies, and the value itself.
_Found = tuple["Place | _Way", "_Step | None", object, int, Any]
# What was found, one of its places, and what that held, in order. Of an empty container there is no holder until
# somebody asks.
_Held = tuple[_Found, "Holder | None", Mapping[object, Any]]


class Snapshot:
    """Every module's attributes, and the containers and plain objects that they hold; of functions their variables."""

    def __init__(self, *roots: object) -> None:
        modules = [module for root in roots if isinstance(root, nn.Module) for module in modules_of(root)]
        classes = dict.fromkeys(cls for kind in dict.fromkeys(map(type, modules)) for cls in kind.__mro__)
        by_class = {cls: held_by_class(cls) for cls in classes}
        functions = [function for _, of_class in by_class.values() for function in of_class]
        self._held: list[_Held] = [
            ((Place("", cls.__name__), None, None, 0, cls), holder, holder.items())
            for cls, (holder, _) in by_class.items()
            if holder is not None
        ]
        todo: list[_Found] = [*self._of_holders(_LeftOut())]
        todo += [(Place(), None, None, 0, root) for root in (*functions, *reversed(roots))]
        left_out = _LeftOut(holds_nothing)
        kinds = set[type]()
        for found, places in _walked(todo, left_out, kinds=kinds):
            if places is _EMPTY:
                self._held.append((found, None, _NOTHING))
            else:
                self._held += [(found, holder, items) for holder, items in places]
        self.kinds = kinds | left_out.keys()  # of all values that were met
        self._empty: list[Any] = [found[-1] for found, holder, _ in self._held if holder is None]  # most of all
        self._filled = [(holder, items) for _, holder, items in self._held if holder is not None]

    def changes(self) -> list[Change]:
        """What differs now, item by item."""
        changes: list[Change] = []
        if not any(self._empty) and all(type(h) is Container and h.holds(items) for h, items in self._filled):
            return changes
        for found, holder, items in self._held:
            if holder is None:
                if not found[-1]:
                    continue
                holder = Container(found[-1])
            elif type(holder) is Container and holder.holds(items):
                continue
            current = holder.items()
            for key in {**items, **current}:
                before, after = items.get(key, ABSENT), current.get(key, ABSENT)
                if not _same(before, after):
                    changes.append(Change(_place((_way(found), _step_in(holder), key)), before, after))
        return changes

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that lay in all those places."""
        walked = _walked([*self._of_holders(_LeftOut())])
        return (found[-1] for found, _ in walked if isinstance(found[-1], Tensor))

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """The arrays of numpy, and how the user would write each."""
        if not any(kind.__name__ == "ndarray" for kind in self.kinds):
            return
        left_out = _LeftOut(_holds_no_array)
        for found, _ in _walked([*self._of_holders(left_out)], left_out, empty=False):
            if type(found[-1]).__name__ == "ndarray":
                yield _place(_way(found)).path, found[-1]

    def _of_holders(self, left_out: _LeftOut) -> Iterator[_Found]:
        attribute = _Step.ATTRIBUTE
        for found, _, items in self._held:
            for key, value in items.items():
                if not left_out[type(value)]:
                    yield _way(found), attribute, key, found[3] + 1, value

    def caches(self) -> list[Cache]:
        """The functions with `lru_cache`."""
        return [holder for holder, _ in self._filled if isinstance(holder, Cache)]

    def clear_caches(self) -> None:
        """Let the functions with `lru_cache` forget what they remember more than they did."""
        for cache in self.caches():
            cache.restore({})

    def restore(self) -> None:
        for holder, items in self._filled:
            holder.restore(items)
        for value in filter(None, self._empty):
            Container(value).restore({})

    def restores_all(self) -> bool:
        """Can everything be put back? Not the position of an iterator, nor that a context variable has no value."""
        return not any(
            (isinstance(holder, Position) and not holder.of_library()) or (isinstance(holder, Context) and not items)
            for holder, items in self._filled
        )


def reachable(root: object, place: Place | None = None) -> Iterator[tuple[Place, Any]]:
    """All that a value holds, itself first: through modules, containers, plain objects and functions.

    Numbers, strings and None that others hold are left out.
    """
    place = place or Place()
    return ((_place(_way(found)), found[-1]) for found, _ in _walked([(place, None, None, place.depth, root)]))


def instances(root: object, classes: tuple[type, ...]) -> Iterator[tuple[Place, Any]]:
    """What of all that is of certain classes."""

    def barren(cls: type) -> bool:
        return holds_nothing(cls) and not issubclass(cls, classes)

    walked = _walked([(Place(), None, None, 0, root)], _LeftOut(barren), empty=False)
    return ((_place(_way(found)), found[-1]) for found, _ in walked if isinstance(found[-1], classes))


_Places = Sequence[tuple[Holder, Mapping[object, Any]]]
_EMPTY: _Places = ()
_NOTHING: Mapping[object, Any] = {}


def _walked(
    todo: list[_Found], left_out: _LeftOut | None = None, *, empty: bool = True, kinds: set[type] | None = None
) -> Iterator[tuple[_Found, _Places]]:
    """What values hold, themselves first, but for what others hold that is `left_out`, or an `empty` container: each
    with its places and their items; with `_EMPTY` a container that has none. Their types are added to `kinds`."""
    kinds = set() if kinds is None else kinds
    seen: dict[int, Any] = {}  # the values are kept, so that no other takes the place of one
    left_out = _LeftOut() if left_out is None else left_out
    unless_empty = frozenset[type]() if empty else _EXACT
    while todo:
        found = todo.pop()
        value = found[-1]
        if id(value) in seen:
            continue
        kind = type(value)
        kinds.add(kind)
        if kind in _EXACT and not value:
            if found[3] <= _DEPTH:
                seen[id(value)] = value
                yield found, _EMPTY
            continue
        if isinstance(value, nn.Module):
            found = (_way(found), _Step.BEGIN, None, 0, value)
        depth = found[3]
        if depth > _DEPTH:
            continue
        seen[id(value)] = value
        places = [(holder, holder.items()) for holder in holders_of(value)]
        yield found, places
        way: Any = _way(found)
        # Not by going from an object to its class, or to a method.
        if parts := inside(value):
            deeper = isinstance(value, (tuple, partial))
            todo += [
                (way, _Step.ITEM, i, depth + 1, part) if deeper else (way, None, None, depth, part)
                for i, part in enumerate(parts)
                if id(part) not in seen
            ]
        for holder, items in places:
            step = _step_in(holder)
            below = depth if step is _Step.VARIABLE else depth + 1
            todo += [
                (way, step, key, below, item)
                for key, item in items.items()
                if not left_out[kind := type(item)]  # most of what modules hold
                and (kind not in unless_empty or item)
                and id(item) not in seen
            ]


def _way(found: _Found) -> Place | _Way:
    back, step, key, _, _ = found
    return back if step is None else (back, step, key)


class _LeftOut(dict[type, bool]):
    """By class, whether values that others hold are left out of a walk."""

    def __init__(self, barren: Callable[[type], bool] = lambda _: False) -> None:
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
