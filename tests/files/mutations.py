"""Files that somebody altered: mutations of plain data and of text, and a watch over what reading them does."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

ODD: tuple[Any, ...] = (None, True, -1, 0, 1 << 70, 0.5, "", "..", "x" * 5000, [], {}, [[]], {"a": {}}, float("nan"))


def mutated(value: Any, draw: random.Random, odd: Sequence[Any] = ODD) -> Any:
    """Plain data with one place of it changed: dropped, doubled, renamed, another type, another number."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        match draw.randrange(4):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, draw.choice(("..", "", "extra", "a/b", f"{key}x")): value[key]}
            case _:
                return {**value, key: mutated(value[key], draw, odd)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        match draw.randrange(3):
            case 0:
                return value[:place] + value[place + 1 :]
            case 1:
                return [*value, value[place]]
            case _:
                return [*value[:place], mutated(value[place], draw, odd), *value[place + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and draw.random() < 0.5:
        return value + draw.choice((-1, 1, 4, -value, 1 << 31))
    return draw.choice(odd)


def mutated_text(text: str, draw: random.Random) -> str:
    """Text with some of its characters, or one of its lines, dropped, doubled or replaced."""
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        place = draw.randrange(len(lines))
        match draw.randrange(4):
            case 0:
                lines.insert(draw.randrange(len(lines) + 1), lines[place])
            case 1:
                lines[place] = " " * draw.randint(1, 4) + lines[place]
            case 2:
                del lines[place]
            case _:
                start = draw.randrange(len(text) + 1)
                inserted = "".join(draw.choice(":{}[]&*!|>%@-,#'\"\\\n\t\0 0é~?tp") for _ in range(draw.randint(0, 3)))
                lines = (text[:start] + inserted + text[start + draw.randint(0, 3) :]).split("\n")
        text = "\n".join(lines)
    return text


PROCESSES = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess", "socket", "pty")
CHANGES = ("os.remove", "os.rename", "os.link", "os.symlink", "os.mkdir", "os.rmdir", "os.truncate", "shutil")
_watches: list[tuple[list[str], bool]] = []


def _hook(name: str, args: tuple[Any, ...]) -> None:
    """Python has no way to take an audit hook back: this one is silent while nobody watches."""
    if not _watches:
        return
    done, reads = _watches[-1]
    writes = name == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    # Importing a module executes its file; what a file brought along comes from text.
    executes = reads and name == "exec" and getattr(args[0], "co_filename", "<").startswith("<")
    imports = executes and args[0].co_filename.startswith("<frozen")
    if writes or (executes and not imports) or name.startswith((*PROCESSES, *CHANGES)):
        done.append(f"{name} {args!r}")


@cache
def _install() -> None:
    """At first use: from then on each `id()` of the process calls the hook."""
    sys.addaudithook(_hook)


@contextmanager
def nothing_done(*, reads: bool = True) -> Generator[None]:
    """Fails if what runs inside opens a file for writing, changes the file system, starts a process or connects; where
    it only `reads`, also if it executes code that no file holds (a compiler does: it writes Python of its own)."""
    _install()
    done: list[str] = []
    _watches.append((done, reads))
    try:
        yield
    finally:
        _watches.pop()
    assert not done, done
