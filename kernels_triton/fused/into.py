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
from kernels_triton.fused.op import FUSED, checked
from kernels_triton.fused.schedules import in_place
from kernels_triton.fused.text import parse
from shardc.ir.in_place import INTO, Into

NONE: Mapping[int, Tensor] = {}


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
        results = reference.run(checked(line, inputs), inputs)
        return [over[at].copy_(y) if at in over else y for at, y in enumerate(results)]
    from kernels_triton.fused.launcher import launcher

    kernel = parse(line)
    run = launcher(kernel)
    out = [
        over[at] if at in over and over[at].is_contiguous() else launch.empty(made.shape, made.dtype, like)
        for at, made in enumerate(kernel.outputs)
    ]
    if like.get_device() in run.ready:
        run.on(like).run([x if x.is_contiguous() else x.contiguous() for x in inputs], out)
    else:
        checked(line, inputs)
        run(inputs, out=out)
    return [over[at].copy_(y) if at in over and over[at] is not y else y for at, y in enumerate(out)]


def prepare(
    slots: Sequence[int], line: str, places: Mapping[int, Callable[..., Tensor]], device: torch.device
) -> Callable[..., list[Tensor]] | None:
    if device.type != "cuda" or not launch.HAS_TRITON:
        return None
    from kernels_triton.fused.prepared import Prepared

    return Prepared(run, slots, line, places, device)


INTO[FUSED] = Into(pairs, run, anywhere=True, prepare=prepare)
