"""How wide the accesses to each operand of a compiled kernel are, from its PTX.

    ld.param.b64      %rd28, [norm_forward_param_0];             the first operand
    add.s64           %rd36, %rd28, %rd35;
    add.s64           %rd1, %rd36, %rd37;
    ld.global.v4.b32  { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];      128 bits of it

An address is followed back through all that it is computed of, to pointers among the kernel's parameters. Numbers that
were loaded, such as a row's target, are an offset and lead no further. Machine code has the same accesses, and says no
more of whose they are; the assembler neither joins nor splits them.
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
WIDEST = 128  # bits, that a thread moves at once


def widths(ptx: str, operands: Sequence[str]) -> dict[str, Counter[int]]:
    """Of each operand, how many accesses of so many bits there are. `operands`: the kernel's parameters in order,
    without those that are constants."""
    computed: dict[str, set[str]] = {}
    parameters: dict[str, str] = {}
    accesses: list[tuple[str, int]] = []
    for line in ptx.splitlines():
        line = line.partition("//")[0].strip()
        if found := PARAMETER.search(line):
            if int(found[2]) < len(operands):  # after them the runtime's own scratch memory
                parameters[found[1]] = operands[int(found[2])]
        elif found := ACCESS.search(line):
            shape = SHAPE.search(found[1])
            assert shape is not None, line
            accesses.append((found[2], int(shape[1] or 1) * int(shape[2])))
        elif found := COPY.search(line):
            accesses.append((found[1], 8 * int(found[2], 0)))
        elif not LOADED.search(line):
            _compute(line, computed)
    out: dict[str, Counter[int]] = {}
    for address, bits in accesses:
        for name in _pointers(address, computed, parameters):
            out.setdefault(name, Counter())[bits] += 1
    return out


def short(ptx: str, signature: Sequence[tuple[str, str]], full: Sequence[str]) -> dict[str, int]:
    """How many accesses to each of some tensors are of fewer elements than 16 bytes of the widest of them hold.
    `signature`: names and Triton's types (`*bf16`), or `constexpr`."""
    bits = {name: max(8, int(re.sub(r"\D", "", kind))) for name, kind in signature if name in full}
    each = WIDEST // max(bits.values(), default=WIDEST)
    found = widths(ptx, [name for name, kind in signature if kind != "constexpr"])
    counts = {
        name: sum(count for width, count in found.get(name, {}).items() if width < each * size)
        for name, size in bits.items()
    }
    return {name: count for name, count in counts.items() if count}


def _compute(line: str, computed: dict[str, set[str]]) -> None:
    """`add.s64 %rd1, %rd36, %rd37;`: what is first is computed of what follows. A loop's next turn adds to that."""
    _, _, text = line.partition("\t") if "\t" in line else line.partition(" ")
    first, _, rest = text.partition("}") if text.lstrip().startswith("{") else text.partition(",")
    sources = set(REGISTER.findall(rest))
    for register in REGISTER.findall(first):
        computed.setdefault(register, set()).update(sources)


def _pointers(address: str, computed: dict[str, set[str]], parameters: dict[str, str]) -> set[str]:
    found: set[str] = set()
    seen, todo = {address}, [address]
    while todo:
        register = todo.pop()
        if register in parameters:
            found.add(parameters[register])
        todo += (following := computed.get(register, set()) - seen)
        seen |= following
    return found
