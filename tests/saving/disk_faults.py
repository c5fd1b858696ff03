"""A disk that fails at a chosen call: `disk_faults.c` built, loaded before libc, and told from Python what to do.

library = build(folder)                                       in the test
subprocess.run(..., env={"LD_PRELOAD": str(library), ...})
disk = Disk()                                                 in that process
disk.arm(folder, Fault.FULL, 17)                              the 17th call that changes a file below `folder` fails
disk.disarm()                                                 the names of all calls since then
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
from enum import IntEnum
from pathlib import Path

SOURCE = Path(__file__).with_name("disk_faults.c")
COMPILER = next(filter(None, map(shutil.which, ("gcc", "cc"))), None)


class Fault(IntEnum):
    """What happens at the call; the numbers are those of the C file."""

    COUNT = 0  # nothing
    KILL = 1  # the process is killed before it
    HALF = 2  # of a write, half is done, and the process is killed
    FULL = 3  # ENOSPC from then on, but what frees room goes well; of a write, half is done first
    BROKEN = 4  # EIO from then on
    ONCE = 5  # EIO for this call alone


ERRORS = {Fault.FULL: errno.ENOSPC, Fault.BROKEN: errno.EIO, Fault.ONCE: errno.EIO}
WRITES = ("write ", "writev ", "pwrite ", "pwrite64 ")


def build(folder: Path) -> Path:
    assert COMPILER is not None
    library = folder / "disk_faults.so"
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return library


class Disk:
    """The library in this process, which was started with it."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(os.environ["LD_PRELOAD"])
        self._library.disk_arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
        self._library.disk_names.restype = ctypes.c_char_p
        self._library.disk_bytes.restype = ctypes.c_long

    def arm(self, folder: Path, fault: Fault, number: int) -> None:
        self._library.disk_arm(str(folder).encode(), fault, number, ERRORS.get(fault, 0))

    def disarm(self) -> list[str]:
        self._library.disk_disarm()
        return self._library.disk_names().decode().splitlines()

    @property
    def bytes(self) -> int:
        """That were written since it was armed."""
        return self._library.disk_bytes()
