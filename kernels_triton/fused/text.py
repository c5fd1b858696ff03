"""A kernel as one line of text, which is its identity: graphs hold it, and `parse` reads it back.

    add_rms[8,128|64](bf16[8,128,64], bf16[64]@0:0,0,1){%2=square(%0); %3=rsum(%2); %4=mul(%3, 0.015625); ...}
    ->bf16[8,128,64]=%9, f32[8,128]=%5@0:128,1,0

(on one line). Batch dims come before a semicolon, `sums[64;8|1024]`. After a tensor comes its walk, `@offset:strides`,
left out for a tensor that has one element a point of the space, in order. A step is `%n=op(operands)`; a
cast names its dtype, `cast.bf16(%3)`; attributes stand in braces, `iota{2}()`. An output of several stores joins them
by `+`; `+0` says that its rows end with zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import torch

from kernels_triton.fused.kernel import Input, Kernel, Operand, Output, Ref, Step, Store, Walk, malformed, whole
from shardc.ir.diagnostic import ShardcError
from shardc.ir.types import DTYPE_NAMES, DTYPES


@lru_cache(maxsize=4096)
def text(kernel: Kernel) -> str:
    space, count = kernel.space, len(kernel.inputs)
    inputs = ", ".join(_tensor(i.dtype, i.shape) + _walk(i.walk, i.shape, space) for i in kernel.inputs)
    steps = "; ".join(f"%{at}={_step(step)}" for at, step in enumerate(kernel.steps, count))
    outputs = ", ".join(
        f"{_tensor(o.dtype, o.shape)}={'+'.join(f'%{s.value.index}{_walk(s.walk, o.shape, space)}' for s in o.stores)}"
        + "+0" * o.padded
        for o in kernel.outputs
    )
    sizes = ",".join(map(str, space[kernel.batch : -1])) + f"|{space[-1]}"
    if kernel.batch:
        sizes = ",".join(map(str, space[: kernel.batch])) + f";{sizes}"
    return f"{kernel.name}[{sizes}]({inputs}){{{steps}}}->{outputs}"


@lru_cache(maxsize=4096)
def parse(line: str) -> Kernel:
    """Read what `text` writes. SC531 on anything else."""
    match = re.fullmatch(r"(\w+)\[(?:([\d,]+);)?([\d,]*)\|(\d+)\]\((.*?)\)\{(.*)\}->(.*)", line)
    if match is None:
        raise malformed(f"{line[:80]!r} is not the text of a kernel")
    name, batch, rows, cols, inputs, steps, outputs = match.groups()
    outer = _numbers(batch or "")
    space = (*outer, *_numbers(rows), int(cols))
    try:
        return Kernel(
            name,
            space,
            tuple(_parse_input(part, space) for part in _parts(inputs, r", (?=[a-z])")),
            tuple(_parse_step(part) for part in _parts(steps, "; ")),
            tuple(_parse_output(part, space) for part in _parts(outputs, r", (?=[a-z])")),
            len(outer),
        )
    except ShardcError:
        raise
    except (ValueError, KeyError) as wrong:
        raise malformed(f"its text cannot be read: {wrong}", name) from wrong


def _numbers(part: str) -> tuple[int, ...]:
    return tuple(int(n) for n in part.split(",") if n)


def _parts(whole_text: str, separator: str) -> list[str]:
    return re.split(separator, whole_text) if whole_text else []


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{DTYPE_NAMES[dtype]}[{','.join(map(str, shape))}]"


def _walk(walk: Walk, shape: Sequence[int], space: Sequence[int]) -> str:
    if walk == whole(space) and math.prod(shape) == math.prod(space):
        return ""
    return f"@{walk.offset}:{','.join(map(str, walk.strides))}"


def _step(step: Step) -> str:
    dtype = "" if step.dtype is None else f".{DTYPE_NAMES[step.dtype]}"
    attributes = f"{{{','.join(map(str, step.attributes))}}}" if step.attributes else ""
    return f"{step.op}{dtype}{attributes}({', '.join(map(_operand, step.operands))})"


def _operand(operand: Operand) -> str:
    if isinstance(operand, Ref):
        return f"%{operand.index}"
    return str(operand).lower() if isinstance(operand, bool) else repr(operand)


TENSOR = r"(\w+)\[([\d,]*)\]"
WALK = r"(?:@(-?\d+):(-?[\d,-]+))?"


def _parse_walk(offset: str | None, strides: str | None, space: Sequence[int]) -> Walk:
    return whole(space) if offset is None or strides is None else Walk(int(offset), _numbers(strides))


def _parse_input(part: str, space: Sequence[int]) -> Input:
    match = re.fullmatch(TENSOR + WALK, part)
    if match is None:
        raise ValueError(f"input {part!r}")
    return Input(DTYPES[match[1]], _numbers(match[2]), _parse_walk(match[3], match[4], space))


def _parse_step(part: str) -> Step:
    match = re.fullmatch(r"%\d+=(\w+)(?:\.(\w+))?(?:\{([\d,-]+)\})?\((.*)\)", part)
    if match is None:
        raise ValueError(f"step {part!r}")
    operands = tuple(_parse_operand(o) for o in _parts(match[4], ", "))
    return Step(match[1], operands, _numbers(match[3] or ""), DTYPES[match[2]] if match[2] else None)


def _parse_operand(part: str) -> Operand:
    if part.startswith("%"):
        return Ref(int(part[1:]))
    if part in ("true", "false"):
        return part == "true"
    return int(part) if re.fullmatch(r"-?\d+", part) else float(part)


def _parse_output(part: str, space: Sequence[int]) -> Output:
    match = re.fullmatch(TENSOR + r"=(.*)", part)
    if match is None:
        raise ValueError(f"output {part!r}")
    stores: list[Store] = []
    written = match[3].removesuffix("+0")
    for piece in written.split("+"):
        found = re.fullmatch(r"%(\d+)" + WALK, piece)
        if found is None:
            raise ValueError(f"store {piece!r}")
        stores.append(Store(Ref(int(found[1])), _parse_walk(found[2], found[3], space)))
    return Output(DTYPES[match[1]], _numbers(match[2]), tuple(stores), written != match[3])
