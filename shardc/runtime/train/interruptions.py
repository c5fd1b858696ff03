"""Signals while a run trains: they end it between steps, where a checkpoint can be saved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NoReturn

from shardc.runtime.execute.signal_wakeup import on_sigterm


class Interruptions:
    """SIGINT and SIGTERM between steps, not within: what came during one is raised when it is done.

    Under `together`, of a job's ranks, a signal waits until all ranks have decided on it (`came`), also outside of a
    step. A second one does not wait. Only in the main thread, and only where nobody has taken the signal already.
    """

    def __init__(self, together: bool = False) -> None:
        self._before: dict[int, Any] = {}
        self._process = os.getpid()
        self._busy, self._together = False, together
        self.came = 0  # the number of a signal that waits

    def __enter__(self) -> Interruptions:
        if threading.current_thread() is threading.main_thread():
            for number, default_handlers in (
                (signal.SIGINT, (signal.default_int_handler,)),
                (signal.SIGTERM, (signal.SIG_DFL, on_sigterm)),
            ):
                if signal.getsignal(number) in default_handlers:
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
        if self.came and not self._together:
            self.end(self.came)

    def end(self, number: int) -> NoReturn:
        """Raise what a signal raises by default."""
        self.came = 0
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def _heard(self, number: int, _: object) -> None:
        if os.getpid() != self._process:  # a data loader's, forked while this was entered
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        repeated, self.came = bool(self.came), number
        if repeated or not (self._busy or self._together):
            self.end(number)
