"""Register limits with which a kernel does not spill.

NVIDIA's assembler gives a thread two or three registers fewer than it needs if one more program then fits on a
multiprocessor, and spills the rest. Which kernels this affects changes with its version. With a limit (PTX's `maxnreg`)
of the next multiple of eight registers, nothing spills. Kernels without spills get no limit: they would use all
registers of it, and occupancy would fall.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from kernels_triton.launch.machine_code import MachineCode, machine_code

STEP = 8  # registers are allocated by the eight
MOST_REGISTERS = 255
REGISTER_FILE = 1 << 16  # registers of a multiprocessor
TRIES = 4


def compile_without_spills(compiled: Callable[[int], Any], warps: int, registers: int = 0) -> tuple[Any, int]:
    """A kernel without spills, and its register limit (0 for none). `compiled(limit)` is Triton's kernel. A limit that
    a schedule has measured, `registers`, is kept. A kernel that still spills with a few more registers is kept as it
    is."""
    first = compiled(registers)
    if registers:
        return first, registers
    code, limit = _code(first), 0
    for _ in range(TRIES):
        if code is None or not code.stack:
            break
        limit = (max(limit, code.registers) // STEP + 1) * STEP
        if limit > MOST_REGISTERS or limit * 32 * warps > REGISTER_FILE:
            break
        candidate = compiled(limit)
        code = _code(candidate)
        if code is not None and not code.stack:
            return candidate, limit
    return first, 0


def _code(kernel: Any) -> MachineCode | None:
    """None for code that is not NVIDIA's or cannot be read. Such a kernel runs without a limit."""
    try:
        return machine_code(kernel.asm["cubin"])
    except (AttributeError, KeyError, ValueError, struct.error):
        return None
