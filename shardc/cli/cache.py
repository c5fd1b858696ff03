"""`shardc cache`: the programs that compiling left on this disk."""

from __future__ import annotations

import time
from dataclasses import asdict

import typer
from rich.table import Table

from shardc.cli.console import out, write_json
from shardc.ir.collectives import human_bytes
from shardc.program_cache.folder import Entry, Folder

_UNITS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))


def cache(*, clear: bool, as_json: bool) -> None:
    folder = Folder.of_environment()
    if isinstance(folder, str):
        if as_json:
            write_json({"folder": None, "reason": folder})
        else:
            typer.echo(folder)
        return
    deleted = folder.clear() if clear else None
    entries, refused = folder.entries(), folder.refused()
    size = sum(entry.size for entry in entries)
    if as_json:
        about = {"folder": str(folder.path), "bytes": size, "limit": folder.limit, "refused": refused}
        write_json({**about, "deleted": deleted, "programs": [asdict(entry) for entry in entries]})
    elif deleted is not None:
        typer.echo(f"{_counted(deleted)} deleted from {folder.path}")
    else:
        typer.echo(
            f"{_counted(len(entries))}, {human_bytes(size)} of at most {human_bytes(folder.limit)}, {folder.path}"
        )
        if why := folder.distrust():
            typer.echo(f"not used: {why}")
        if entries:
            out().print(_table(entries))
        if refused is not None:
            typer.echo(f"last that was not kept: {refused['model']}: {refused['reason']}")


def _counted(count: int) -> str:
    return f"{count} program{'' if count == 1 else 's'}"


def _table(entries: list[Entry]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("model", "mode", "mesh", "size", "last used", "hits"):
        table.add_column(title, justify="right" if title in ("size", "hits") else "left")
    for entry in entries:
        age = f"{_age(time.time() - entry.used)} ago"
        table.add_row(entry.model, entry.mode, entry.mesh, human_bytes(entry.size), age, str(entry.hits))
    return table


def _age(seconds: float) -> str:
    """In the largest unit of which it is at least one."""
    size, unit = next((pair for pair in _UNITS if seconds >= pair[0]), _UNITS[-1])
    return f"{max(0.0, seconds) / size:.0f} {unit}"
