"""Whether another process of this machine has ended, as the kernel knows it.

A thread that publishes heartbeats needs Python's lock. A long call that keeps the lock (a compiler's, an extension's)
silences it, and so does a debugger: silence alone does not tell that a process is dead.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class ProcessId(NamedTuple):
    """A process, and the machine and namespace in which `number` counts. `started` tells it from a later process of
    the same number."""

    machine: str
    number: int
    started: str


def this_process() -> ProcessId | None:
    """None where the kernel does not tell (no /proc)."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        number = os.getpid()
        return ProcessId(f"{boot} {os.readlink(PROC / 'self/ns/pid')}", number, _state_and_start(number)[1])
    except OSError:
        return None


def has_ended(process: ProcessId | None, here: ProcessId | None) -> bool | None:
    """Whether a process has ended; None if that cannot be known: it belongs to another machine than `here`."""
    if process is None or here is None or process.machine != here.machine:
        return None
    try:
        state, started = _state_and_start(process.number)
    except FileNotFoundError:
        return True
    except OSError:
        return None
    return state in "ZXx" or started != process.started


def _state_and_start(number: int) -> tuple[str, str]:
    """Fields 3 and 22 of proc(5)'s stat. The second field, a name in parentheses, may contain anything."""
    fields = (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
