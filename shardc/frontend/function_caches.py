"""What functions with `functools.lru_cache` remember: read, put back, and emptied of a trace's tensors.

    @cache             def table(n, dtype): ...    keeps a dict, whose items can be read and put back
    @lru_cache(size)   def table(n, dtype): ...    keeps them in a list too, so it can be read, and only be emptied

An entry made of sizes and dtypes is the same whenever it is made. One that is computed from a weight, a batch or random
numbers is not: eager PyTorch goes on with that of the first step, and a program computes it in every step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any, cast

from torch import Tensor, fx

from shardc import torch_compat
from shardc.ir.gc_pause import all_objects_seen

CACHE = type(lru_cache(lambda: None))
_DEPTH = 4  # of tuples, lists and dicts in a result


class Cache:
    """The place that a function's cache is: not compared, since most of what it holds is the same whenever made."""

    named = False

    def __init__(self, function: Any) -> None:
        self.function = function
        self._misses: int = function.cache_info().misses
        self._before = dict(_table(function)) if _is_unbounded(function) else None

    def items(self) -> dict[object, Any]:
        return {}

    @property
    def has_more(self) -> bool:
        """Has it been asked for what it did not have? The size of one that is full stays as it is."""
        return self.function.cache_info().misses != self._misses

    def restore(self, items: Mapping[object, Any]) -> None:
        if self._before is not None:
            table = _table(self.function)
            if [*map(id, table.values())] != [*map(id, self._before.values())]:
                table.clear()
                table.update(self._before)
        elif self.has_more:
            self.function.cache_clear()


def entries(function: Any) -> Iterator[tuple[Any, Any]]:
    """What a cache has: arguments, and the result."""
    table = _table(function)
    if _is_unbounded(function):
        yield from list(table.items())
        return
    kinds = {type(element) for element in table.values()}
    run: list[Any] = []  # a bounded one refers to the arguments, the result and the class of each element of its list
    for held in gc.get_referents(function) if table else ():
        if held is table:
            return
        if isinstance(held, type) and held in kinds:
            yield run[-2], run[-1]
            run = []
        else:
            run.append(held)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result or of arguments, in tuples, lists and dicts."""
    tensors: list[Tensor] = []
    level: list[Any] = [value]
    for _ in range(_DEPTH):
        tensors += [item for item in level if isinstance(item, Tensor)]
        level = [
            item
            for held in level
            if isinstance(held, (tuple, list, dict))
            for item in (cast("dict[Any, Any]", held).values() if isinstance(held, dict) else cast("list[Any]", held))
        ]
    return tensors


def nodes_remembered(caches: Iterable[Cache], stand_ins: Callable[[Tensor], bool]) -> list[tuple[str, list[fx.Node]]]:
    """By the name of a function, what of a recording under way it would give again for the same arguments.

    An entry that was made for another tensor than a parameter or a buffer (`stand_ins`) is found by no later step.
    """
    remembered: list[tuple[str, list[fx.Node]]] = []
    for cache in caches:
        for arguments, result in entries(cache.function) if cache.has_more else ():
            if all(stand_ins(t) for t in tensors_in(arguments) if torch_compat.is_fake(t)):
                # Eager PyTorch refuses a second backward through one result, and says so.
                computed = [t for t in tensors_in(result) if torch_compat.is_fake(t) and not t.requires_grad]
                nodes = [node for node in map(torch_compat.node_of, computed) if node is not None]
                remembered.append((cache.function.__name__, nodes))
    return remembered


def forget(tensors: Iterable[Tensor]) -> None:
    """Empty every cache, wherever it is, that remembers one of these tensors."""
    ids = {id(t) for t in tensors}
    if not ids:
        return
    with all_objects_seen():
        caches = [o for o in gc.get_objects() if type(o) is CACHE]
    for function in caches:
        if any(id(t) in ids for key, result in entries(function) for t in (*tensors_in(key), *tensors_in(result))):
            function.cache_clear()


def _is_unbounded(function: Any) -> bool:
    return function.cache_parameters()["maxsize"] is None


def _table(function: Any) -> dict[Any, Any]:
    """The dict that a cache keeps: of its arguments, or of one of them."""
    own = vars(function)
    return next((held for held in gc.get_referents(function) if type(held) is dict and held is not own), {})
