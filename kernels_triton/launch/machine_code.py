"""A compiled kernel's registers, stack and instructions, as NVIDIA's own tools report them.

The disassembler takes half a second to start, whatever its input. So the code of many kernels is concatenated and
disassembled at once. Registers and stack are in attributes that the assembler stores beside the code (an ELF file).
"""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

# In `.nv.info`: attributes of two words, the function's symbol and a value.
PAIR, REGISTERS, FRAME = 4, 0x2F, 0x11
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);")


@dataclass(frozen=True)
class MachineCode:
    """`stack`: bytes a thread, for values that did not fit into registers."""

    registers: int
    stack: int
    code: bytes


def machine_code(cubin: bytes) -> MachineCode:
    """The machine code of a file with one kernel."""
    sections = dict(_sections(cubin))
    (code,) = (part for name, part in sections.items() if name.startswith(".text."))
    info, offset, values = sections[".nv.info"], 0, dict[int, int]()
    while offset < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, offset)
        if kind == PAIR:
            if attribute in (REGISTERS, FRAME):
                values[attribute] = struct.unpack_from("<2I", info, offset + 4)[1]
            offset += size
        offset += 4
    return MachineCode(values[REGISTERS], values[FRAME], code)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    width, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, table + width * i) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        empty = kind == 8  # SHT_NOBITS: the loader allocates it
        yield elf[start : elf.index(b"\0", start)].decode(), b"" if empty else elf[offset : offset + size]


def disassemble(codes: Sequence[bytes], arch: int) -> list[list[str]]:
    """The instructions of each kernel."""
    tool = Path(str(import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [str(tool), "-b", f"SM{arch}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    out: list[list[str]] = [[] for _ in codes]
    number, end = 0, len(codes[0]) if codes else 0
    for instruction in INSTRUCTION.finditer(text):
        while int(instruction[1], 16) >= end:
            number += 1
            end += len(codes[number])
        out[number].append(instruction[2].strip())
    return out
