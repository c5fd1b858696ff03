"""`shardc::fused(inputs, kernel)`, the op of fused kernels in graphs. The kernel's text is an argument, so a graph
prints, saves and loads without a table beside it. On a GPU it runs the generated Triton kernel, elsewhere the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels_triton.base.diagnostic import error
from kernels_triton.base.library import define, implement
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch


def checked_kernel(line: str, inputs: Sequence[Tensor]) -> Kernel:
    """The kernel of a text, after a check that the inputs have the shapes and dtypes of the text."""
    kernel = parse(line)
    if len(inputs) != len(kernel.inputs):
        raise error("SC530", f"{kernel.name}: {len(inputs)} inputs, expected {len(kernel.inputs)}")
    for number, (tensor, x) in enumerate(zip(kernel.inputs, inputs, strict=True)):
        if tuple(x.shape) != tensor.shape:
            raise error("SC530", f"{kernel.name}: %{number} is {list(x.shape)}, expected {list(tensor.shape)}")
        if x.dtype != tensor.dtype and not (x.is_floating_point() and tensor.dtype.is_floating_point):
            raise error("SC530", f"{kernel.name}: %{number} is {x.dtype}, expected {tensor.dtype}")
    return kernel


def _reference(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    return reference.run(checked_kernel(line, inputs), inputs)


def fake_outputs(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    kernel = checked_kernel(line, inputs)
    stand_in = reference.lifted_dtype(kernel, [x.dtype for x in inputs])
    return [
        inputs[0].new_empty(o.shape, dtype=stand_in if stand_in is not None and o.dtype.is_floating_point else o.dtype)
        for o in kernel.outputs
    ]


def _run_on_gpu(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
    kernel = checked_kernel(line, inputs)
    if not launch.HAS_TRITON or reference.lifted_dtype(kernel, [x.dtype for x in inputs]) is not None:
        return reference.run(kernel, inputs)
    from kernels_triton.generated.launcher import launcher

    return launcher(kernel)(inputs)


FUSED = define("fused(Tensor[] inputs, str kernel) -> Tensor[]", _reference, fake_outputs)
implement("fused", _run_on_gpu, "CUDA")
assert FUSED is torch.ops.shardc.fused.default
