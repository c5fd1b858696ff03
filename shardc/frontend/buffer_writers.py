"""Whether the code of a module may write to a buffer that another module inside it made."""

from __future__ import annotations

from types import CodeType, FunctionType

INITIALIZERS = ("reset_parameters", "init_weights", "_init_weights")
_LIBRARIES = (
    "torch.",
    *(f"transformers.{name}" for name in ("modeling_utils", "utils.", "integrations.", "distributed.", "generation.")),
)


def may_write(of: type, key: str) -> bool:
    """Whether code of a class around a buffer's owner, or a function beside it that it calls, names the buffer.

    `forward` reads it, and initialisers are run where a value is computed.
    """
    seen: set[FunctionType] = set()
    unread = [f for f in functions_of(of) if f.__name__ not in ("forward", *INITIALIZERS)]
    while unread:
        function = unread.pop()
        if function in seen:
            continue
        seen.add(function)
        names = names_in(function)
        if not names.isdisjoint((key, "setattr", "_buffers")):
            return True
        beside = (function.__globals__.get(name) for name in names)
        unread += [f for f in beside if isinstance(f, FunctionType) and f.__module__ == function.__module__]
    return False


def functions_of(of: type) -> list[FunctionType]:
    """The methods of a class and of its bases, those that torch and transformers have for all models left out."""
    bases = [base for base in of.__mro__ if base is not object and not base.__module__.startswith(_LIBRARIES)]
    return [f for base in bases for f in vars(base).values() if isinstance(f, FunctionType)]


def names_in(function: FunctionType) -> set[str]:
    """The names and strings in a function's code and in functions inside it."""
    names, codes = set[str](), [function.__code__]
    while codes:
        code = codes.pop()
        names |= {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return names
