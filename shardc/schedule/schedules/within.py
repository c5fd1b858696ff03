"""A call of somebody else's function that has to end."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Ended(BaseException):
    """Raised in the thread of a call whose time is over."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What a call returns, or raises. Raises TimeoutError for one that takes longer; what it computes in Python ends.

    It runs in a thread of its own, which alone can be ended from outside, whichever thread asks.
    """
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="shardc-schedule", daemon=True)
    thread.start()
    try:
        thread.join(seconds)
    finally:
        if thread.is_alive() and thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Ended))
    if results:
        return results[0]
    if failures and not isinstance(failures[0], _Ended):
        raise failures[0]
    raise TimeoutError
