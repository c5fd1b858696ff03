"""In-place calls of fused kernels: results overwrite operands, as in an optimizer's step.

A result may overwrite an operand if each of its elements is computed from the element it replaces, and the kernel reads
the operand in no other way. A scalar that several programs read must not be written by one of them. So an overwritten
operand must vary along the whole space, or the space must be a single element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels_triton.base.inplace import INTO, Into, Operand, Place, Scratch
from kernels_triton.codegen.schedules import inplace_pairs
from kernels_triton.generated.op import FUSED, checked_kernel
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch

NONE: Mapping[int, Tensor] = {}


def no_inplace_pairs(*_: object) -> frozenset[tuple[int, int]]:
    """The pairs of an op that overwrites none of its operands."""
    return frozenset()


def inplace_operand_pairs(inputs: Sequence[object], line: str) -> frozenset[tuple[int, int]]:
    """(result, operand): the result may overwrite the operand."""
    kernel = parse(line)
    return frozenset(
        (result, operand)
        for result, operand in inplace_pairs(kernel)
        if all(s or n == 1 for s, n in zip(kernel.inputs[operand].access_map.strides, kernel.space, strict=True))
    )


def run(inputs: Sequence[Tensor], line: str, over: Mapping[int, Tensor] = NONE) -> list[Tensor]:
    """The results; those in `over` use the memory given there. On a GPU only a kernel's first call is checked."""
    like = inputs[0]
    # A graph that was lifted to another dtype runs on the reference only.
    if (
        not (like.is_cuda and launch.HAS_TRITON)
        or reference.lifted_dtype(parse(line), [x.dtype for x in inputs]) is not None
    ):
        kernel = checked_kernel(line, inputs)
        written = {
            number: to
            for number, to in over.items()
            if to.is_contiguous()
            and reference.writes_once(kernel.outputs[number])
            and to.dtype == kernel.outputs[number].dtype
        }
        return copy_to_destinations(reference.run(kernel, inputs, over=written), over)
    from kernels_triton.generated.launcher import launcher

    kernel = parse(line)
    launch_kernel = launcher(kernel)
    out = [
        launch.empty(output.shape, output.dtype, like) if destination is None else destination
        for output, destination in zip(kernel.outputs, kernel_destinations(kernel, over), strict=True)
    ]
    if like.get_device() in launch_kernel.ready:
        launch_kernel.on_device_of(like).run([x if x.is_contiguous() else x.contiguous() for x in inputs], out)
    else:
        checked_kernel(line, inputs)
        launch_kernel(inputs, out=out)
    return copy_to_destinations(out, over)


def kernel_destinations(kernel: Kernel, over: Mapping[int, Tensor]) -> list[Tensor | None]:
    """For each result the memory that the kernel can write directly; None if there is none."""
    return [
        over[number] if number in over and over[number].is_contiguous() else None
        for number in range(len(kernel.outputs))
    ]


def copy_to_destinations(results: Sequence[Tensor], over: Mapping[int, Tensor]) -> list[Tensor]:
    """The results. Those in `over` are copied to their memory unless the kernel wrote them there."""
    return [
        over[number].copy_(y) if number in over and over[number] is not y else y for number, y in enumerate(results)
    ]


def prepare(
    operands: Sequence[Operand],
    line: str,
    places: Mapping[int, Place],
    device: torch.device,
    scratch: Scratch | None = None,
) -> Callable[..., list[Tensor]] | None:
    if device.type != "cuda" or not launch.HAS_TRITON:
        return None
    from kernels_triton.generated.prepared_call import PreparedKernelCall

    return PreparedKernelCall(run, operands, line, places, device, scratch)


INTO[FUSED] = Into(inplace_operand_pairs, run, anywhere=True, prepare=prepare)
