"""What a compile does that a key cannot tell beforehand: files that are opened, and methods whose reads are not known.

    torch.load("w.pt") in a library     the file is none that the key depends on: the program is not kept
    `update`, which a library calls     runs, and reads a clock: the program is not kept

An equal key runs equal code, so what a first compile did not do, no other with its key does.

Calls of such methods are watched (`frontend.watched_calls`), whose code nobody else may read meanwhile.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any

from shardc.frontend.watched_calls import stop_watching, watch_calls
from shardc.program_cache.key import Key
from shardc.program_cache.origins import UncacheableError, is_library_file, is_own_file

_OPENING = {"open": "the file", "os.listdir": "the folder", "os.scandir": "the folder"}
_OUTSIDE = {"socket.connect": "a socket", "subprocess.Popen": "another program", "os.system": "another program"}


class Witness:
    """`reason`: the first thing that was done of which the key knows nothing. `has_run`: a method that was watched was
    called, or its code looked at."""

    def __init__(self, key: Key) -> None:
        self.reason, self.has_run = "", False
        self._key = key
        self._thread = threading.get_ident()
        self._watched: dict[int, FunctionType] = {}  # by their ids

    @property
    def has_swapped(self) -> bool:
        """Are there methods that had other code while they were watched?"""
        return bool(self._key.unknown)

    def check(self) -> None:
        """Raises UncacheableError where something was seen."""
        if self.reason:
            raise UncacheableError(self.reason)

    @contextmanager
    def watching(self) -> Generator[None]:
        _listen()
        _WATCHING.append(self)
        try:
            for function in self._key.unknown:
                watch_calls(function, functools.partial(self._note_call, function))
                self._watched[id(function)] = function
            yield
        finally:
            _WATCHING.remove(self)
            while self._watched:
                stop_watching(self._watched.popitem()[1])

    def _note_call(self, function: FunctionType) -> None:
        if threading.get_ident() == self._thread:
            self._note(function, "is run")

    def _note(self, function: FunctionType, what: str) -> None:
        self.has_run = True
        self.reason = self.reason or f"{function.__qualname__} {what}, and reads what is not known"

    def looked_at(self, value: object) -> None:
        """Somebody is about to read a function's code, and must be given its own."""
        if (function := self._watched.pop(id(value), None)) is not None:
            stop_watching(function)
            self._note(function, "is looked at")

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An event of Python's audit: of this thread, and not of shardc's own code, whose reads the key knows."""
        if self.reason or threading.get_ident() != self._thread:
            return
        if event in _OUTSIDE:
            self.reason = f"{_OUTSIDE[event]} is asked while compiling"
            return
        try:
            path = os.path.abspath(os.fsdecode(arguments[0]))
        except TypeError:  # the number of an open file, or the working folder
            path = "" if arguments[0] is not None else os.getcwd()
        if path in self._key.paths or is_library_file(os.path.join(path, "")) or is_library_file(path):
            return
        frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
        if path != os.devnull and not _is_for_python(path) and not _is_probe(frame) and not _is_own_code(frame):
            self.reason = f"{_OPENING[event]} {path} is read while compiling"


def _is_for_python(path: str) -> bool:
    """Whether imports, tracebacks and questions for an installed package's version read a path."""
    folder, search = os.path.dirname(path), set(map(os.path.abspath, sys.path))
    is_metadata = folder.endswith((".egg-info", ".dist-info")) and os.path.dirname(folder) in search
    return path.endswith((".py", ".pyc")) or path in search or is_metadata


def _is_probe(frame: FrameType) -> bool:
    """Whether Python asks for the first time which folder takes temporary files, by a file that it makes there."""
    return frame.f_code.co_filename == tempfile.__file__ and frame.f_code.co_name == "_get_default_tempdir"


def _is_own_code(frame: FrameType | None) -> bool:
    """Whether shardc's code, and neither a library's nor a user's, asks the standard library for a file."""
    while frame is not None:
        path = frame.f_code.co_filename
        if is_own_file(path):
            return True
        if not path.startswith(("<frozen ", _STANDARD)) or "site-packages" in path:
            return False
        frame = frame.f_back
    return False


def _listen() -> None:
    """A hook of audits cannot be taken away, so there is one, which asks whether anybody watches."""
    if not _LISTENS:
        _LISTENS.append(True)
        sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _WATCHING:
        return
    if event == "object.__getattr__":
        if arguments[1] == "__code__":
            for witness in _WATCHING:
                witness.looked_at(arguments[0])
    elif event in _OPENING or event in _OUTSIDE:
        for witness in _WATCHING:
            witness.heard(event, arguments)


_STANDARD = os.path.dirname(os.__file__) + os.sep
_WATCHING: list[Witness] = []
_LISTENS: list[bool] = []
