"""Wakes a sleeping thread: to stop it, and on SIGTERM, also while the main thread is blocked in a collective.

torchrun ends the survivors of a dead rank with SIGTERM. Python runs signal handlers only in the main thread, between
two bytecodes, and so never while that thread waits in C++. But the interpreter's C handler writes the signal's number
to a file descriptor at once. Here that is a pipe, which another thread reads.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import threading

STOP = 0  # no signal has this number
_wakes = False  # signals write to a pipe of this process


def on_sigterm(*_: object) -> None:
    """The Python handler does nothing: the byte in the pipe carries the signal."""


def _restore_in_child() -> None:
    """Restore the default in a forked child (a data loader): SIGTERM ends it, and does not wake its parent's thread."""
    global _wakes
    if _wakes:
        _wakes = False
        signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGTERM) is on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_restore_in_child)


class SignalWakeup:
    """Handles SIGTERM unless the program has a handler of its own."""

    def __init__(self) -> None:
        global _wakes
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._owns_signal = False
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if previous != -1:  # an event loop's
                signal.set_wakeup_fd(previous)
                return
            signal.signal(signal.SIGTERM, on_sigterm)
            self._owns_signal = _wakes = True

    def wait(self, seconds: float) -> bytes:
        """The signal numbers received since the last call; empty after a timeout."""
        return os.read(self._read, 512) if self._selector.select(seconds) else b""

    def stop(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the pipe is full: a wake-up is already pending
            os.write(self._write, bytes([STOP]))

    def close(self) -> None:
        """Restore SIGTERM's default handler. No thread may be waiting any more."""
        global _wakes
        if self._owns_signal and threading.current_thread() is threading.main_thread():
            _wakes = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        self._selector.close()
        os.close(self._read)
        os.close(self._write)
