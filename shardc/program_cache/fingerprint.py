"""A digest of Python values that is the same in every process, and another wherever the values differ.

    [1, "a"]                list 2, int 1, str "a"
    model                   each module's class, attributes, parameters' forms, buffers with their values
    config                  an object of a class written in Python: the class, and its attributes
    open("x")               UncacheableError: its state is not in its attributes

What is met a second time is said to be the first one again: a tied parameter is not two that are alike. Sets count
in an order of their contents. Classes and functions are queued for `code`, which digests what they do.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import pathlib
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeVar

import numpy
import torch
from torch import Tensor, nn

from shardc.frontend.function_caches import CACHE
from shardc.program_cache.origins import (
    IMPURE,
    OF_DISK,
    OF_PROCESS,
    UncacheableError,
    is_library_module,
    is_written_in_python,
)
from shardc.torch_compat import is_op, storage_id, version_of


class _Named(NamedTuple):
    field: int


_TEXTS = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice),
    *(types.UnionType, types.GenericAlias, TypeVar),
)
_NUMBERS = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (tuple, list, deque)
_SETS = (set, frozenset)
_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_DESCRIPTORS = (
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.MethodWrapperType),
)
_FIELD = type(vars(_Named)["field"])  # where in its tuple a named field is
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
_FUNCTIONS = (types.FunctionType, type, types.ModuleType)
_OF_ENUMS = ("__objclass__", "_sort_order_", "_name_")
_SPACES = ("aten", "prims", "prim", "shardc")  # of ops whose code is that of torch or of shardc


class Fingerprint:
    """Takes values one by one. `reference(value)` writes down a function, a class or a module; of `forms`, tensors by
    their id, only the form counts, and not what they hold."""

    def __init__(self, reference: Callable[[Any], None] | None = None, forms: Collection[int] = ()) -> None:
        self._forms = forms
        self._parts: list[str] = []
        self._seen: dict[int, tuple[int, object]] = {}  # the values are kept, so that no other takes the place of one
        self._kept: list[object] = []  # were seen, and forgotten
        self._orders: list[tuple[set[str], UncacheableError]] = []  # sets whose order differs between processes
        self._storages: dict[int, int] = {}
        self._devices: dict[torch.device, str] = {}  # a kind, and a number: on which GPU a rank compiles is no matter
        self._reference = reference or self._refuse
        self._path: list[str] = []

    @property
    def digest(self) -> str:
        return hashlib.sha256("\0".join(self._parts).encode("utf-8", "surrogatepass")).hexdigest()

    def token(self, *texts: object) -> None:
        """Texts that stand for themselves, and other values as they print themselves."""
        self._parts.append(repr(texts))

    def met(self, value: object) -> bool:
        """Whether a value was met before, which is then written down; else it is from now on."""
        number = self._seen.get(id(value))
        if number is not None:
            self.token("again", number[0])
            return True
        self._seen[id(value)] = (len(self._seen), value)
        return False

    def add(self, value: Any, name: str = "") -> None:
        """Raises UncacheableError for what has no stable content."""
        kind = type(value)
        if kind in _NUMBERS:
            self._parts.append(f"{kind.__name__} {value!r}")
            return
        self._path.append(name)
        try:
            self._add(value, kind)
        except RecursionError:
            raise self.refusal(value, "is nested too deep") from None
        self._path.pop()

    def mark(self) -> tuple[int, int]:
        return len(self._path), len(self._seen)

    def forget(self, mark: tuple[int, int]) -> None:
        """Go on after a refusal, as if nothing since a `mark` had been met: what was begun has no full content."""
        del self._path[mark[0] :]
        while len(self._seen) > mark[1]:
            self._kept.append(self._seen.popitem()[1][1])

    def refuse_orders(self, names: Collection[str]) -> None:
        """Raises UncacheableError for a set that is met under one of these names, and that has another order in every
        process: whoever names it may go through it."""
        for path, refusal in self._orders:
            if not path.isdisjoint(names):
                raise refusal

    def refusal(self, value: object, why: str) -> UncacheableError:
        place = ".".join(filter(None, self._path)) or "a value"
        return UncacheableError(f"{place} ({type(value).__module__}.{type(value).__qualname__}) {why}")

    def unordered(self, values: Iterable[Any]) -> None:
        """Each by a digest of its own, in the order of these: no order of theirs is the same in two processes."""
        digests: list[str] = []
        classes: dict[str, type] = {}
        by_hash = False
        for value in values:
            if type(value) not in (*_NUMBERS, *_TEXTS) and not isinstance(value, enum.Enum):
                raise self.refusal(value, "is in a set, whose order differs between processes")
            apart = Fingerprint()
            apart.add(value) if not isinstance(value, enum.Enum) else apart.token(type(value), value.name)
            if isinstance(value, enum.Enum):
                classes[f"{type(value).__module__} {type(value).__qualname__}"] = type(value)
            by_hash |= type(value) not in (bool, int, float, complex)
            digests.append(apart.digest)
        self.token(*sorted(digests))
        for name in sorted(classes):
            self._reference(classes[name])
        if by_hash and len(digests) > 1:
            parts = {part for name in self._path for part in name.replace(": ", ".").split(".")}
            refusal = self.refusal(set(), "has an order that differs between processes, and code of a user names it")
            self._orders.append((parts, refusal))

    # ------------------------------------------------------------------ kinds
    def _add(self, value: Any, kind: type) -> None:
        if kind in _TEXTS:
            self.token(kind.__name__, repr(value))
        elif isinstance(value, _FUNCTIONS):
            self._reference(value)
        elif isinstance(value, enum.Enum):
            self._reference(kind)
            self.token("enum", value.name)
            if not self.met(value):
                self.add({name: item for name, item in vars(value).items() if name not in _OF_ENUMS})
        elif self.met(value):
            return
        elif kind in _DICTS or kind is types.MappingProxyType:
            self.token(kind.__name__, len(value))
            if kind is defaultdict:
                self.add(value.default_factory, "default_factory")
            for key, item in value.items():
                self.add(key)
                self.add(item, str(key))
        elif kind in _SEQUENCES:
            self.token(kind.__name__, len(value))
            for i, item in enumerate(value):
                self.add(item, str(i))
        elif kind in _SETS:
            self.token(kind.__name__, len(value))
            self.unordered(value)
        elif kind in _TENSORS:
            self._tensor(value)
        elif isinstance(value, Tensor):
            raise self.refusal(value, "is no plain tensor")
        elif isinstance(value, nn.Module):
            self._module(value)
        else:
            self._other(value, kind)

    def _other(self, value: Any, kind: type) -> None:
        if kind is types.MethodType:
            self.token("method")
            self.add(value.__func__)
            self.add(value.__self__)
        elif kind is functools.partial:
            self.token("partial")
            for part in (value.func, value.args, value.keywords):
                self.add(part)
        elif kind in (staticmethod, classmethod):
            self.token(kind.__name__)
            self.add(value.__func__)
        elif kind is property:
            self.token("property")
            for part in (value.fget, value.fset, value.fdel):
                self.add(part)
        elif kind is weakref.ReferenceType:
            self.token("weakref")
            self.add(value())
        elif isinstance(value, CACHE):
            if value.cache_info().currsize:
                raise self.refusal(value, "remembers what it returned before")
            self.token("lru_cache")
            self.add(value.__wrapped__)
        elif isinstance(value, logging.Logger):
            self.token("logger", value.name, value.getEffectiveLevel(), value.disabled, logging.root.manager.disable)
        elif kind is types.BuiltinFunctionType:
            self._builtin(value)
        elif kind in _DESCRIPTORS:
            self.token("descriptor", value.__objclass__.__module__, value.__qualname__)
        elif is_op(value):
            self.op(value)
        elif kind is _FIELD:
            self.token("field", value.__reduce__()[1][0])
        elif isinstance(value, numpy.ndarray | numpy.generic | numpy.dtype):
            self._array(value, kind)
        elif kind in _PATHS:
            self.token("path", kind.__qualname__, value)
            self._orders.append((OF_DISK, self.refusal(value, "is a path, and code of a user may ask the disk for it")))
        else:
            self._object(value, kind)

    def _array(self, value: Any, kind: type) -> None:
        if isinstance(value, numpy.dtype):
            self.token("dtype", value.descr if value.fields else value.str)
        elif value.dtype.hasobject or (kind is not numpy.ndarray and type(value) is not value.dtype.type):
            raise self.refusal(value, "is no plain array")
        else:
            self.token("array", kind.__qualname__, value.dtype.str, value.shape, getattr(value, "strides", ()))
            self.token("holds", hashlib.sha256(value.tobytes()).hexdigest())

    def op(self, value: Any) -> None:
        name = str(value)
        if name.partition(".")[0].partition("::")[0] not in _SPACES:
            raise self.refusal(value, f"({name}) is an op whose code is not known")
        self.token("op", name)

    def _builtin(self, value: Any) -> None:
        owner = value.__self__
        if owner is not None and not isinstance(owner, types.ModuleType):
            self.token("bound", value.__qualname__)
            self.add(owner)
            return
        module = str(value.__module__)
        if module.partition(".")[0].lstrip("_") in IMPURE:
            raise self.refusal(value, f"({module}.{value.__qualname__}) may return something else each time")
        if owner is not None and not is_library_module(owner):
            raise self.refusal(value, "is compiled code of a user's")
        self.token("builtin", module, value.__qualname__)

    def _object(self, value: Any, kind: type) -> None:
        """An object of a class that is written in Python, whose state is in its attributes, slots and items."""
        base = _base_of(value)
        if kind.__module__.partition(".")[0] == "pydantic_core" and isinstance(value.__reduce__(), str):
            self.token("a name of", kind.__module__, value.__reduce__())  # PydanticUndefined
            return
        for cls in kind.__mro__:
            if cls.__module__.partition(".")[0].lstrip("_") in IMPURE:
                raise self.refusal(value, "may be something else each time")
            is_plain = cls in (object, types.SimpleNamespace) or cls in base.__mro__
            if not is_plain and not is_written_in_python(cls):
                raise self.refusal(value, "holds what its attributes do not show")
        self.token("object")
        self._reference(kind)
        self._items(value, base)
        state = {**getattr(value, "__dict__", {}), **_slots_of(value)}
        if not state and base is object and "__slots__" not in vars(kind) and not hasattr(value, "__dict__"):
            raise self.refusal(value, "holds what its attributes do not show")
        self.token(len(state))
        from_transformers = kind.__module__.startswith("transformers.")
        for name, item in state.items():
            self.token(name)
            if not (from_transformers and name in OF_PROCESS):
                self.add(item, name)

    def _items(self, value: Any, base: Any) -> None:
        """What an object holds as the builtin type that its class derives from."""
        if issubclass(base, dict):
            self.token(len(value))
            for key, item in dict.items(value):
                self.add(key)
                self.add(item, str(key))
        elif base in _SEQUENCES:
            self.token(base.__len__(value))
            for i, item in enumerate(base.__iter__(value)):
                self.add(item, str(i))
        elif base in _SETS:
            self.unordered(base.__iter__(value))
        elif base is not object:
            self.token(base.__repr__(value))

    # ------------------------------------------------------------------ tensors and modules
    def _tensor(self, t: Tensor) -> None:
        if t.layout is not torch.strided or t.is_nested or t.is_quantized or t.grad_fn is not None:
            raise self.refusal(t, "is no plain tensor")
        storage = self._storages.setdefault(storage_id(t), len(self._storages))
        device = self._devices.setdefault(t.device, f"{t.device.type} {len(self._devices)}")
        form = (type(t).__name__, t.dtype, device, tuple(t.shape), t.stride(), t.requires_grad, t.is_conj())
        self.token("tensor", *form, t.is_neg(), t.is_inference(), storage, t.storage_offset())
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            self.add(getattr(t, hooks, None), hooks)
        self.add(dict(vars(t)) or None)
        if id(t) in self._forms:
            return
        if not t.is_meta:
            held = t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            raw: Any = held.view(torch.uint8).numpy() if held.numel() else b""
            self.token("holds", hashlib.sha256(raw).hexdigest())
        else:
            self.token("version", version_of(t))  # which tells who has written to a buffer that is computed anew

    def _module(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise self.refusal(module, "is compiled by torch.jit")
        self.token("module")
        self._reference(type(module))
        if (base := _base_of(module)) is not object:
            self._items(module, base)
        state = {**vars(module), **_slots_of(module)}
        self.token(len(state))
        for name, item in state.items():
            if type(item) in (dict, OrderedDict, set) and not item:
                self._parts.append(f"empty {name}")
                continue
            self.token(name)
            self.add(item, name)

    def _refuse(self, value: object) -> None:
        raise self.refusal(value, "is no plain value")


def _base_of(value: object) -> Any:
    """The builtin type that an object's class derives from."""
    kinds = (*_DICTS, *_SEQUENCES, *_SETS, int, float, str, bytes)
    return next((kind for kind in kinds if isinstance(value, kind)), object)


def _slots_of(value: object) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            name = f"_{cls.__name__.lstrip('_')}{slot}" if slot.startswith("__") and slot[-2:] != "__" else slot
            if slot not in ("__dict__", "__weakref__") and (item := getattr(value, name, state)) is not state:
                state[name] = item
    return state
