"""Where commands write: tables and progress by `rich`, text and diagnostics plainly, on stdout or stderr."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console, RenderableType

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.files import write_text

QUIET = 1.0  # seconds before progress is shown


def out() -> Console:
    return _console(stderr=False)


def err() -> Console:
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    """Made anew each time, so that it writes to where sys.stdout points now; a pipe is as wide as the text needs."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=200)


def for_terminal(text: str, indent: int = 12) -> str:
    """Text whose lines fit the terminal that stdout is, the second and later lines of one indented; else as it is."""
    console = out()
    if not console.is_terminal:
        return text
    lines: list[str] = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line,
            max(console.width, 2 * indent),
            subsequent_indent=" " * indent,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


def show(parts: Iterable[RenderableType], console: Console) -> None:
    for part in parts:
        console.print(part)


def write(text: str, output: Path | None) -> None:
    """To stdout, or to a file."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_text(output, text)


def write_json(data: Any) -> None:
    """One JSON document on stdout."""
    typer.echo(json.dumps(data, indent=2))


def diagnose(diagnostics: Iterable[Diagnostic]) -> None:
    for diagnostic in diagnostics:
        typer.echo(diagnostic.render(), err=True)


@contextmanager
def progress(doing: str) -> Generator[Callable[[str], None]]:
    """A line on stderr that says what is going on, if it takes long and someone is watching."""
    console = err()
    if not console.is_terminal:
        yield lambda _: None
        return
    status = console.status(doing)
    start = threading.Timer(QUIET, status.start)
    start.daemon = True
    start.start()
    begun = time.monotonic()
    try:
        yield lambda text: status.update(f"{text} ({time.monotonic() - begun:.0f} s in all)")
    finally:
        start.cancel()
        start.join()
        status.stop()
