"""Measurements as rows of a JSON-lines file, which a fit reads: one object a line, told apart by `kind`.

    {"kind": "machine", "device": "cuda", "world": 4, "units": 132}
    {"kind": "collective", "op": "all_reduce", "group": 4, "bytes": 4096, "us": 36.3, "graph": false}
    {"kind": "product", "dtype": "bfloat16", "batch": 1, "rows": 4096, "columns": 4096, "depth": 4096, "us": 197.0}

Rows of other kinds are left alone: a file may have whole steps beside them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from shardc.ir.diagnostic import error

Row = Mapping[str, Any]
# What a fit reads of each kind. Numbers are positive.
NEEDED: Mapping[str, str] = {
    "machine": "device world units",
    "collective": "op group bytes us graph",
    "attention": "backend mb heads sequence width fwd_ms fwd_bwd_ms",
    "ceiling": "how mib ms",
    "product": "dtype batch rows columns depth us",
    "launch": "what us",
    "contention": "what alone_us beside_us",
    "element": "op elements us",
    "call": "moved first_us later_us",
    "neighbours": "alone_us beside_us",
    "cores": "what times work_us collective_us both_us",
    "meeting": "computed_us alone_us together_us",
}
TEXTS, FLAGS = {"device", "op", "backend", "how", "dtype", "what"}, {"graph"}
WHOLE = {"moved", "times", "world", "units", "group", "elements", "batch", "rows", "columns", "depth"}


def read_rows(path: Path) -> list[Row]:
    """The rows of a file. Raises ShardcError (SC208), with the line, where one is none, or lacks what a fit reads."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as why:
        hint = "give the path of a file of JSON lines, such as benchmarks/measurements/h200.jsonl"
        raise error("SC208", f"no measurements can be read: {why}", location=str(path), hint=hint) from None
    rows = [_row(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not any(row["kind"] in NEEDED and row["kind"] != "machine" for row in rows):
        hint = f"kinds: {', '.join(NEEDED)}"
        raise error("SC208", "the file has no measurement of a kind that is read", location=str(path), hint=hint)
    return rows


def _row(line: str, where: str) -> Row:
    hint = 'a line is a JSON object with a "kind", and what that kind has'
    try:
        row: Any = json.loads(line)
    except ValueError as why:
        raise error("SC208", f"not JSON: {why}", location=where, source_text=line[:120], hint=hint) from None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        raise error("SC208", "a measurement without a kind", location=where, source_text=line[:120], hint=hint)
    for key in NEEDED.get(row["kind"], "").split():
        value: Any = row.get(key)
        if key in TEXTS:
            fits, kind = isinstance(value, str), "text"
        elif key in FLAGS:
            fits, kind = isinstance(value, bool), "true or false"
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            fits, kind = is_number and 0 < value < 1e18, "a number above 0"
            if key in WHOLE:
                fits, kind = fits and isinstance(value, int), "a whole number above 0"
        if not fits:
            message = f"'{key}' of a {row['kind']} should be {kind}, not {value!r}"
            hint = f"a {row['kind']} has {', '.join(NEEDED[row['kind']].split())}"
            raise error("SC208", message, location=where, source_text=line[:120], hint=hint)
    return cast(Row, row)
