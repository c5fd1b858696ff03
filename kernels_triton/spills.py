"""Registers that a kernel has to be told of, so that it puts nothing aside in memory.

NVIDIA's assembler gives a thread fewer registers than it needs by two or three where one program more then fits on a
multiprocessor, and which kernels that hits changes with its version. Told that a thread may have the next eight, it
puts nothing aside, and the programs that fit are as many as it has registers for. Other kernels are told nothing: they
would take what they are given, and fewer programs would fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kernels_triton.machine_code import machine_code

STEP = 8  # registers: a thread has them by the eight
MOST = 255
FILE = 1 << 16  # of a multiprocessor
TRIES = 4


def without(compiled: Callable[[int], Any], warps: int, registers: int = 0) -> tuple[Any, int]:
    """A kernel that spills nothing, and how many registers the compiler was told of, 0: none. `compiled(registers)` is
    Triton's kernel. Where `registers` are given, as a schedule has measured them, and where no more help, it is as it
    was asked for."""
    first = compiled(registers)
    if registers:
        return first, registers
    code, told = machine_code(first.asm["cubin"]), 0
    for _ in range(TRIES):
        told = (max(told, code.registers) // STEP + 1) * STEP
        if not code.stack or told > MOST or told * 32 * warps > FILE:
            break
        found = compiled(told)
        code = machine_code(found.asm["cubin"])
        if not code.stack:
            return found, told
    return first, 0
