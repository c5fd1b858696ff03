"""A user's module whose values are changed while a process runs, and functions that read it or take it as it is."""

from typing import Any

FACTOR = 2.0
KEYS = ["a"]


class Inner:
    factor = 2.0


def factor_of(module: Any) -> float:
    return module.FACTOR


def by_name(module: Any, name: str) -> float:
    return getattr(module, "FAC" + name)
