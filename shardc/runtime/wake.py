"""A bell that a thread sleeps by: rung to stop it, and by SIGTERM, also while the main thread sits in a collective.

torchrun ends the survivors of a dead rank with SIGTERM, and Python runs signal handlers in the main thread alone,
between two bytecodes: never, while that thread waits in C++. But the interpreter's own C handler writes the signal's
number to a file descriptor at once, and that can be a pipe which another thread reads.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading

STOP = 0  # no signal has this number


def _rung(*_: object) -> None:
    """The handler proper: the byte in the pipe has said it all."""


def _forget() -> None:
    """A forked child (a data loader's) ends on SIGTERM as ever, and does not ring its parent's bell."""
    if signal.getsignal(signal.SIGTERM) is _rung:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget)


class Bell:
    """Takes over SIGTERM where nobody else has: a program with a handler of its own keeps it."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._owns_signal = False
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if before != -1:  # an event loop's
                signal.set_wakeup_fd(before)
                return
            signal.signal(signal.SIGTERM, _rung)
            self._owns_signal = True

    def wait(self, seconds: float) -> bytes:
        """The numbers of what has rung since; empty if nothing did for so long."""
        return os.read(self._read, 512) if self._selector.select(seconds) else b""

    def stop(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it rings already
            os.write(self._write, bytes([STOP]))

    def close(self) -> None:
        """Give SIGTERM back; only once no thread waits any more."""
        if self._owns_signal and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._read)
        os.close(self._write)
