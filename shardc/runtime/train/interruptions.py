"""Signals while a run trains: they end it between steps, where a checkpoint can be saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn


class Interruptions:
    """SIGINT and SIGTERM between steps, not within: what came during one is raised when it is done.

    Only in the main thread, and only where nobody has taken the signal already.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._busy, self._came = False, 0

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number, default_handler in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                if signal.getsignal(number) is default_handler:
                    self._before[number] = signal.signal(number, self._heard)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def later(self) -> Generator[None]:
        """While this is entered, signals wait. A second one does not."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
        if self._came:
            self._end()

    def _heard(self, number: int, _: object) -> None:
        repeated, self._came = bool(self._came), number
        if repeated or not self._busy:
            self._end()

    def _end(self) -> NoReturn:
        number, self._came = self._came, 0
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
