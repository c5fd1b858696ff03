"""Tables of measured schedules, one for each GPU: where they are looked up, and for which GPU they hold.

A table is a YAML file that `shardc tune` wrote. Its `device` is the GPU's name as CUDA reports it. The file's name does
not matter. The first table for this GPU is used, in this order:

    $SHARDC_TABLES            files, or folders of them
    kernels_triton/schedules  of this package

A GPU without a table uses schedules from sizes (kernels_triton.launch.row_schedule).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from kernels_triton.base.diagnostic import ShardcError, error

VARIABLE = "SHARDC_TABLES"
PACKAGED = Path(__file__).parents[1] / "schedules"


# Of each number of a schedule: the most it may be, and whether it is a power of two.
RANGES: dict[str, tuple[int, bool]] = {
    "block": (1 << 16, True), "chunks": (1 << 16, False), "rows": (1 << 10, True), "warps": (32, True),
    "stages": (16, False), "waves": (1 << 10, False), "registers": (255, False), "again": (1, False),
}  # fmt: skip


@cache
def schedules(device: str) -> dict[str, Any]:
    """For each kernel the entries of this GPU's table; empty if there is no table.

    Raises SC533 if $SHARDC_TABLES names a missing path, or a file is not a table.
    """
    for path in _files():
        table = _read(path)
        if table["device"] == device:
            return table["schedules"] or {}
    return {}


def _files() -> Iterator[Path]:
    for text in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        path = Path(text)
        if not path.exists():
            hint = f"name a table that `shardc tune -o FILE` wrote, or a folder of such, in {VARIABLE}"
            raise _error(f"{VARIABLE} names '{path}', which does not exist", hint)
        yield from _tables_in(path) if path.is_dir() else (path,)
    yield from _tables_in(PACKAGED)


def _tables_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.yaml"))


def _read(path: Path) -> dict[str, Any]:
    hint = "`shardc tune -o FILE` writes one"
    try:
        loaded: object = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as why:
        line = "" if why.problem_mark is None else f":{why.problem_mark.line + 1}"
        raise _error(f"'{path}{line}' is no YAML: {why.problem}", hint) from why
    except Exception as why:  # of the file, of UTF-8, of nesting, of values that YAML takes for dates
        raise _error(f"'{path}' cannot be read as a table of kernels' schedules: {why}", hint) from why
    if not isinstance(loaded, dict) or not {"device", "schedules"} <= cast(dict[str, Any], loaded).keys():
        raise _error(f"'{path}' is no table of kernels' schedules: it has no device or no schedules", hint)
    table = cast(dict[str, Any], loaded)
    if (problem := _problem_of(table["device"], table["schedules"])) is not None:
        raise _error(f"'{path}' is no table of kernels' schedules: {problem}", hint)
    return table


def _problem_of(device: object, kernels: Any) -> str | None:
    """What a table says that is no schedule: a launch takes each number as it stands."""
    if not isinstance(device, str):
        return f"its device is {device!r}, no name"
    if kernels is None:
        return None
    if not isinstance(kernels, dict):
        return "its schedules are no mapping from kernels"
    for kernel, entries in cast(dict[object, Any], kernels).items():
        if not isinstance(kernel, str) or not isinstance(entries, list):
            return f"what it says of {kernel!r} is no list of entries"
        for entry in cast(list[Any], entries):
            if not _is_entry(entry):
                return f"an entry of {kernel} is none: {str(entry)[:80]}"
    return None


def _is_entry(entry: Any) -> bool:
    """A range of columns, the bytes of an element, and numbers that a schedule has."""
    if not isinstance(entry, dict) or not {"cols", "bytes", "schedule"} <= cast(dict[str, Any], entry).keys():
        return False
    cols, schedule = entry["cols"], entry["schedule"]
    if not isinstance(cols, list) or len(cast(list[Any], cols)) != 2 or not isinstance(schedule, dict):
        return False
    numbers = [*cast(list[Any], cols), entry["bytes"]]
    fields = cast(dict[str, Any], schedule)
    return all(_is_count(n) for n in numbers) and all(
        key in RANGES and (type(n) is bool if key == "again" else _is_count(n) and _fits(n, *RANGES[key]))
        for key, n in fields.items()
    )


def _is_count(n: object) -> bool:
    return type(n) is int and 0 <= n < 1 << 31


def _fits(n: int, most: int, power: bool) -> bool:
    return n <= most and not (power and (n < 1 or n & (n - 1)))


def _error(text: str, hint: str) -> ShardcError:
    return error("SC533", text, hint=hint)
