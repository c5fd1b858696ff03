"""Where Python keeps what a step may change: each kind of place, what it holds, and how that is put back.

    an object's attributes, its slots          self.last = h
    containers, and what derives from them     self.log.append(h)
    a class's attributes                       type(self).calls += 1; of an autograd.Function: in backward
    variables around a function                nonlocal count; CACHE[key] = h; STATE.calls += 1; def f(x, seen=[])
    context variables                          STEP.set(STEP.get() + 1)
    arrays of numpy and of bytes, by content   self.mean *= 0.9
    iterators, by position                     next(self.schedule)
    functions with `lru_cache`                 table(128); see function_caches
    attributes of functions                    table.made = h
    threads' own variables, namespaces         LOCAL.mask = h

An iterator cannot be put back; that it changed is known all the same. Longer than 400 lines: it is one table of kinds.
"""

from __future__ import annotations

import itertools
import sys
import sysconfig
from array import array
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial
from operator import is_
from pathlib import Path
from threading import Thread, local
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

from torch import Tensor

from shardc.frontend.function_caches import CACHE, Cache

ABSENT = object()
CONTAINERS = (list, set, deque, dict, OrderedDict, defaultdict, Counter)
_KINDS = (OrderedDict, dict, set, deque, list)  # whose methods a container is read and written by
NUMBERS = (bool, int, float, complex)
_OPAQUE = (Tensor, ModuleType, BuiltinFunctionType, MethodType, partial, str, bytes, int, float, complex)
_ITERATORS = (itertools.count, itertools.cycle, type(iter([])), type(iter(())), type(iter(range(0))), enumerate, zip)
_LARGEST_ARRAY = 1 << 20  # bytes: of a larger one of numpy only a part is looked at


class Holder(Protocol):
    """One place. `named`: its items are attributes or variables, and not elements of a container."""

    named: bool

    def items(self) -> dict[object, Any]: ...
    def restore(self, items: Mapping[object, Any]) -> None: ...


class Container:
    """A container's items; of a class that derives from one, past the methods of its own."""

    __slots__ = ("_kind", "_value", "named")

    def __init__(self, value: Any, named: bool = False) -> None:
        self._value, self.named = value, named
        self._kind: Any = _container_kind(type(value))

    def items(self) -> dict[object, Any]:
        if type(self._value) is dict:
            return self._value.copy()
        if isinstance(self._value, dict):
            return dict(self._kind.items(self._value))
        values = self._kind.__iter__(self._value)
        return {id(value): value for value in values} if isinstance(self._value, set) else dict(enumerate(values))

    def holds(self, items: Mapping[object, Any]) -> bool:
        """Are these its items, the same objects in the same order?"""
        kind, value = self._kind, self._value
        if kind.__len__(value) != len(items):
            return False
        if not isinstance(value, dict):
            return all(map(is_, kind.__iter__(value), items.values()))
        return all(map(is_, kind.values(value), items.values())) and all(map(is_, kind.__iter__(value), items))

    def restore(self, items: Mapping[object, Any]) -> None:
        if self.holds(items):
            return
        current = self.items()
        if [*map(id, current.values())] == [*map(id, items.values())] and (
            not isinstance(self._value, dict) or [*current] == [*items]
        ):
            return
        self._kind.clear(self._value)
        if isinstance(self._value, dict):
            for key, value in items.items():
                self._kind.__setitem__(self._value, key, value)
        elif isinstance(self._value, set):
            self._kind.update(self._value, items.values())
        else:
            self._kind.extend(self._value, items.values())


@lru_cache(maxsize=4096)
def _container_kind(cls: type) -> Any:
    return next(kind for kind in _KINDS if issubclass(cls, kind))


class Attributes:
    """Some attributes of an object: those in its slots, or, of a class, those that can change from step to step."""

    named = True

    def __init__(self, value: Any, names: list[str]) -> None:
        self._value, self._names = value, names

    def items(self) -> dict[object, Any]:
        read = vars(self._value).get if isinstance(self._value, type) else partial(getattr, self._value)
        values = {name: read(name, ABSENT) for name in self._names}
        return {name: value for name, value in values.items() if value is not ABSENT}

    def restore(self, items: Mapping[object, Any]) -> None:
        current = self.items()
        for name in self._names:
            if name in items and current.get(name, ABSENT) is not items[name]:
                setattr(self._value, name, items[name])
            elif name not in items and name in current:
                delattr(self._value, name)


class Variables:
    """What a function reads of the variables around it: its closure, its module's globals, its defaults.

    Of globals what a step can change: containers, numbers, objects and classes of a user's, and what holds these. Of
    the globals of a library's function those alone that a user may have put there: no object or class of a library's.
    """

    named = True

    def __init__(self, function: FunctionType) -> None:
        code = function.__code__
        self._cells: dict[str, CellType] = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        self._globals = function.__globals__
        library = _package(function) in _LIBRARIES
        self._names = [
            name
            for name in code.co_names
            if name not in self._globals  # most are names of attributes; a step may make one of them a global
            or (_changes(value := self._globals[name]) and not (library and _is_installed(value)))
        ]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._defaults = [value for value in defaults if _changes(value)]

    def items(self) -> dict[object, Any]:
        variables: dict[object, Any] = {name: _content(cell) for name, cell in self._cells.items()}
        variables |= {name: self._globals[name] for name in self._names if name in self._globals}
        return variables | {f"default {i}": value for i, value in enumerate(self._defaults)}

    def restore(self, items: Mapping[object, Any]) -> None:
        for name, value in items.items():
            if name in self._cells and value is ABSENT:
                del self._cells[cast("str", name)].cell_contents
            elif name in self._cells:
                self._cells[cast("str", name)].cell_contents = value
            elif name in self._names:
                self._globals[cast("str", name)] = value


class Bytes:
    """An `array.array` or a `bytearray`, by its content."""

    named = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def items(self) -> dict[object, Any]:
        return {"content": bytes(self._value)}

    def restore(self, items: Mapping[object, Any]) -> None:
        if items["content"] != bytes(self._value):
            content = items["content"]
            self._value[:] = array(self._value.typecode, content) if isinstance(self._value, array) else content


class Context:
    """What a context variable holds. One that had no value is given none: that cannot be done."""

    named = False

    def __init__(self, variable: ContextVar[Any]) -> None:
        self._variable = variable

    def items(self) -> dict[object, Any]:
        value = self._variable.get(ABSENT)
        return {} if value is ABSENT else {"value": value}

    def restore(self, items: Mapping[object, Any]) -> None:
        if items and self._variable.get(ABSENT) is not items["value"]:
            self._variable.set(items["value"])


class Array:
    """An array of numpy, by its content."""

    named = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def items(self) -> dict[object, Any]:
        return {"content": self._value.tobytes() if self._value.nbytes <= _LARGEST_ARRAY else None}

    def restore(self, items: Mapping[object, Any]) -> None:
        if items["content"] is not None and items["content"] != self._value.tobytes():
            flat = type(self._value)(self._value.shape, self._value.dtype, bytearray(items["content"]))
            self._value[...] = flat


class Position:
    """Where an iterator stands: seen, and not put back."""

    named = False

    def __init__(self, value: Any) -> None:
        self._value = value

    def items(self) -> dict[object, Any]:
        if isinstance(self._value, GeneratorType):
            frame = self._value.gi_frame
            return {"position": "ended" if frame is None else f"{frame.f_lasti} {frame.f_locals!r}"}
        return {"position": repr(self._value.__reduce__())}

    def of_library(self) -> bool:
        """Is it a generator of torch's or of another library's, as a context manager that decorates has one?"""
        frame = self._value.gi_frame if isinstance(self._value, GeneratorType) else None
        return frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] in _LIBRARIES

    def restore(self, items: Mapping[object, Any]) -> None:
        pass


def holders_of(value: Any) -> list[Holder]:
    """The places that a value is, or has its attributes in."""
    holders = _how_held(type(value))
    return holders(value) if holders is not None else []


@lru_cache(maxsize=4096)
def holds_nothing(cls: type) -> bool:
    """Do values of a type hold nothing, neither in places nor inside?"""
    return _how_held(cls) is None and not _has_inside(cls)


@lru_cache(maxsize=4096)
def _how_held(cls: type) -> Callable[[Any], list[Holder]] | None:
    """How values of a type hold what they hold; None where they hold nothing that a step may change."""
    if cls in CONTAINERS:
        return lambda value: [Container(value)]
    if issubclass(cls, type):
        return lambda value: [holder] if (holder := held_by_class(value)[0]) is not None else []
    if issubclass(cls, ContextVar):
        return lambda variable: [Context(variable)]
    if issubclass(cls, (bytearray, array)):
        return lambda value: [Bytes(value)]
    if issubclass(cls, FunctionType):
        return lambda f: [Variables(f), *([Container(f.__dict__, named=True)] if _has_attributes(f) else [])]
    if issubclass(cls, CACHE):
        return lambda value: [Cache(value)]
    if issubclass(cls, (*_ITERATORS, GeneratorType)):
        return lambda value: [Position(value)]
    if _package(cls) == "numpy":
        return (lambda a: [Array(a)] if a.dtype.kind in "biufc" else []) if cls.__name__ == "ndarray" else None
    if issubclass(cls, (*_OPAQUE, tuple, type(None))):
        return None
    if issubclass(cls, Thread) and _in_environment(_package(cls)):
        return None  # a library's thread changes itself at any time; a user's may hold what forward reads
    slots, is_container = _slots(cls), issubclass(cls, CONTAINERS)

    def of_object(value: Any) -> list[Holder]:
        attributes = getattr(value, "__dict__", None)
        holders: list[Holder] = [Container(value)] if is_container else []
        if isinstance(attributes, dict):
            holders.append(Container(attributes, named=True))
        if slots:
            holders.append(Attributes(value, slots))
        return holders

    return of_object


def held_by_class(cls: type) -> tuple[Holder | None, list[Any]]:
    """Of a class, without those that it derives from: the place of what can change, and its functions.

    Of classes of torch and of Python itself there is nothing: nothing of theirs is a user's.
    """
    if _package(cls) in _NOBODYS:
        return None, []
    attributes = dict(vars(cls))
    names = [name for name, value in attributes.items() if _changes(value) and not name.startswith("__")]
    unwrapped = map(_called, attributes.values())
    functions = [value for value in unwrapped if type(value) in (FunctionType, CACHE)]
    return Attributes(cls, names) if names else None, functions


def _called(attribute: Any) -> Any:
    """The function behind an attribute of a class: a method's, a property's."""
    if isinstance(attribute, property):
        return attribute.fget
    return attribute.func if isinstance(attribute, cached_property) else getattr(attribute, "__func__", attribute)


def inside(value: Any) -> list[Any]:
    """What a value holds beside its places: the elements of a tuple; what a bound method or a partial calls; the
    functions of a user's class, and of an object its class."""
    if not _has_inside(type(value)):
        return []
    if isinstance(value, tuple):
        return [*cast("tuple[Any, ...]", value)]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, BuiltinFunctionType) and not isinstance(value.__self__, ModuleType):
        return [value.__self__]  # the list of `list.append`
    if isinstance(value, CACHE):
        return [value.__wrapped__]
    if isinstance(value, type):
        metaclass = [type(value)] if _package(type(value)) not in _LIBRARIES else []
        return [*held_by_class(value)[1], *metaclass]
    if not isinstance(value, BuiltinFunctionType):
        return [type(value)]
    return []


@lru_cache(maxsize=4096)
def _has_inside(cls: type) -> bool:
    return (
        issubclass(cls, (tuple, MethodType, partial, BuiltinFunctionType, CACHE, type))
        or _package(cls) not in _LIBRARIES
    )


_NOBODYS = frozenset(("torch", "builtins", *sys.stdlib_module_names))
"""The packages whose classes and functions keep nothing of a user's."""
_LIBRARIES = _NOBODYS | {"transformers", "numpy"}
"""Packages that keep what lasts from step to step on modules: their objects and classes are not looked into."""


_NAMESPACES = (local, SimpleNamespace, ChainMap, UserDict, UserList, WeakKeyDictionary, WeakValueDictionary)
"""Classes of Python's own whose objects hold what is put there."""
_CHANGING = (
    *NUMBERS,
    *_NAMESPACES,
    str,
    type(None),
    Tensor,
    *CONTAINERS,
    *_ITERATORS,
    GeneratorType,
    CACHE,
    ContextVar,
    bytearray,
    array,
)


def _changes(value: Any) -> bool:
    """Can a global or a class's attribute change from step to step, or hold what does? What is a user's own can."""
    if isinstance(value, (FunctionType, type)):
        return _package(value) not in (_NOBODYS if isinstance(value, FunctionType) else _LIBRARIES)
    return _instances_change(type(value))


@lru_cache(maxsize=4096)
def _instances_change(cls: type) -> bool:
    return issubclass(cls, _CHANGING) or cls.__name__ == "ndarray" or _package(cls) not in _LIBRARIES


def _has_attributes(function: FunctionType) -> bool:
    """Has a function attributes, or may a step give it some? A user's may: `table.made = {}`."""
    return bool(function.__dict__) or _package(function) not in _LIBRARIES


def _package(value: Any) -> str:
    """The top-level package that a class or function is from: "" of one made by `exec` (a dataclass's, fx's)."""
    return (getattr(value, "__module__", None) or "").partition(".")[0]


def _is_installed(value: Any) -> bool:
    """Is a value, or its class, from a package of an environment or of Python's? A number or a list is nobody's."""
    package = _package(value if isinstance(value, (FunctionType, type)) else type(value))
    return package != "builtins" and _in_environment(package)


@lru_cache(maxsize=1024)
def _in_environment(package: str) -> bool:
    if package in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(package), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in _installed_folders())


def _installed_folders() -> set[Path]:
    """Where packages are installed: the environment's folders, and those of the path that say what was installed there
    (`pip install --user`, `--target`, a distribution's). A project that is installed in place lies in none."""
    folders = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    return folders | {Path(folder) for folder in sys.path if folder and next(Path(folder).glob("*.dist-info"), None)}


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that is not assigned yet
        return ABSENT


def _slots(cls: type) -> list[str]:
    names: Iterator[Any] = (getattr(base, "__slots__", ()) for base in cls.__mro__ if base.__module__ != "builtins")
    flat = [name for slots in names for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in flat if name not in ("__dict__", "__weakref__")]
