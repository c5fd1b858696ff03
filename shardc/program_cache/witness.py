"""What a compile does that a key cannot tell beforehand: files that are opened, and methods whose reads are not known.

    torch.load("w.pt") in a library     the file is none that the key depends on: the program is not kept
    `update`, which a library calls     runs, and reads a clock: the program is not kept

An equal key runs equal code, so what a first compile did not do, no other with its key does.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardc.program_cache.key import Key
from shardc.program_cache.origins import UncacheableError, is_library_file, is_own_file

_OPENING = {"open": "the file", "os.listdir": "the folder", "os.scandir": "the folder"}
_OUTSIDE = {"socket.connect": "a socket", "subprocess.Popen": "another program", "os.system": "another program"}


class Witness:
    """`reason`: the first thing that was done of which the key knows nothing."""

    def __init__(self, key: Key) -> None:
        self.reason = ""
        self._key = key
        self._thread = threading.get_ident()

    def check(self) -> None:
        """Raises UncacheableError where something was seen."""
        if self.reason:
            raise UncacheableError(self.reason)

    @contextmanager
    def watching(self) -> Generator[None]:
        _listen()
        before = sys.gettrace()
        if self._key.unknown and before is None:
            sys.settrace(self._called)
        elif self._key.unknown:
            self.reason = "a debugger is attached, and a method whose reads are not known may run"
        _WATCHING.append(self)
        try:
            yield
        finally:
            _WATCHING.remove(self)
            if self._key.unknown and before is None:
                sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        if id(frame.f_code) in self._key.unknown and not self.reason:
            self.reason = f"{frame.f_code.co_qualname} is run, and reads what is not known"

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
        if path != os.devnull and not _is_for_python(path) and not _is_own_code(sys._getframe(2)):  # pyright: ignore[reportPrivateUsage]
            self.reason = f"{_OPENING[event]} {path} is read while compiling"


def _is_for_python(path: str) -> bool:
    """Whether imports, tracebacks and questions for an installed package's version read a path."""
    folder, search = os.path.dirname(path), set(map(os.path.abspath, sys.path))
    is_metadata = folder.endswith((".egg-info", ".dist-info")) and os.path.dirname(folder) in search
    return path.endswith((".py", ".pyc")) or path in search or is_metadata


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
    if _WATCHING and (event in _OPENING or event in _OUTSIDE):
        for witness in _WATCHING:
            witness.heard(event, arguments)


_STANDARD = os.path.dirname(os.__file__) + os.sep
_WATCHING: list[Witness] = []
_LISTENS: list[bool] = []
