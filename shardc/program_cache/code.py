"""What functions and classes do, as a fingerprint: their code in memory, and all that it reads.

    def forward(self, x): return scaled(x) * LIMIT      the instructions; what `scaled` does; LIMIT's value

The code in memory counts, not the file alone, which somebody may have edited since. The file counts too, since programs
quote its lines. A method that no live code names counts with what it reads too, for a library may call it; where that
has no stable content, as of a `save` that opens files, the method is `unknown`: a program is kept only if no trace ran
it (`witness`). Of libraries, code is pinned by their versions (`libraries`); what a user put into them in the place of
their own functions counts as the user's.
"""

from __future__ import annotations

import builtins
import dis
import functools
import linecache
import sys
from collections import deque
from collections.abc import Collection, Iterable
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from shardc.program_cache.fingerprint import Fingerprint
from shardc.program_cache.libraries import Libraries
from shardc.program_cache.origins import (
    IMPURE_BUILTINS,
    IMPURE_NAMES,
    REACHING,
    UncacheableError,
    codes_of,
    functions_in,
    is_impure,
    is_library_class,
    is_library_code,
    is_library_module,
)
from shardc.torch_compat import is_op

_UNREAD = {
    *("__dict__", "__weakref__", "__annotations__", "__abstractmethods__", "_abc_impl", "__slots__", "__doc__"),
    *("__dataclass_fields__", "__dataclass_params__", "__parameters__", "__orig_bases__"),
    *("__module__", "__qualname__", "__firstlineno__", "__static_attributes__", "__classcell__"),
    *("__annotate__", "__annotate_func__", "__annotations_cache__"),
    "_autograd_function_id",  # the next number of a process
}
# What pydantic computes of a class's fields and methods, which count.
_OF_PYDANTIC = {
    *("__pydantic_validator__", "__pydantic_serializer__", "__pydantic_core_schema__", "__pydantic_decorators__"),
    *("__pydantic_parent_namespace__", "__pydantic_setattr_handlers__", "__signature__"),
}
_SET = "the order of a set"
_OF_MODULES = {"__builtins__", "__cached__", "__doc__", "__file__", "__loader__", "__spec__", "__path__"}


class Code:
    """A fingerprint with the code that its values refer to; `forms` are those of `Fingerprint`. `constructors`: are
    modules made anew while compiling?"""

    def __init__(self, forms: Collection[int] = (), *, constructors: bool = False) -> None:
        self.fingerprint = Fingerprint(self.refer, forms)
        self.libraries = Libraries(self.fingerprint, self.refer)
        self.files: set[str] = set()  # of users, whose contents count
        self.unknown: dict[int, FunctionType] = {}  # methods that no live code names, and whose reads are not known
        self._constructors = constructors
        self._numbers: dict[int, tuple[int, object]] = {}
        self._todo: deque[tuple[Any, bool]] = deque()
        self._is_idle = False  # is what is met read by methods alone that no live code names?
        self._live: set[int] = set()
        self._names: dict[str, None] = {}  # that live code speaks of
        self._idle: dict[str, list[FunctionType]] = {}  # methods that no live code has named, by their names
        self._modules: dict[tuple[int, str], None] = {}  # names of modules that were looked at
        self._held: dict[int, ModuleType] = {}  # any live code may take a name of these
        self._unreadable: dict[int, UncacheableError] = {}  # modules that `getattr` may take anything of

    def refer(self, value: Any) -> None:
        """Write a function, a class or a module down, and queue what it does. Raises UncacheableError for a class whose
        objects are something else each time, and for a function of a library that returns something else."""
        if isinstance(value, type) and is_impure(value.__module__, value.__qualname__):
            raise self.fingerprint.refusal(value, f"is {value.__module__}.{value.__qualname__}, of clocks or files")
        if isinstance(value, FunctionType) and is_library_code(value):
            module = str(value.__globals__.get("__name__", ""))
            if is_impure(module, value.__qualname__):
                raise UncacheableError(f"{module}.{value.__qualname__} may return something else each time")
        known = self._numbers.get(id(value))
        if known is not None:
            self.fingerprint.token("known", known[0])
            return
        self._numbers[id(value)] = (len(self._numbers), value)
        self.fingerprint.token(type(value).__name__, value.__name__, getattr(value, "__qualname__", ""))
        self._todo.append((value, self._is_idle))

    def finish(self) -> str:
        """The digest, once all that was referred to is written down."""
        self.libraries.patched_torch()
        self._all()
        named, idle = [*self._names], list[FunctionType]()
        while self._idle:
            name = next(iter(self._idle))
            for function in self._idle.pop(name):
                self.fingerprint.token("idle", name)
                self._unnamed(function)
                idle.append(function)
            self._all()
        self.fingerprint.refuse_orders(named)
        for function in idle:
            try:
                self.fingerprint.refuse_orders((*_names_of(function.__code__)[0], *function.__code__.co_freevars))
            except UncacheableError:
                self.unknown[id(function)] = function
        self.libraries.count_files()
        for path in sorted(self.files):
            self.fingerprint.token(path, _text_of(path))
        return self.fingerprint.digest

    def _all(self) -> None:
        while self._todo or self.libraries.pending:
            if self._todo:
                self._one(*self._todo.popleft())
            else:
                self.libraries.next()

    def _one(self, value: Any, idle: bool) -> None:
        self.fingerprint.token("of", self._numbers[id(value)][0])
        if isinstance(value, FunctionType):
            self._unnamed(value) if idle else self._function(value)
            return
        self._is_idle = idle
        self._class(value) if isinstance(value, type) else self._hold(value)
        self._is_idle = False

    def _unnamed(self, function: FunctionType) -> None:
        """A function that runs only if a library calls it, or another such."""
        tables: tuple[dict[Any, Any], ...] = (self._modules, self._names, self._held)
        mark, sizes, self._is_idle = self.fingerprint.mark(), [*map(len, tables)], True
        try:
            self._function(function)
        except UncacheableError:
            self.unknown[id(function)] = function
            self.fingerprint.token("unknown")
            self.fingerprint.forget(mark)  # the next that reads such a value, or such a name, is refused too
            for table, size in zip(tables, sizes, strict=True):
                while len(table) > size:
                    table.popitem()
        self._is_idle = False

    # ------------------------------------------------------------------ functions
    def _function(self, function: FunctionType) -> None:
        if is_library_code(function):
            self.libraries.refer(str(function.__globals__.get("__name__", "")))
            self.libraries.form(function)
            for cell in function.__closure__ or ():  # of a library's decorator: the user's function within
                self.fingerprint.add(_content(cell), function.__qualname__)
            if "__wrapped__" in vars(function):
                self.fingerprint.add(vars(function)["__wrapped__"])
            return
        self._idly(function)
        self._lively(function)

    def _idly(self, function: FunctionType) -> None:
        """The instructions of a function."""
        for code in codes_of(function.__code__):
            self._instructions(code)

    def _instructions(self, code: CodeType) -> None:
        token = self.fingerprint.token
        if not code.co_filename.startswith("<"):
            self.files.add(code.co_filename)
        token(code.co_qualname, code.co_filename, code.co_firstlineno, code.co_flags, code.co_argcount)
        token(code.co_posonlyargcount, code.co_kwonlyargcount, code.co_code.hex(), code.co_linetable.hex())
        token(code.co_exceptiontable.hex(), code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
        for const in code.co_consts:
            if isinstance(const, frozenset):
                token("set", sorted(map(repr, const)))
            elif not isinstance(const, CodeType):
                token(repr(const))
        if code.co_filename.startswith("<"):
            token(linecache.getlines(code.co_filename))

    def _lively(self, function: FunctionType) -> None:
        """What a function reads: defaults, variables around it, globals, and methods of the names in it."""
        if id(function) in self._live:
            return
        self._live.add(id(function))
        self._numbers.setdefault(id(function), (len(self._numbers), function))
        add, token = self.fingerprint.add, self.fingerprint.token
        label = function.__qualname__
        add(function.__defaults__, label)
        add(function.__kwdefaults__, label)
        add(vars(function) or None, label)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            token("cell", name)
            add(_content(cell), f"{label}.{name}")
        names, read = _names_of(function.__code__)
        is_hash = function.__code__.co_name == "__hash__"
        if refused := IMPURE_NAMES.intersection(names) - ({"__hash__"} if is_hash else set()):
            raise UncacheableError(f"{label} asks for {min(refused)}, which leads anywhere")
        for name in read:
            if not (is_hash and name == "hash"):  # whose result is seen by those alone who ask for a hash
                self._global(function, name, label, names)
        self._speak((*names, *function.__code__.co_freevars))

    def _global(self, function: FunctionType, name: str, label: str, names: Iterable[str]) -> None:
        variables = function.__globals__
        self.fingerprint.token("global", name)
        if name == _SET:
            raise UncacheableError(f"{label} goes through a set, whose order differs between processes")
        if name.startswith("import "):
            module, _, taken = name.removeprefix("import ").partition(" ")
            if module not in sys.modules or module.startswith("."):
                raise UncacheableError(f"{label} imports '{module}', of which nothing is known before it runs")
            if taken and not is_library_module(sys.modules[module]) and taken not in vars(sys.modules[module]):
                raise UncacheableError(f"{label} imports '{module}.{taken}', of which nothing is known before it runs")
            self._module(sys.modules[module], names)
        elif name in variables:
            value = variables[name]
            if isinstance(value, ModuleType):
                self._module(value, names, whole=not REACHING.isdisjoint(names))
            else:
                self.fingerprint.add(value, f"{label}: {name}")
        elif name in IMPURE_BUILTINS and hasattr(builtins, name):
            raise UncacheableError(f"{label} calls {name}(), which may return something else each time")
        elif hasattr(builtins, name):
            builtin = getattr(builtins, name)
            if isinstance(builtin, FunctionType):  # somebody's
                self.refer(builtin)

    def _speak(self, names: Iterable[str]) -> None:
        """Methods of these names may run."""
        fresh = [name for name in names if name not in self._names]
        self._names.update(dict.fromkeys(fresh))
        for module in list(self._held.values()) if fresh else ():
            self._module(module, fresh, whole=not REACHING.isdisjoint(fresh))
        if self._is_idle:
            return  # each idle method has its turn
        if any(name in REACHING for name in fresh):
            self._names.update(dict.fromkeys(REACHING))
            fresh = [*self._idle]
        for name in fresh:
            for function in self._idle.pop(name, ()):
                self.fingerprint.token("method", name)
                self._lively(function)

    # ------------------------------------------------------------------ classes
    def _class(self, cls: type) -> None:
        if is_library_class(cls):
            self.libraries.refer(cls.__module__)
            self.fingerprint.token(cls.__module__)
            self.libraries.patched(cls)
        for base in cls.__mro__[1:]:
            self.refer(base)
        if type(cls) is not type:
            self.refer(type(cls))
        if is_library_class(cls):
            return
        self._refuse_compiled(sys.modules.get(cls.__module__))
        self.fingerprint.token(cls.__module__)
        for name, value in vars(cls).items():
            if name in _UNREAD or (name in _OF_PYDANTIC and type(cls).__module__.startswith("pydantic.")):
                continue
            self.fingerprint.token(name)
            functions = list(functions_in(value))
            for function in functions:
                self._method(cls, name, function)
            if not functions:
                self.fingerprint.add(value, f"{cls.__qualname__}.{name}")

    def _method(self, cls: type, name: str, function: FunctionType) -> None:
        if is_library_code(function):
            if name != "__hash__":  # which nobody sees the result of
                self.refer(function)
            return
        self._idly(function)
        if not self._is_idle and self._may_run(cls, name):
            self._lively(function)
        else:
            self._idle.setdefault(name, []).append(function)

    def _may_run(self, cls: type, name: str) -> bool:
        """Whether live code, or a library, may call a method of this name."""
        if name == "__init__" and issubclass(cls, nn.Module):
            return self._constructors
        called = name in self._names or (name[:2] == "__" == name[-2:]) or "getattr" in self._names
        bases = (base for base in cls.__mro__[1:] if base is not object and is_library_class(base))
        return called or any(name in vars(base) for base in bases)

    # ------------------------------------------------------------------ modules
    def _hold(self, module: ModuleType) -> None:
        """A module that is a value, of which any live code may take a name."""
        if id(module) not in self._held:
            self._held[id(module)] = module
            self._module(module, list(self._names), whole=not REACHING.isdisjoint(self._names))

    def _module(self, module: ModuleType, names: Iterable[str], *, whole: bool = False) -> None:
        """What code takes of a module, where it names these; or any of a user's, as `getattr` may."""
        self.fingerprint.token("module", module.__name__)
        if is_impure(module.__name__):
            raise UncacheableError(f"a function reads the module '{module.__name__}', which may answer otherwise later")
        if module.__name__.startswith("torch.ops"):
            for name in names:
                if isinstance(value := vars(module).get(name), ModuleType):
                    self._module(value, names)
                elif value is not None and is_op(value):
                    self.fingerprint.op(value)
            return
        if library := is_library_module(module):
            self.libraries.refer(module.__name__)
        else:
            self._refuse_compiled(module)
            if type(module) is not ModuleType:
                raise UncacheableError(f"the module '{module.__name__}' is of a class of its own")
            if id(module) in self._unreadable:
                raise self._unreadable[id(module)]
            names = [*names, "__getattr__"]
            self._hold(module)
        for name, value in self._fresh(module, names):
            if library and is_impure(module.__name__, name):
                raise UncacheableError(f"{module.__name__}.{name} may return something else each time")
            if isinstance(value, ModuleType):
                self._module(value, names)
            elif not library or isinstance(value, FunctionType | type):
                self.fingerprint.token(name)
                self.fingerprint.add(value, f"{module.__name__}.{name}")
        if whole and not library:
            self._rest(module)

    def _rest(self, module: ModuleType) -> None:
        """What nothing names of a user's module, from which `getattr` may take it."""
        was_idle, self._is_idle = self._is_idle, True
        for name, value in self._fresh(module, [*vars(module)]):
            if isinstance(value, ModuleType) or name in _OF_MODULES:
                continue
            self.fingerprint.token(name)
            try:
                self.fingerprint.add(value, f"{module.__name__}.{name}")
            except UncacheableError as refusal:
                self._unreadable[id(module)] = refusal
                raise
        self._is_idle = was_idle

    def _fresh(self, module: ModuleType, names: Iterable[str]) -> list[tuple[str, Any]]:
        """What a module has under these names and was not looked at before."""
        fresh = [name for name in names if name in vars(module) and (id(module), name) not in self._modules]
        self._modules.update(dict.fromkeys((id(module), name) for name in fresh))
        return [(name, vars(module)[name]) for name in dict.fromkeys(fresh)]

    def _refuse_compiled(self, module: ModuleType | None) -> None:
        """Let a user's module count with its file. Raises UncacheableError for one that is no Python source."""
        path = getattr(module, "__file__", None)
        if path is not None and not path.endswith(".py"):
            raise UncacheableError(f"{path} is compiled code of a user's")
        if path is not None:
            self.files.add(path)


@functools.lru_cache(maxsize=4096)
def _names_of(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names and texts in a function's code; and the globals that it reads, "import x" for what it imports, and
    "import x y" for what it takes of that."""
    names: dict[str, None] = {}
    read: dict[str, None] = {}
    for one in codes_of(code):
        names.update(dict.fromkeys(one.co_names))
        names.update(dict.fromkeys(const for const in one.co_consts if isinstance(const, str) and const.isidentifier()))
        level, module = 0, ""
        has_set = False
        for instruction in dis.get_instructions(one):
            if has_set and instruction.opname != "CONTAINS_OP":
                read[_SET] = None
            has_set = instruction.opname == "LOAD_CONST" and isinstance(instruction.argval, frozenset)
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"):
                read[str(instruction.argval)] = None
            elif instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and type(instruction.argval) is int:
                level = instruction.argval
            elif instruction.opname == "IMPORT_NAME":
                module = f"import {'.' * level}{instruction.argval}"
                read[module] = None
                level = 0
            elif instruction.opname == "IMPORT_FROM":
                read[f"{module} {instruction.argval}"] = None
    return tuple(names), tuple(read)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


def _text_of(path: str) -> str:
    try:
        return Path(path).read_bytes().hex()
    except OSError:
        return "".join(linecache.getlines(path))
