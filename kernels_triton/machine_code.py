"""What a compiled kernel is made of: its registers, its stack, and its instructions as text, from NVIDIA's own tools.

The disassembler takes half a second to start, whatever it is given, so the code of many kernels is put end to end and
disassembled at once. Registers and stack are in the attributes that the assembler leaves beside the code (an ELF file).
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

# In `.nv.info`: attributes of two words, the function's symbol and a number.
PAIR, REGISTERS, FRAME = 4, 0x2F, 0x11
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);")


@dataclass(frozen=True)
class MachineCode:
    """`stack`: bytes a thread, of what did not fit into registers."""

    registers: int
    stack: int
    code: bytes


def machine_code(cubin: bytes) -> MachineCode:
    """Of a file with one kernel."""
    sections = dict(_sections(cubin))
    (code,) = (part for name, part in sections.items() if name.startswith(".text."))
    info, at, found = sections[".nv.info"], 0, dict[int, int]()
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        if kind == PAIR:
            if attribute in (REGISTERS, FRAME):
                found[attribute] = struct.unpack_from("<2I", info, at + 4)[1]
            at += size
        at += 4
    return MachineCode(found[REGISTERS], found[FRAME], code)


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    (table,) = struct.unpack_from("<Q", elf, 40)
    width, count, names = struct.unpack_from("<3H", elf, 58)
    headers = [struct.unpack_from("<2I4Q", elf, table + width * i) for i in range(count)]
    for name, kind, _, _, offset, size in headers:
        start = headers[names][4] + name
        empty = kind == 8  # room that the loader makes
        yield elf[start : elf.index(b"\0", start)].decode(), b"" if empty else elf[offset : offset + size]


def disassembled(codes: Sequence[bytes], arch: int) -> list[list[str]]:
    """The instructions of each."""
    tool = Path(str(import_module("triton").__file__)).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [str(tool), "-b", f"SM{arch}", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    out: list[list[str]] = [[] for _ in codes]
    at, end = 0, len(codes[0]) if codes else 0
    for found in INSTRUCTION.finditer(text):
        while int(found[1], 16) >= end:
            at += 1
            end += len(codes[at])
        out[at].append(found[2].strip())
    return out
