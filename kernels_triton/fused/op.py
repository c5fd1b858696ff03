"""`shardc::fused(inputs, kernel)`: what graphs hold. The kernel's text is an argument, so a graph prints, saves and
loads with no table beside it. A GPU runs the generated Triton kernel, everything else the reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton import launch
from kernels_triton.fused import reference
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.text import parse
from shardc.ir.diagnostic import error
from shardc.ir.ops.library import LIBRARY, define


def checked(line: str, inputs: Sequence[Tensor]) -> Kernel:
    """The kernel of a text, once its inputs are what the text says."""
    kernel = parse(line)
    if len(inputs) != len(kernel.inputs):
        raise error("SC530", f"{kernel.name}: {len(inputs)} inputs, expected {len(kernel.inputs)}")
    for at, (given, x) in enumerate(zip(kernel.inputs, inputs, strict=True)):
        if tuple(x.shape) != given.shape:
            raise error("SC530", f"{kernel.name}: %{at} is {list(x.shape)}, expected {list(given.shape)}")
        if x.dtype != given.dtype and not (x.is_floating_point() and given.dtype.is_floating_point):
            raise error("SC530", f"{kernel.name}: %{at} is {x.dtype}, expected {given.dtype}")
    return kernel


def _reference(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    return reference.run(checked(line, inputs), inputs)


def fake(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    kernel = checked(line, inputs)
    stand_in = reference.lifted(kernel, [x.dtype for x in inputs])
    return [
        inputs[0].new_empty(o.shape, dtype=stand_in if stand_in is not None and o.dtype.is_floating_point else o.dtype)
        for o in kernel.outputs
    ]


def _on_gpu(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    kernel = checked(line, inputs)
    if not launch.HAS_TRITON or reference.lifted(kernel, [x.dtype for x in inputs]) is not None:
        return reference.run(kernel, inputs)
    from kernels_triton.fused.launcher import launcher

    return launcher(kernel)(inputs)


FUSED = define("fused(Tensor[] inputs, str kernel) -> Tensor[]", _reference, fake)
LIBRARY.impl("fused", _on_gpu, "CUDA")
assert FUSED is torch.ops.shardc.fused.default
