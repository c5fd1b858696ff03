"""Functions whose calls are noted: other code is put in their place, which notes a call and makes it.

    watch_calls(Net.save, note)     from now on Net.save(path) calls note(), and does what it did
    really(Net.save).__code__       its own code, for whoever reads what functions do
    stop_watching(Net.save)

A tracer (`sys.settrace`) would see the same, and make all of a compile four times slower. Whoever reads `__code__`
elsewhere has to be told of first, by an audit hook that stops watching.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

_CALL = "the function to call"
_TWINS: dict[int, tuple[FunctionType, FunctionType]] = {}  # by a function's id: itself, and one with its own code


def watch_calls(function: FunctionType, note: Callable[[], None]) -> None:
    """Call `note` before each call of a function."""
    twin = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__

    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return twin(*args, **kwargs)

    # Python demands as many free variables as the code has in whose place it is put.
    code = _caller(len(function.__closure__ or ()))
    code = code.replace(co_consts=tuple(call if const == _CALL else const for const in code.co_consts))
    _TWINS[id(function)] = function, twin
    function.__code__ = code


def stop_watching(function: FunctionType) -> None:
    _, twin = _TWINS.pop(id(function))
    function.__code__ = twin.__code__


def really(function: FunctionType) -> FunctionType:
    """What runs where a function is called: itself, or one like it while its calls are watched."""
    return _TWINS.get(id(function), (function, function))[1]


@functools.lru_cache(maxsize=64)
def _caller(closure: int) -> CodeType:
    """Code that calls a constant with all that it is given."""
    names = ", ".join(f"free{i}" for i in range(closure))
    lines = (
        f"def around({names}):",
        "    def watched(*args, **kwargs):",
        f"        call = {_CALL!r}",
        "        return call(*args, **kwargs)",
        f"        ({names})",  # is never run, and makes them free
    )
    module = compile("\n".join(lines), __file__, "exec", dont_inherit=True)
    return _code_in(_code_in(module))


def _code_in(code: CodeType) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType))
