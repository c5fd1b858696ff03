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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from shardc.frontend.function_caches import Cache, forget
from shardc.frontend.state_holders import (
    ABSENT,
    CONTAINERS,
    Context,
    Holder,
    Position,
    Variables,
    held_by_class,
    holders_of,
    inside,
)
from shardc.ir.diagnostic import error
from shardc.ir.gc_pause import all_objects_seen

_OWN = ("_parameters", "_buffers", "_modules")  # what is in these goes by its own name alone
_LEAVES = (bool, int, float, complex, str, bytes, type(None))  # which hold nothing
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


class _Held(NamedTuple):
    place: Place
    holder: Holder
    items: Mapping[object, Any]  # what it held, in order


class Snapshot:
    """Every module's attributes, and the containers and plain objects that they hold; of functions their variables."""

    def __init__(self, *roots: object) -> None:
        modules = [module for root in roots if isinstance(root, nn.Module) for module in root.modules()]
        classes = dict.fromkeys(cls for module in modules for cls in type(module).__mro__)
        by_class = {cls: held_by_class(cls) for cls in classes}
        functions = [function for _, of_class in by_class.values() for function in of_class]
        self._held = [_Held(Place("", cls.__name__), h, h.items()) for cls, (h, _) in by_class.items() if h is not None]
        of_classes = list(self._of_holders())
        self._held += [
            _Held(place, holder, holder.items())
            for place, value in _walked([*of_classes, *((Place(), root) for root in (*functions, *reversed(roots)))])
            for holder in holders_of(value)
        ]

    def changes(self) -> list[Change]:
        """What differs now, item by item."""
        changes: list[Change] = []
        for recorded in self._held:
            current = recorded.holder.items()
            for key in {**recorded.items, **current}:
                before, after = recorded.items.get(key, ABSENT), current.get(key, ABSENT)
                if not _same(before, after):
                    changes.append(Change(_below(recorded.place, recorded.holder, key), before, after))
        return changes

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that lay in all those places."""
        return (value for _, value in self._values() if isinstance(value, Tensor))

    def arrays(self) -> Iterator[tuple[str, Any]]:
        """The arrays of numpy, and how the user would write each."""
        return ((place.path, value) for place, value in self._values() if type(value).__name__ == "ndarray")

    def _values(self) -> Iterator[tuple[Place, Any]]:
        return _walked(list(self._of_holders()))

    def _of_holders(self) -> Iterator[tuple[Place, Any]]:
        for recorded in self._held:
            for key, value in recorded.items.items():
                if type(value) not in _LEAVES:
                    yield recorded.place.attribute(str(key)), value

    def caches(self) -> list[Cache]:
        """The functions with `lru_cache`."""
        return [recorded.holder for recorded in self._held if isinstance(recorded.holder, Cache)]

    def clear_caches(self) -> None:
        """Let the functions with `lru_cache` forget what they remember more than they did."""
        for cache in self.caches():
            cache.restore({})

    def restore(self) -> None:
        for recorded in self._held:
            recorded.holder.restore(recorded.items)

    def restores_all(self) -> bool:
        """Can everything be put back? Not the position of an iterator, nor that a context variable has no value."""
        return not any(
            (isinstance(held.holder, Position) and not held.holder.of_library())
            or (isinstance(held.holder, Context) and not held.items)
            for held in self._held
        )


def reachable(root: object, place: Place | None = None) -> Iterator[tuple[Place, Any]]:
    """All that a value holds, itself first: through modules, containers, plain objects and functions.

    Numbers, strings and None that others hold are left out.
    """
    return _walked([(place or Place(), root)])


def _walked(todo: list[tuple[Place, Any]]) -> Iterator[tuple[Place, Any]]:
    seen: dict[int, Any] = {}  # the values are kept, so that no other takes the place of one
    while todo:
        place, value = todo.pop()
        if isinstance(value, nn.Module):
            place = Place(place.path, place.path)
        if id(value) in seen or place.depth > _DEPTH:
            continue
        seen[id(value)] = value
        yield place, value
        deeper = isinstance(value, (tuple, partial))  # and not by going from an object to its class, or to a method
        parts = enumerate(inside(value))
        todo += [(place.item(i) if deeper else place, part) for i, part in parts if id(part) not in seen]
        for holder in holders_of(value):
            todo += [
                (_below(place, holder, key), item)
                for key, item in holder.items().items()
                if type(item) not in _LEAVES and id(item) not in seen  # most of what modules hold
            ]


def _below(place: Place, holder: Holder, key: object) -> Place:
    if isinstance(holder, Variables):
        return place.variable(str(key))
    return place.attribute(str(key)) if holder.named else place.item(key)


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
