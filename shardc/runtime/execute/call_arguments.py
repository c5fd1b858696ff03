"""The arguments of a call as a template, which is filled with the values of slots or written as Python.

    add.out(Slot(3), 0.5, out=Slot(1))        env[3], 0.5, out=env[1]

Beside slots a template holds `Viewed`, a view of a slot's tensor, `Made`, a value that is made of all slots, and
`ALL_SLOTS`. Lists, tuples and dicts of a template may hold any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Slot:
    """The value of a slot; called with the values of all slots, it gives its own."""

    number: int

    def __call__(self, env: Sequence[Any]) -> Any:
        return env[self.number]


@dataclass(frozen=True, slots=True)
class Made:
    """What a function makes of the values of all slots, such as a place in a bucket."""

    make: Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Viewed:
    """What a method of a slot's tensor, or of another view, gives."""

    of: Slot | Viewed
    method: str
    args: tuple[Any, ...] = ()


class _AllSlots:
    """The values of all slots."""


ALL_SLOTS = _AllSlots()
_HOLES = (Slot, Made, Viewed, _AllSlots)


@dataclass(frozen=True, slots=True, eq=False)
class CallArguments:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def __call__(self, env: Any) -> tuple[Sequence[Any], dict[str, Any]]:
        return [_filled(arg, env) for arg in self.args], {name: _filled(arg, env) for name, arg in self.kwargs.items()}

    def with_named(self, **kwargs: Any) -> CallArguments:
        return CallArguments(self.args, {**self.kwargs, **kwargs})

    def text(self, bind: Callable[[Any], str]) -> str:
        """The arguments as Python. `bind` gives an object a name."""
        named = (f"{name}={_text(arg, bind)}" for name, arg in self.kwargs.items())
        return ", ".join((*(_text(arg, bind) for arg in self.args), *named))


def place_argument(place: Any) -> Any:
    """A place of a result, a tensor or a function of all slots, as part of a template."""
    return Made(place) if callable(place) and not isinstance(place, Slot) else place


def _has_holes(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_holes, cast("Sequence[Any]", value)))
    if isinstance(value, dict):
        return any(map(_has_holes, cast("dict[Any, Any]", value).values()))
    return isinstance(value, _HOLES)


def _filled(value: Any, env: Any) -> Any:
    if isinstance(value, Slot):
        return env[value.number]
    if isinstance(value, Made):
        return value.make(env)
    if isinstance(value, Viewed):
        return getattr(_filled(value.of, env), value.method)(*value.args)
    if value is ALL_SLOTS:
        return env
    if not _has_holes(value):
        return value
    if isinstance(value, dict):
        return {key: _filled(item, env) for key, item in cast("dict[Any, Any]", value).items()}
    return [_filled(item, env) for item in value]


def _text(value: Any, bind: Callable[[Any], str]) -> str:
    if isinstance(value, Slot):
        return f"env[{value.number}]"
    if isinstance(value, Made):
        return f"{bind(value.make)}(env)"
    if isinstance(value, Viewed):
        return f"{_text(value.of, bind)}.{value.method}({', '.join(_text(arg, bind) for arg in value.args)})"
    if value is ALL_SLOTS:
        return "env"
    if value is None or type(value) in (bool, int):
        return repr(value)
    if not _has_holes(value):
        return bind(value)
    if isinstance(value, dict):
        items = cast("dict[Any, Any]", value).items()
        return f"{{{', '.join(f'{bind(key)}: {_text(item, bind)}' for key, item in items)}}}"
    return f"[{', '.join(_text(item, bind) for item in value)}]"
