"""The text form of a kernel, one line. The text is the kernel's identity: graphs hold it, and `parse` reads it back.

    add_rms[8,128|64](bf16[8,128,64], bf16[64]@0:0,0,1){%2=square(%0); %3=rsum(%2); %4=mul(%3, 0.015625); ...}
    ->bf16[8,128,64]=%9, f32[8,128]=%5@0:128,1,0

(all on one line). Batch dims come before a semicolon: `sums[64;8|1024]`. A tensor is followed by its access map,
`@offset:strides`. A tensor with one element for each point of the space, in order, has no `@`. A step is
`%n=op(operands)`. A cast names its dtype: `cast.bf16(%3)`. Attributes stand in braces: `iota{2}()`. An output of
several stores joins them with `+`; `+0` says that its rows end with zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import lru_cache

import torch

from kernels_triton.base.diagnostic import ShardcError
from kernels_triton.base.dtypes import DTYPE_NAMES, DTYPES
from kernels_triton.ir.access_map import AccessMap, contiguous_map
from kernels_triton.ir.kernel import Input, Kernel, KernelStep, Operand, Output, OutputStore, Ref, malformed_kernel


@lru_cache(maxsize=4096)
def text(kernel: Kernel) -> str:
    space, count = kernel.space, len(kernel.inputs)
    inputs = ", ".join(_tensor(i.dtype, i.shape) + _access_map(i.access_map, i.shape, space) for i in kernel.inputs)
    steps = "; ".join(f"%{number}={_step(step)}" for number, step in enumerate(kernel.steps, count))
    outputs = ", ".join(_output(o, space) for o in kernel.outputs)
    sizes = ",".join(map(str, space[kernel.batch : -1])) + f"|{space[-1]}"
    if kernel.batch:
        sizes = ",".join(map(str, space[: kernel.batch])) + f";{sizes}"
    return f"{kernel.name}[{sizes}]({inputs}){{{steps}}}->{outputs}"


@lru_cache(maxsize=4096)
def parse(line: str) -> Kernel:
    """The kernel of a text that `text` wrote. Raises SC531 for any other text."""
    match = re.fullmatch(r"(\w+)\[(?:([\d,]+);)?([\d,]*)\|(\d+)\]\((.*?)\)\{(.*)\}->(.*)", line)
    if match is None:
        raise malformed_kernel(f"{line[:80]!r} is not the text of a kernel")
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
    except (ValueError, KeyError) as fault:
        raise malformed_kernel(f"its text cannot be read: {fault}", name) from fault


def _numbers(part: str) -> tuple[int, ...]:
    return tuple(int(n) for n in part.split(",") if n)


def _parts(whole_text: str, separator: str) -> list[str]:
    return re.split(separator, whole_text) if whole_text else []


def _output(output: Output, space: Sequence[int]) -> str:
    stores = [f"%{s.value.index}{_access_map(s.access_map, output.shape, space)}" for s in output.stores]
    return f"{_tensor(output.dtype, output.shape)}={'+'.join(stores)}" + "+0" * output.padded


def _tensor(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{DTYPE_NAMES[dtype]}[{','.join(map(str, shape))}]"


def _access_map(access_map: AccessMap, shape: Sequence[int], space: Sequence[int]) -> str:
    if access_map == contiguous_map(space) and math.prod(shape) == math.prod(space):
        return ""
    return f"@{access_map.offset}:{','.join(map(str, access_map.strides))}"


def _step(step: KernelStep) -> str:
    dtype = "" if step.dtype is None else f".{DTYPE_NAMES[step.dtype]}"
    attributes = f"{{{','.join(map(str, step.attributes))}}}" if step.attributes else ""
    return f"{step.op}{dtype}{attributes}({', '.join(map(_operand, step.operands))})"


def _operand(operand: Operand) -> str:
    if isinstance(operand, Ref):
        return f"%{operand.index}"
    return str(operand).lower() if isinstance(operand, bool) else repr(operand)


TENSOR = r"(\w+)\[([\d,]*)\]"
WALK = r"(?:@(-?\d+):(-?[\d,-]+))?"


def _parse_access_map(offset: str | None, strides: str | None, space: Sequence[int]) -> AccessMap:
    return contiguous_map(space) if offset is None or strides is None else AccessMap(int(offset), _numbers(strides))


def _parse_input(part: str, space: Sequence[int]) -> Input:
    match = re.fullmatch(TENSOR + WALK, part)
    if match is None:
        raise ValueError(f"input {part!r}")
    return Input(DTYPES[match[1]], _numbers(match[2]), _parse_access_map(match[3], match[4], space))


def _parse_step(part: str) -> KernelStep:
    match = re.fullmatch(r"%\d+=(\w+)(?:\.(\w+))?(?:\{([\d,-]+)\})?\((.*)\)", part)
    if match is None:
        raise ValueError(f"step {part!r}")
    operands = tuple(_parse_operand(o) for o in _parts(match[4], ", "))
    return KernelStep(match[1], operands, _numbers(match[3] or ""), DTYPES[match[2]] if match[2] else None)


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
    stores: list[OutputStore] = []
    stores_text = match[3].removesuffix("+0")
    for store_text in stores_text.split("+"):
        match_store = re.fullmatch(r"%(\d+)" + WALK, store_text)
        if match_store is None:
            raise ValueError(f"store {store_text!r}")
        stores.append(OutputStore(Ref(int(match_store[1])), _parse_access_map(match_store[2], match_store[3], space)))
    return Output(DTYPES[match[1]], _numbers(match[2]), tuple(stores), stores_text != match[3])
