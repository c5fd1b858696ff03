"""A fused call whose results take the place of what some of its operands hold: an optimizer's step, in place.

Over an operand goes what is computed element by element where it is read, by a kernel that reads it in no other way.
A number that several programs read may not be written by one of them, so everything that is written over must vary
along the whole space, or the space be a single element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels_triton import launch
from kernels_triton.fused import reference
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.op import FUSED, checked
from kernels_triton.fused.schedules import in_place
from kernels_triton.fused.text import parse
from shardc.ir.in_place import INTO, Into, Operand, Place, Scratch

NONE: Mapping[int, Tensor] = {}


def nowhere(*_: object) -> frozenset[tuple[int, int]]:
    """The pairs of an op that writes over none of its operands."""
    return frozenset()


def pairs(inputs: Sequence[object], line: str) -> frozenset[tuple[int, int]]:
    """(result, operand): the one may be written over the other."""
    kernel = parse(line)
    return frozenset(
        (at, source)
        for at, source in in_place(kernel)
        if all(s or n == 1 for s, n in zip(kernel.inputs[source].walk.strides, kernel.space, strict=True))
    )


def run(inputs: Sequence[Tensor], line: str, over: Mapping[int, Tensor] = NONE) -> list[Tensor]:
    """The results, those of `over` in the memory given for them. On a GPU only a kernel's first call is checked."""
    like = inputs[0]
    # Of other dtypes than the kernel's, which the whole graph was lifted to, only the reference knows.
    if not (like.is_cuda and launch.HAS_TRITON) or reference.lifted(parse(line), [x.dtype for x in inputs]) is not None:
        return moved(reference.run(checked(line, inputs), inputs), over)
    from kernels_triton.fused.launcher import launcher

    kernel = parse(line)
    run = launcher(kernel)
    out = [
        launch.empty(made.shape, made.dtype, like) if to is None else to
        for made, to in zip(kernel.outputs, told(kernel, over), strict=True)
    ]
    if like.get_device() in run.ready:
        run.on(like).run([x if x.is_contiguous() else x.contiguous() for x in inputs], out)
    else:
        checked(line, inputs)
        run(inputs, out=out)
    return moved(out, over)


def told(kernel: Kernel, over: Mapping[int, Tensor]) -> list[Tensor | None]:
    """Where a kernel itself can write its results."""
    return [over[at] if at in over and over[at].is_contiguous() else None for at in range(len(kernel.outputs))]


def moved(results: Sequence[Tensor], over: Mapping[int, Tensor]) -> list[Tensor]:
    """The results, those of `over` copied to their places if they are not there yet."""
    return [over[at].copy_(y) if at in over and over[at] is not y else y for at, y in enumerate(results)]


def prepare(
    operands: Sequence[Operand],
    line: str,
    places: Mapping[int, Place],
    device: torch.device,
    scratch: Scratch | None = None,
) -> Callable[..., list[Tensor]] | None:
    if device.type != "cuda" or not launch.HAS_TRITON:
        return None
    from kernels_triton.fused.prepared import Prepared

    return Prepared(run, operands, line, places, device, scratch)


INTO[FUSED] = Into(pairs, run, anywhere=True, prepare=prepare)
