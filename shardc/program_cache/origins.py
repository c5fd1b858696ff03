"""Where code comes from: the user's own files, or libraries that are pinned by their versions; and what is impure."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from shardc.frontend.function_caches import CACHE

# Modules whose functions answer differently each time, by the clock, the process or files.
IMPURE = {
    *("io", "ast", "asyncio", "codecs", "concurrent", "ctypes", "datetime", "faulthandler", "fileinput", "gc"),
    *("genericpath", "getpass", "glob", "http", "importlib", "inspect", "io", "linecache", "mmap"),
    *("multiprocessing", "nt", "ntpath", "os", "pathlib", "pickle", "pkgutil", "platform", "posix"),
    *("posixpath", "psutil", "pwd", "random", "requests", "resource", "runpy", "secrets", "select", "shelve"),
    *("shutil", "signal", "site", "socket", "sqlite3", "ssl", "subprocess", "sys", "sysconfig", "tempfile"),
    *("thread", "threading", "time", "traceback", "urllib", "uuid", "zipfile"),
}
# Functions of other libraries that answer differently each time, by module; "*" for all of them.
_IMPURE_FUNCTIONS = {
    "numpy": {"fromfile", "load", "loadtxt", "genfromtxt", "memmap", "fromregex", "datetime64"},
    "numpy.random": {"*"},
    "torch": {"load", "from_file", "initial_seed", "seed", "get_rng_state", "get_num_threads"},
    "torch.serialization": {"load"},
    "torch.hub": {"*"},
    "torch.random": {"initial_seed", "seed", "get_rng_state"},
    "torch.cuda.memory": {"*"},
    "torch.cuda.random": {"*"},
    "torch.cuda": {
        *("get_device_capability", "get_device_properties", "get_device_name", "is_bf16_supported", "current_device"),
        *("memory_allocated", "mem_get_info", "get_arch_list", "initial_seed", "get_rng_state", "is_initialized"),
    },
    "torch.distributed": {"*"},
    "torch.distributed.distributed_c10d": {"*"},
}
# With these a function may reach what no fingerprint follows, or sees what differs between processes.
IMPURE_NAMES = {
    *("__globals__", "__builtins__", "__subclasses__", "__closure__", "f_globals", "f_locals", "f_back", "f_builtins"),
    *("gi_frame", "tb_frame", "cell_contents"),
    "__hash__",
}
# Methods of a path that ask the disk.
OF_DISK = {
    *("absolute", "chmod", "copy", "cwd", "exists", "expanduser", "glob", "group", "hardlink_to", "home", "info"),
    *("is_block_device", "is_char_device", "is_dir", "is_fifo", "is_file", "is_junction", "is_mount", "is_socket"),
    *("is_symlink", "iterdir", "lchmod", "link_to", "lstat", "mkdir", "move", "open", "owner", "read_bytes"),
    *("read_text", "readlink", "rename", "replace", "resolve", "rglob", "rmdir", "samefile", "stat", "symlink_to"),
    *("touch", "unlink", "walk", "write_bytes", "write_text"),
}
# Of transformers, what is another in every process and is in no program: a hash of a text, and the name of a session.
OF_PROCESS = {"_original_object_hash", "SESSION_ID"}
# Builtin functions that read what no fingerprint knows.
IMPURE_BUILTINS = {
    *(
        "__import__",
        "breakpoint",
        "compile",
        "eval",
        "exec",
        "globals",
        "hash",
        "id",
        "input",
        "locals",
        "open",
        "vars",
    ),
}
# With these a function may reach any attribute.
REACHING = {"getattr", "attrgetter", "methodcaller", "__dict__", "__getattribute__", "getattr_static", "dir"}


HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: no class that is static in C has it


class UncacheableError(Exception):
    """A program depends on something of which it is not known whether it is the same in another process."""


def is_impure(module: str, name: str = "") -> bool:
    """Whether a library's module, or a function or class of it, answers differently each time."""
    if module.partition(".")[0].lstrip("_") in IMPURE:
        return True
    functions = _IMPURE_FUNCTIONS.get(module, ())
    return "*" in functions or name in functions


@functools.lru_cache(maxsize=1)
def _library_roots() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), str(Path(torch.__file__).parents[1]), *own_folders()]
    if site.ENABLE_USER_SITE:
        paths.append(site.getusersitepackages())
    roots = {form for path in paths if path for form in (path, os.path.realpath(path))}
    return tuple(f"{root}{os.sep}" for root in roots)


def own_folders() -> list[str]:
    """The folders of shardc's packages."""
    return [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "kernels_triton")]


@functools.lru_cache(maxsize=100_000)
def is_library_file(path: str) -> bool:
    """Whether a file is the standard library's, an installed package's or shardc's own."""
    return path.startswith((*_library_roots(), "<frozen "))


@functools.lru_cache(maxsize=100_000)
def is_own_file(path: str) -> bool:
    return path.startswith(tuple(f"{folder}{os.sep}" for folder in own_folders()))


def is_library_module(module: ModuleType | None) -> bool:
    """Whether a module is of a library, or built into Python."""
    if module is None:
        return False
    path = getattr(module, "__file__", None)
    if path is None and (folders := getattr(module, "__path__", None)) is not None:  # a package without __init__
        return all(is_library_file(os.path.join(folder, "")) for folder in folders)
    if path is None:
        return module.__name__ in sys.builtin_module_names or module.__name__.partition(".")[0] == "torch"
    return is_library_file(path)


def is_library_code(function: FunctionType) -> bool:
    """Whether a library wrote a function: by its file, or, of code that was made of text, by its module."""
    path = function.__code__.co_filename
    if not path.startswith("<") or path.startswith("<frozen "):
        return is_library_file(path)
    return is_library_module(sys.modules.get(function.__globals__.get("__name__", "")))


def is_library_class(cls: type) -> bool:
    """Of a module of C that is in no list of modules, the package decides."""
    name = cls.__module__
    while name not in sys.modules and "." in name:
        name = name.rpartition(".")[0]
    return name in sys.builtin_module_names or is_library_module(sys.modules.get(name))


def is_written_in_python(cls: type) -> bool:
    """Whether a class adds nothing to its objects but attributes and slots: classes of C have memory of their own."""
    module = sys.modules.get(cls.__module__)
    path = getattr(module, "__file__", None) or ""
    is_source = path.endswith(".py") or (module is not None and not path and module.__name__ == "__main__")
    slots = cls.__dict__.get("__slots__", ())
    count = 1 if isinstance(slots, str) else len(tuple(slots))
    added = cls.__basicsize__ - (cls.__base__ or object).__basicsize__
    return is_source and bool(cls.__flags__ & HEAP_TYPE) and added <= 8 * (2 + count)


def codes_of(code: CodeType) -> list[CodeType]:
    """A code object and those inside it."""
    inner = [one for const in code.co_consts if isinstance(const, CodeType) for one in codes_of(const)]
    return [code, *inner]


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The functions of a class's attribute: a method, a property's, a decorated one's."""
    if isinstance(value, FunctionType):
        yield value
    elif isinstance(value, staticmethod | classmethod | MethodType):
        yield from functions_in(value.__func__)
    elif isinstance(value, property):
        for part in (value.fget, value.fset, value.fdel):
            yield from functions_in(part)
    elif isinstance(value, functools.cached_property):
        yield from functions_in(value.func)
    elif isinstance(value, CACHE):
        yield from functions_in(value.__wrapped__)
