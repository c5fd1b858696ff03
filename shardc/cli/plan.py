"""`shardc plan`: the planner's table, and its plans as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer
from rich.table import Table

from shardc.api import Program
from shardc.cli.console import out, progress, show, write_json
from shardc.cli.optimizers import check_name, make_optimizer
from shardc.cli.targets import load
from shardc.compiler.request import rows_of
from shardc.ir.diagnostic import error
from shardc.planner.autoplan import autoplan
from shardc.planner.ranking import Ranking
from shardc.planner.small_program import elements_a_row


@dataclass(frozen=True)
class Wanted:
    """What the options say."""

    target: str
    gpus: int
    memory: str
    hardware: str
    batch: int | None
    seq: int | None
    keep: Path | None
    precision: str
    reduce: list[str]
    optimizer: str
    top: int
    confirm: int
    out: Path | None


def plan(wanted: Wanted, *, as_json: bool) -> None:
    check_name(wanted.optimizer)
    with progress(f"loading {wanted.target}"):
        target = load(_sized(wanted.target, wanted.batch, wanted.seq), meta=True)
    if isinstance(target, Program):
        hint = "give the model that it was compiled from"
        raise error("SC105", f"{wanted.target} is compiled already, by a plan of its own", hint=hint)
    length = elements_a_row(target.batch)
    if wanted.seq is not None and length not in (1, wanted.seq):
        message = f"the sequences of {wanted.target} have {length} tokens, not {wanted.seq}"
        raise error("SC105", message, hint="leave --seq out, or let the factory make longer ones")
    with progress("planning"):
        ranking = autoplan(
            target.model,
            target.batch,
            gpus=wanted.gpus,
            memory=wanted.memory,
            hardware=wanted.hardware,
            rows=wanted.batch or rows_of(target.batch),
            loss=target.loss,
            optimizer=lambda model: make_optimizer(wanted.optimizer, model, None),
            keep=wanted.keep,
            precision=None if wanted.precision == "none" else wanted.precision,
            reduce=wanted.reduce,
            top=wanted.top,
            confirm=wanted.confirm,
        )
    paths = [] if wanted.out is None else ranking.save(wanted.out)
    if as_json:
        files = {"files": [str(path) for path in paths]} if paths else {}
        write_json({"plans": [p.plain() for p in ranking], "others": [p.plain() for p in ranking.others], **files})
        return
    show(_table(ranking), out())
    typer.echo(f"{ranking.considered:,} candidates, {ranking.compiled} small programs compiled for them")
    typer.echo(f"plan 1: {ranking.best.basis}")
    for note in ranking.notes:
        typer.echo(note)
    for path in paths:
        typer.echo(f"wrote {path}")
    if not paths:
        typer.echo(f"\n{ranking.best.yaml()}", nl=False)


def _sized(target: str, batch: int | None, seq: int | None) -> str:
    """A Hugging Face target whose sequences have so many tokens."""
    if not target.startswith("hf:"):
        return target
    name, _, query = target.partition("?")
    keys = [item for item in query.split("&") if item]
    given = {item.partition("=")[0] for item in keys}
    if seq is not None:
        if "seq" in given:
            raise error("SC105", "the target says a seq, and so does --seq", hint="write one of them")
        keys.append(f"seq={seq}")
    if batch is not None and "batch" not in given:  # rows are made without values, whatever the sample's
        keys.append("batch=1")
    return f"{name}?{'&'.join(keys)}"


def _table(ranking: Ranking) -> list[Table]:
    heading, *rows = ranking.rows()
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(heading):
        table.add_column(name, justify="right" if 5 <= number <= 8 else "left", no_wrap=number != len(heading) - 1)
    for row in rows:
        table.add_row(*row)
    return [table]
