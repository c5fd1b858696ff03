"""A file of hardware as text: a quantity a line with its source, tables with a line an entry.

link_bytes_per_second: 4.3e+11      # measured: ...
# links: measured: ...
links:
- name: node
  series:
  - {kind: all_reduce, group: 2, seconds: {4096: 2.7e-05, 16384: 2.7e-05}}
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from shardc.ir.hardware import RANGES, TABLES

DIGITS = 4
POINTS = ("seconds", "memory", "first", "later")  # keys of tables by size
COLUMN = 36  # of sources


def hardware_yaml(quantities: Mapping[str, Any], sources: Mapping[str, str], title: Sequence[str] = ()) -> str:
    """The text of a file with these quantities and tables; `shardc.plan.hardware.read_file` reads it."""
    lines = [f"# {line}".rstrip() for line in title]
    if "like" in quantities:
        lines.append(f"like: {quantities['like']}")
    if "device" in quantities:
        lines.append(_with_source(f"device: {quantities['device']}", sources.get("device")))
    lines += [
        _with_source(f"{name}: {_flow(quantities[name])}", sources.get(name)) for name in RANGES if name in quantities
    ]
    for name in TABLES:
        if quantities.get(name):
            lines += _table(name, quantities[name], sources.get(name))
    return "\n".join(lines) + "\n"


def _with_source(line: str, source: str | None) -> str:
    return f"{line:<{COLUMN - 2}}  # {source}" if source else line


def _table(name: str, value: Any, source: str | None) -> Iterator[str]:
    if source:
        yield f"# {name}: {source}"
    if name == "links":
        yield f"{name}:"
        for level in cast(Sequence[Mapping[str, Any]], value):
            rest = {key: part for key, part in level.items() if key != "series"}
            yield from (f"{'  ' if i else '- '}{key}: {_flow(part)}" for i, (key, part) in enumerate(rest.items()))
            if level.get("series"):
                yield "  series:"
                yield from (f"  - {_flow(series)}" for series in level["series"])
    elif isinstance(value, Sequence) and name not in POINTS:
        yield f"{name}:"
        yield from (f"- {_flow(entry)}" for entry in cast(Sequence[object], value))
    else:
        yield f"{name}: {_flow(_sizes(name, value))}"


def _sizes(key: str, value: Any) -> Any:
    return (
        {int(size): seconds for size, seconds in value} if key in POINTS and isinstance(value, (list, tuple)) else value
    )


def _flow(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[str, Any], value).items()
        return "{" + ", ".join(f"{key}: {_flow(_sizes(key, part))}" for key, part in pairs) + "}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "[" + ", ".join(map(_flow, cast(Sequence[object], value))) + "]"
    return f"{value}"


def _number(value: float) -> str:
    """As YAML reads a float: 2.7e-05, with a point."""
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    text = f"{value:.{DIGITS}g}"
    mantissa, e, exponent = text.partition("e")
    return text if not e else f"{mantissa if '.' in mantissa else mantissa + '.0'}e{exponent}"
