"""The widths of a compiled kernel's accesses to each operand, from its PTX.

    ld.param.b64      %rd28, [norm_forward_param_0];             the first operand
    add.s64           %rd36, %rd28, %rd35;
    add.s64           %rd1, %rd36, %rd37;
    ld.global.v4.b32  { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];      128 bits of it

An address is traced back, through everything it is computed from, to pointers among the kernel's parameters. Loaded
numbers, such as a row's target, are offsets and are not traced further. Machine code has the same accesses, but does
not show their operands; the assembler neither joins nor splits accesses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

PARAMETER = re.compile(r"\bld\.param\.\w+\s+(%\w+),\s*\[\w+_param_(\d+)\]")
LOADED = re.compile(r"\b(?:ld|atom|shfl)\.(?!param)")
ACCESS = re.compile(r"\b(?:ld|st)\.global([\w.:]*)\s[^\[]*\[\s*(%\w+)")
COPY = re.compile(r"\bcp\.async[\w.:]*\.global[\w.:]*\s*\[[^\]]*\],\s*\[\s*(%\w+)[^\]]*\],\s*(0x[0-9a-f]+|\d+)")
SHAPE = re.compile(r"(?:\.v(\d))?\.[a-z](\d+)$")
REGISTER = re.compile(r"%\w+")
WIDEST = 128  # bits that a thread moves at once


def access_widths(ptx: str, operands: Sequence[str]) -> dict[str, Counter[int]]:
    """For each operand, the number of accesses of each width in bits. `operands`: the kernel's parameters in order,
    without constants."""
    computed: dict[str, set[str]] = {}
    parameters: dict[str, str] = {}
    accesses: list[tuple[str, int]] = []
    for line in ptx.splitlines():
        line = line.partition("//")[0].strip()
        if match := PARAMETER.search(line):
            if int(match[2]) < len(operands):  # later parameters are the runtime's scratch memory
                parameters[match[1]] = operands[int(match[2])]
        elif match := ACCESS.search(line):
            shape = SHAPE.search(match[1])
            assert shape is not None, line
            accesses.append((match[2], int(shape[1] or 1) * int(shape[2])))
        elif match := COPY.search(line):
            accesses.append((match[1], 8 * int(match[2], 0)))
        elif not LOADED.search(line):
            _record_operands(line, computed)
    out: dict[str, Counter[int]] = {}
    for address, bits in accesses:
        for name in _pointers(address, computed, parameters):
            out.setdefault(name, Counter())[bits] += 1
    return out


def narrow_accesses(ptx: str, signature: Sequence[tuple[str, str]], full: Sequence[str]) -> dict[str, int]:
    """For each tensor in `full`, the number of accesses of fewer elements than fit into 16 bytes of the widest of these
    tensors. `signature`: names and Triton's types (`*bf16`), or `constexpr`."""
    bits = {name: max(8, int(re.sub(r"\D", "", kind))) for name, kind in signature if name in full}
    elements = WIDEST // max(bits.values(), default=WIDEST)
    widths = access_widths(ptx, [name for name, kind in signature if kind != "constexpr"])
    counts = {
        name: sum(count for width, count in widths.get(name, {}).items() if width < elements * size)
        for name, size in bits.items()
    }
    return {name: count for name, count in counts.items() if count}


def _record_operands(line: str, computed: dict[str, set[str]]) -> None:
    """`add.s64 %rd1, %rd36, %rd37;`: the first register is computed from the others. A loop's next iteration adds
    further sources."""
    _, _, text = line.partition("\t") if "\t" in line else line.partition(" ")
    first, _, rest = text.partition("}") if text.lstrip().startswith("{") else text.partition(",")
    sources = set(REGISTER.findall(rest))
    for register in REGISTER.findall(first):
        computed.setdefault(register, set()).update(sources)


def _pointers(address: str, computed: dict[str, set[str]], parameters: dict[str, str]) -> set[str]:
    operands: set[str] = set()
    visited, todo = {address}, [address]
    while todo:
        register = todo.pop()
        if register in parameters:
            operands.add(parameters[register])
        todo += (following := computed.get(register, set()) - visited)
        visited |= following
    return operands
