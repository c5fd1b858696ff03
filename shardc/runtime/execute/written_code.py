"""Lines of prepared code as one Python function: no loop, no argument lists, no look-ups but those of slots.

    def run(env, monitor, base):
        monitor.counter = base + 12
        env[7] = f3(env[4], env[5])
        env[4] = None
        ...

The monitor's counter says which line failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardc.runtime.execute.call_arguments import CallArguments

Single = int  # the slot of a call's only result
Many = tuple[tuple[int, int], ...]  # (position among the results, slot)
CodeLine = tuple[int, Callable[..., Any], CallArguments, Single | Many, tuple[int, ...]]
WrittenCode = Callable[[list[Any], Any, int], None]
LINES = 400  # of a function: Python compiles short ones faster


class Unwatched:
    """Stands for a monitor where there is none."""

    counter = 0


def write_code(code: Sequence[CodeLine]) -> WrittenCode:
    parts = [_write_part(code[first : first + LINES]) for first in range(0, len(code), LINES)]
    if len(parts) == 1:
        return parts[0]

    def run(env: list[Any], monitor: Any, base: int) -> None:
        for part in parts:
            part(env, monitor, base)

    return run


def _write_part(code: Sequence[CodeLine]) -> WrittenCode:
    names: dict[str, Any] = {}
    name_of: dict[int, str] = {}

    def bind(value: Any) -> str:
        name = name_of.get(id(value))
        if name is None:
            name = name_of[id(value)] = f"k{len(names)}"
            names[name] = value  # kept alive, so that no other object has its id
        return name

    lines = ["def run(env, monitor, base):"]
    counter: int | None = None
    for index, call, arguments, into, free in code:
        if index != counter:
            lines.append(f" monitor.counter = base + {index}")
            counter = index
        result = f"{bind(call)}({arguments.text(bind)})"
        if isinstance(into, int):
            lines.append(f" env[{into}] = {result}")
        elif not into:
            lines.append(f" {result}")
        else:
            lines.append(f" results = {result}")
            lines += [f" env[{slot}] = results[{position}]" for position, slot in into]
            lines.append(" results = None")  # it may have results that nothing reads
        if free:
            lines.append(f" {' = '.join(f'env[{slot}]' for slot in free)} = None")
    lines.append(" return")
    exec(compile("\n".join(lines), "<prepared code>", "exec"), names)
    return names["run"]
