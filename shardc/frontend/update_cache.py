"""Updates of torch's own optimizers: a process traces each, and checks it against three real steps, once.

Who compiles again (batches of another shape, another plan, one program after another in a notebook) brings the same
optimizer, and its trace and check are half of what compiling a small model takes. Shared are updates that depend on
nothing but torch's code, a few numbers, a shape and a dtype:

    torch.optim.AdamW, betas (0.9, 0.95), f32[64, 16]         shared
    a class of a user's own, or an instance with a method     traced and checked for each program
    Adagrad, whose state is there before the first step       traced and checked for each program
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping
from typing import Any, TypeVar, cast

import torch

from shardc.frontend.optimizer_trace import FLAGS, INCIDENTAL, Update, hyperparameters

V = TypeVar("V")
LIMIT = 512  # of each table: then it starts anew
UPDATES: dict[Hashable, Update] = {}
CHECKED: dict[Hashable, None] = {}
_PLAIN = (bool, int, float, str, type(None))


def shared_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Hashable | None:
    """All that the updates of a group depend on, apart from shapes; None for those that no other program may share."""
    cls = type(optimizer)
    if not cls.__module__.startswith("torch.optim.") or optimizer.state:
        return None
    if any(name != "step" and hasattr(cls, name) for name in vars(optimizer)):
        return None  # the instance has its own form of a method
    if not all(_is_plain(value) for key, value in group.items() if key not in INCIDENTAL):
        return None
    places = [place for base in cls.__mro__[:-1] for place in (base, sys.modules[base.__module__])]
    code: tuple[Any, ...] = tuple([value for place in places for value in vars(place).values() if callable(value)])
    if not all(isinstance(value, Hashable) for value in code):
        return None  # an object in the place of one of torch's functions
    flags = tuple(sorted(FLAGS & group.keys()))  # which of them there are, whatever they say
    dtypes = (torch.get_default_dtype(), *(param.dtype for param in group["params"][:1]))  # as in `explicit`
    return cls, code, hyperparameters(group), flags, dtypes


def remember(table: dict[Hashable, V], key: Hashable, value: V) -> V:
    """Put an entry into one of the tables."""
    if len(table) >= LIMIT:
        table.clear()
    table[key] = value
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, cast("tuple[Any, ...]", value)))
    return type(value) in _PLAIN
