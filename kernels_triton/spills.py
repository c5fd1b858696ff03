"""Limits of registers with which a kernel spills nothing.

NVIDIA's assembler gives a thread two or three registers fewer than it needs where one program more then fits on a
multiprocessor, and spills what has no place; which kernels that hits changes with its version. Given a limit, PTX's
`maxnreg`, of the next eight registers, it spills nothing. Kernels that spill nothing anyway get no limit: they would
take what they are given, and fewer programs would fit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from kernels_triton.machine_code import MachineCode, machine_code

STEP = 8  # registers: a thread has them by the eight
MOST = 255
FILE = 1 << 16  # of a multiprocessor
TRIES = 4


def without(compiled: Callable[[int], Any], warps: int, registers: int = 0) -> tuple[Any, int]:
    """A kernel that spills nothing, and its limit of registers, 0: none. `compiled(limit)` is Triton's kernel. A limit
    that a schedule has measured, `registers`, stays; and so does a kernel that a few registers do not help."""
    first = compiled(registers)
    if registers:
        return first, registers
    code, limit = _code(first), 0
    for _ in range(TRIES):
        if code is None or not code.stack:
            break
        limit = (max(limit, code.registers) // STEP + 1) * STEP
        if limit > MOST or limit * 32 * warps > FILE:
            break
        found = compiled(limit)
        code = _code(found)
        if code is not None and not code.stack:
            return found, limit
    return first, 0


def _code(kernel: Any) -> MachineCode | None:
    """None where it is not NVIDIA's, or cannot be read: such a kernel runs as it is."""
    try:
        return machine_code(kernel.asm["cubin"])
    except (AttributeError, KeyError, ValueError, struct.error):
        return None
