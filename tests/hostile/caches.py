"""Tables that a forward makes once and keeps: in caches of functools, on modules and classes, in dicts and threads."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from tests.hostile.harness import Net, case


class _Table:
    """An object of its own, as a library's rotary embedding keeps what it made for a length."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, torch.dtype], Tensor] = {}

    def __call__(self, n: int, dtype: torch.dtype) -> Tensor:
        if (n, dtype) not in self.made:
            self.made[n, dtype] = torch.linspace(1, 2, n, dtype=dtype)
        return self.made[n, dtype]


class _Keyed:
    """What a weak table is keyed by."""


class _Registry(type):
    """A metaclass, which keeps tables for its classes."""

    tables: dict[str, Tensor] = {}  # noqa: RUF012 - shared on purpose


class _Registered(metaclass=_Registry):
    pass


GLOBAL: dict[Any, Tensor] = {}
NESTED: dict[str, dict[str, list[Tensor]]] = {}
TABLE = _Table()
LOCAL = threading.local()
KEY = _Keyed()
WEAK: weakref.WeakKeyDictionary[_Keyed, Tensor] = weakref.WeakKeyDictionary()


@functools.cache
def scales(n: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.linspace(1, 2, n, device=device, dtype=dtype)


@functools.lru_cache(maxsize=1)
def of_last_size(n: int, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.arange(n, dtype=dtype), {"mask": torch.ones(n, n, dtype=torch.bool).tril()}


def memoized(function: Any) -> Any:
    """A decorator of one's own, whose table is in its closure."""
    known: dict[Any, Any] = {}

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        if args not in known:
            known[args] = function(*args)
        return known[args]

    return wrapped


@memoized
def angles(n: int, dtype: torch.dtype) -> Tensor:
    return torch.outer(torch.arange(n, dtype=dtype), torch.arange(n, dtype=dtype)).cos()


def by_default(n: int, dtype: torch.dtype, known: dict[int, Tensor] = {}) -> Tensor:  # noqa: B006 - on purpose
    if n not in known:
        known[n] = torch.linspace(0, 1, n, dtype=dtype)
    return known[n]


@functools.cache
def noise(n: int) -> Tensor:
    """Drawn in the first step, and the same in all later ones."""
    return torch.rand(n, dtype=torch.float64)


@case()
class ACachedFunctionOfDevicesAndDtypes(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * scales(h.shape[-1], h.device, h.dtype)


@case()
class ACacheOfOne(Net):
    """The second call puts out what the first has made."""

    def between(self, h: Tensor) -> Tensor:
        row, tables = of_last_size(6, h.dtype)
        other, _ = of_last_size(3, h.dtype)
        return (h * row) @ tables["mask"].to(h.dtype) + other.sum()


@case()
class ACachedMethod(Net):
    @functools.lru_cache  # noqa: B019 - as libraries have it
    def table(self, n: int) -> Tensor:
        return torch.linspace(1, 2, n, dtype=torch.float64)

    def between(self, h: Tensor) -> Tensor:
        return h * self.table(6)


@case()
class ACachedProperty(Net):
    @functools.cached_property
    def table(self) -> Tensor:
        return torch.linspace(1, 2, 6, dtype=torch.float64)

    def between(self, h: Tensor) -> Tensor:
        return h * self.table


@case()
class ATableOfTheFirstForward(Net):
    """A rotary embedding's: as long as the longest that has been seen."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.cos = 0, None

    def between(self, h: Tensor) -> Tensor:
        if self.cos is None or h.shape[-1] > self.longest:
            self.longest = h.shape[-1]
            self.cos = torch.arange(self.longest, dtype=h.dtype).cos()
        return h * self.cos[: h.shape[-1]]


@case()
class MasksInADictOfTheModule(Net):
    def __init__(self) -> None:
        super().__init__()
        self.masks: dict[int, Tensor] = {}

    def between(self, h: Tensor) -> Tensor:
        if 6 not in self.masks:
            self.masks[6] = torch.ones(6, 6, dtype=h.dtype).tril()
        return h @ self.masks[6]


@case()
class MasksInADictOfTheClass(Net):
    masks: dict[Any, Tensor] = {}  # noqa: RUF012 - shared on purpose

    def between(self, h: Tensor) -> Tensor:
        key = h.shape[-1], h.dtype
        if key not in type(self).masks:
            type(self).masks[key] = torch.ones(6, 6, dtype=h.dtype).triu()
        return h @ self.masks[key]


@case()
class AnAttributeOfTheClassMadeOnce(Net):
    scale: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if AnAttributeOfTheClassMadeOnce.scale is None:
            AnAttributeOfTheClassMadeOnce.scale = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * AnAttributeOfTheClassMadeOnce.scale


@case()
class ATableInAClosure(Net):
    def between(self, h: Tensor) -> Tensor:
        return h @ angles(6, h.dtype)


@case()
class ATableInADefaultArgument(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * by_default(6, h.dtype)


@case()
class ATableInAGlobalDict(Net):
    def between(self, h: Tensor) -> Tensor:
        key = "scale", h.device, h.dtype
        if key not in GLOBAL:
            GLOBAL[key] = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * GLOBAL[key]


@case()
class ATableDeepInAGlobalDict(Net):
    def between(self, h: Tensor) -> Tensor:
        tables = NESTED.setdefault("rope", {}).setdefault("cos", [])
        if not tables:
            tables.append(torch.arange(6, dtype=h.dtype).cos())
        return h * tables[0]


@case()
class AnObjectThatKeepsTables(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * TABLE(6, h.dtype)


@case()
class ATableOfTheThread(Net):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(LOCAL, "scale"):
            LOCAL.scale = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * LOCAL.scale


@case()
class ATableInAWeakDict(Net):
    def between(self, h: Tensor) -> Tensor:
        if KEY not in WEAK:
            WEAK[KEY] = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * WEAK[KEY]


@case()
class ATableOfAFunction(Net):
    def between(self, h: Tensor) -> Tensor:
        if not hasattr(by_default, "scale"):
            by_default.scale = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * by_default.scale


@case()
class ATableOfAMetaclass(Net):
    def between(self, h: Tensor) -> Tensor:
        if "scale" not in _Registered.tables:
            _Registered.tables["scale"] = torch.linspace(1, 2, 6, dtype=h.dtype)
        return h * _Registered.tables["scale"]


@case()
class ACachedFunctionOfABuffer(Net):
    """Keyed by the tensor itself, which no step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(1, 2, 6))

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def table(frequencies: Tensor, n: int) -> Tensor:
        return torch.outer(torch.arange(n, dtype=frequencies.dtype), frequencies).cos()

    def between(self, h: Tensor) -> Tensor:
        return h @ self.table(self.frequencies, 6)


@case(warned="SC109")
class ACachedFunctionOfAWeight(Net):
    """Eager PyTorch goes on with what the first step had for weights."""

    @functools.lru_cache  # noqa: B019 - as libraries have it
    def gate(self, n: int) -> Tensor:
        return self.b.weight.detach()[0, :n].sigmoid()

    def between(self, h: Tensor) -> Tensor:
        return h * self.gate(6)


@case(warned="SC109")
class AnAttributeMadeOfAWeightOnce(Net):
    gate: Tensor | None = None

    def between(self, h: Tensor) -> Tensor:
        if self.gate is None:
            self.gate = self.b.weight.detach()[0].sigmoid()
        return h * self.gate


@case(warned="SC109")
class ACachedFunctionOfTheBatch(Net):
    """Of the first batch, in every later step."""

    x: Tensor

    @functools.lru_cache  # noqa: B019 - as libraries have it
    def gate(self) -> Tensor:
        return self.x.detach().mean(0).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.b(self.a(x) * self.gate()).square().mean()


@case(warned="SC109")
class ACachedFunctionOfRandomNumbers(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * noise(6)
