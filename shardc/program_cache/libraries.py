"""What code of libraries stands for: their versions, the sizes and times of their files, and what users put into them.

A library's function is known by its name. But names can be given other functions, by kernels that patch a model's
module, or by a registry of attention functions. So of a library other than torch's, each module within reach is looked
through: which function each name has, which plain values. A user's function among them counts with all that it does.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardc.program_cache.fingerprint import Fingerprint
from shardc.program_cache.origins import (
    OF_PROCESS,
    UncacheableError,
    codes_of,
    functions_in,
    is_library_class,
    is_library_code,
    is_library_module,
    own_folders,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NOT_LOOKED_THROUGH = {
    *("torch", "shardc", "kernels_triton", "numpy", "torchgen", "triton", "typing_extensions", "pydantic"),
    *("pydantic_core", "annotated_types", "typing_inspection"),
}
_BUILTIN = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType)
# Modules of torch in which a name that has another function changes what models do.
_PATCHED = {
    *("torch", "torch.functional", "torch.autograd", "torch.autograd.function", "torch.utils.checkpoint"),
    *("torch.special", "torch.linalg", "torch.fft", "torch._tensor", "torch.amp", "torch.amp.autocast_mode"),
}
_PATCHED_WITHIN = ("torch.nn.", "torch.optim.")
# What compiling or making a model leaves behind, and a hit does not: modules for gradients of each sample, whose
# tensors no compile takes; and a method that transformers gives to torch's modules once.
_LEFT_MODULES, _LEFT_NAMES = "torch.nn.utils._expanded_weights", {"smart_apply": "transformers.modeling_utils"}
_NO_FUNCTIONS = {*_PLAIN, *_BUILTIN, type, dict, list, tuple, set, frozenset, ModuleType}  # nor do instances hold any
_COUNTED = ("torch", "shardc", "kernels_triton", "transformers")  # by file, or in `surroundings`
_DEPTH = 3  # of containers and objects in a module
_STARTED = time.time()
_SKIPPED = {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__spec__", "__path__", *OF_PROCESS}


class Libraries:
    """The libraries that a fingerprint stands on. `refer` writes a user's function down."""

    def __init__(self, fingerprint: Fingerprint, refer: Callable[[Any], None]) -> None:
        self._fingerprint, self._refer = fingerprint, refer
        self._met: dict[str, None] = {}
        self.pending: list[str] = []
        self._classes: set[int] = set()
        self.files: set[str] = set()
        self._packages: dict[str, None] = {}  # that modules within reach name, whose files count

    def refer(self, name: str) -> None:
        """A module that is read."""
        if name in self._met:
            return
        self._met[name] = None
        package = name.partition(".")[0]
        self._packages[package] = None
        if package in _NOT_LOOKED_THROUGH or package in sys.stdlib_module_names:
            if package not in sys.stdlib_module_names and package != name:
                self.refer(package)
            elif package not in sys.stdlib_module_names:
                self._version(package)
            return
        self.pending.append(name)

    def next(self) -> None:
        """Look a module through."""
        name = self.pending.pop()
        package = name.partition(".")[0]
        if package != name:
            self.refer(package)
        module = sys.modules.get(name)
        self._fingerprint.token("library", name)
        if module is None:
            return
        path = getattr(module, "__file__", None)
        if path is not None:
            self._file(path)
        if package == name:
            self._version(package)
            return  # a package's names are those of its modules, found when asked for
        for key, value in vars(module).items():
            if key not in _SKIPPED:
                self._item(key, value, package, _DEPTH)

    def count_files(self) -> None:
        """The sizes and times of the files of each library that is read, which some edit where they lie."""
        for package in sorted(self._packages):
            module = sys.modules.get(package)
            if module is None or package in _COUNTED or package in sys.stdlib_module_names:
                continue
            places = [*getattr(module, "__path__", ())] or [getattr(module, "__file__", None) or ""]
            if is_library_module(module):
                self._fingerprint.token("files of", package, *(files_in(str(place)) for place in places))

    def form(self, function: FunctionType) -> None:
        """What a library's function has beside its name: defaults, which anybody may set; code made of text."""
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        self._fingerprint.token("defaults", *(repr(v) if type(v) in _PLAIN else type(v).__qualname__ for v in defaults))
        if function.__code__.co_filename == "<string>":
            for code in codes_of(function.__code__):
                plain = [const for const in code.co_consts if type(const) in _PLAIN]
                self._fingerprint.token("text", code.co_code.hex(), code.co_names, repr(plain))

    def patched_torch(self) -> None:
        """Which functions torch's names have, and those of users in their place, of which models do not tell."""
        for name in sorted(sys.modules):
            module = sys.modules[name]
            if name in _PATCHED or (name.startswith(_PATCHED_WITHIN) and not name.startswith(_LEFT_MODULES)):
                self._users(name, module)
        for cls in (torch.Tensor, nn.Parameter):
            self.patched(cls)
        for kind, node in pytree.SUPPORTED_NODES.items():
            for function in (*functions_in(node.flatten_fn), *functions_in(node.unflatten_fn)):
                if not is_library_code(function):
                    self._fingerprint.token("a tree's node", getattr(kind, "__qualname__", ""))
                    self._refer(function)

    def patched(self, cls: type) -> None:
        """A library's class: the functions that a user has given it."""
        if id(cls) not in self._classes:
            self._classes.add(id(cls))
            self._users(cls.__qualname__, cls)

    def _users(self, name: str, place: Any) -> None:
        token = self._fingerprint.token
        token("of", name)
        for key, value in list(vars(place).items()):
            if isinstance(value, type):
                token(key, value.__module__, value.__qualname__)
                if value.__module__ == name:
                    self.patched(value)
                elif not is_library_class(value) and key not in ("__class__", "__base__"):
                    self._refer(value)
                continue
            functions = _functions_in(value)
            if isinstance(place, type) and key[:2] != "__" and not functions:
                self._item(key, value, "", 2)
            elif type(value) in _BUILTIN:
                token(key, str(getattr(value, "__module__", "")), value.__qualname__)
            elif callable(value) and not functions and not isinstance(value, ModuleType):
                self._callable(name, key, value)
            for function in functions:
                if not is_library_code(function):
                    token("instead of", name, key)
                    self._refer(function)
                elif function.__module__ != _LEFT_NAMES.get(key):
                    token(key, function.__module__, function.__qualname__)
                if function.__defaults__ or function.__kwdefaults__ or function.__code__.co_filename == "<string>":
                    self.form(function)

    def _callable(self, name: str, key: str, value: Any) -> None:
        """An object that a library's name calls: of a library's class; or somebody's."""
        self._fingerprint.token(key, type(value).__module__, type(value).__qualname__)
        if isinstance(value, functools.partial) or not is_library_class(type(value)) or isinstance(value, nn.Module):
            self._fingerprint.token("instead of", name, key)
            self._fingerprint.add(value, f"{name}.{key}")

    def _version(self, package: str) -> None:
        module = sys.modules.get(package)
        version = getattr(module, "__version__", None)
        if not isinstance(version, str):
            try:
                version = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                version = "unknown"
        self._fingerprint.token("version", package, version)

    def _file(self, path: str) -> None:
        self.files.add(path)
        try:
            about = os.stat(path)
            refuse_newer(path, about)
            self._fingerprint.token(path, about.st_size, about.st_mtime_ns)
        except OSError:
            self._fingerprint.token(path, "gone")

    def _item(self, key: object, value: Any, package: str, depth: int) -> None:
        token = self._fingerprint.token
        functions = _functions_in(value)
        if type(value) in _PLAIN:
            token(key, repr(value))
        elif functions:
            for function in functions:
                token(key, function.__module__, function.__qualname__)
                if not is_library_code(function):
                    self._refer(function)
                else:
                    self._beside(str(function.__module__), package)
        elif isinstance(value, type):
            self._class(key, value, package, depth)
        elif isinstance(value, ModuleType):
            token(key, value.__name__)
            self._beside(value.__name__, package)
        elif depth and isinstance(value, dict):
            token(key, type(value).__qualname__, len(value))
            for inner, item in _in_order(value):
                self._item(inner, item, package, depth - 1)
        elif depth and isinstance(value, list | tuple):
            token(key, type(value).__qualname__, len(value))
            for i, item in enumerate(list(value)):
                self._item(i, item, package, depth - 1)
        elif isinstance(value, set | frozenset):
            token(key, type(value).__qualname__, *sorted(repr(v) for v in value if type(v) in _PLAIN))
        else:
            token(key, type(value).__qualname__)
            if depth and type(value).__module__.partition(".")[0] == package:
                for name, item in list(getattr(value, "__dict__", {}).items()):
                    self._item(name, item, package, depth - 1)

    def _beside(self, name: str, package: str) -> None:
        """A module that one of a package's modules names: what it holds counts too if it is of the package. Of other
        packages the files alone count where it is transformers that names them, which names many."""
        self._packages[name.partition(".")[0]] = None
        if name.partition(".")[0] == package or package != "transformers":
            self.refer(name)

    def _class(self, key: object, cls: type, package: str, depth: int) -> None:
        self._fingerprint.token(key, cls.__module__, cls.__qualname__)
        if not is_library_class(cls):
            self._refer(cls)
            return
        self._packages[cls.__module__.partition(".")[0]] = None
        if cls.__module__.partition(".")[0] != package:
            return
        self.refer(cls.__module__)
        if id(cls) in self._classes:
            return
        self._classes.add(id(cls))
        for name, value in vars(cls).items():
            functions = _functions_in(value)
            if functions:
                for function in functions:
                    if not is_library_code(function):
                        self._fingerprint.token("instead of", cls.__qualname__, name)
                        self._refer(function)
                    elif (function.__module__, function.__qualname__) != (cls.__module__, f"{cls.__qualname__}.{name}"):
                        self._fingerprint.token(name, function.__module__, function.__qualname__)
            elif type(value) in _PLAIN or (depth and type(value) in (dict, list, tuple)):
                self._item(name, value, package, depth - 1)


def _in_order(table: dict[Any, Any]) -> list[tuple[object, Any]]:
    """The items of a library's dict, which may have been made from a set, or be one by addresses."""
    items = list(dict.items(table))
    if all(type(key) is str for key, _ in items):
        return sorted(items, key=lambda item: item[0])
    is_stable = [type(key) in _PLAIN and not (type(key) is int and key >= 1 << 31) for key, _ in items]
    return [(key if stable else type(key), item) for stable, (key, item) in zip(is_stable, items, strict=True)]


def _functions_in(value: Any) -> list[FunctionType]:
    kind = type(value)
    if kind is FunctionType:
        return [value]
    return [] if kind in _NO_FUNCTIONS else list(functions_in(value))


def refuse_newer(path: str, about: os.stat_result) -> None:
    """Raises UncacheableError for a file that was written after this process had started, which runs an older one."""
    if about.st_ctime > _STARTED:
        raise UncacheableError(f"{path} was written after this process had started")


@functools.lru_cache(maxsize=256)
def files_in(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Of all code in a folder, or of a file: path, size, and time of its last change."""
    if os.path.isfile(folder):
        about = os.stat(folder)
        refuse_newer(folder, about)
        return ((folder, about.st_size, about.st_mtime_ns),)
    found: list[tuple[str, int, int]] = []
    todo = [folder]
    while todo:
        with suppress(OSError), os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    todo.append(entry.path)
                elif entry.name.endswith((".py", ".so", ".pyd")):
                    about = entry.stat()
                    refuse_newer(entry.path, about)
                    found.append((entry.path, about.st_size, about.st_mtime_ns))
    return (*sorted(found),)


def sources_of_shardc() -> Iterator[str]:
    """The paths of shardc's own files: code and tables, in order."""
    for folder in own_folders():
        for parent, folders, files in os.walk(folder):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            yield from (os.path.join(parent, name) for name in sorted(files))
