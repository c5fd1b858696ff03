"""`shardc lock`: write a lockfile, or compare a program with one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from shardc.cli.commands import MISMATCH, Asked, compiled
from shardc.cli.console import diagnose, for_terminal, write_json
from shardc.explain.lock_report import Change, LockReport
from shardc.explain.lockfile import AMOUNTS, Lock
from shardc.ir.diagnostic import error


def lock(
    asked: Asked, path: Path, *, hardware: str | None, check: bool, tolerance: Sequence[str], as_json: bool
) -> None:
    """Exits with 1 where `check` finds that the program costs more than its lockfile allows."""
    if tolerance and not check:
        raise error("SC105", "--tolerance is of a comparison", hint="write --check beside it, or leave it out")
    shares = _shares(tolerance)
    before = Lock.read(path) if check else None
    program, _ = compiled(asked, meta=True)
    diagnose(program.diagnostics)
    if before is None:
        locked = program.lock(hardware)
        locked.write(path)
        if as_json:
            write_json({"written": str(path), "amounts": {".".join(key): n for key, n in locked.amounts().items()}})
        else:
            typer.echo(f"written to {path}: {len(locked.facts)} facts")
        return
    report = program.check(before, hardware, tolerance=shares, origin=str(path))
    if as_json:
        write_json(_plain(report))
    else:
        typer.echo(for_terminal(str(report)))
    if not report.ok:
        raise typer.Exit(MISMATCH)


def _shares(texts: Sequence[str]) -> dict[str, float]:
    """`0.01` is of all kinds, `memory=0.02` of one, which counts before the other."""
    of_all, of_kind = dict[str, float](), dict[str, float]()
    for text in texts:
        kind, equals, share = text.rpartition("=")
        try:
            number = float(share)
        except ValueError:
            number = math.nan
        if not number >= 0 or bool(kind) != bool(equals):
            hint = "write --tolerance 0.01 for one percent of everything, or --tolerance memory=0.02"
            raise error("SC105", f"--tolerance {text} is no share", hint=hint)
        if equals:
            of_kind[kind] = number
        else:
            of_all = dict.fromkeys(AMOUNTS, number)
    return of_all | of_kind


def _plain(report: LockReport) -> dict[str, Any]:
    def change(one: Change) -> dict[str, Any]:
        places = [
            {"module": p.module, "more": p.change, "values": [r._asdict() for r in p.reasons]} for p in one.places
        ]
        return {"fact": ".".join(one.key), "before": one.before, "after": one.after, "places": places}

    return {
        "ok": report.ok,
        "worse": [change(one) for one in report.worse],
        "better": [change(one) for one in report.better],
        "notes": list(report.notes),
    }
