"""The reference: a kernel in plain torch. It runs on CPUs and is what GPU results are compared with.

Floats are computed in float32 and integers in int64, as on a GPU. If an input has another floating dtype than the
kernel's text says, the whole graph was lifted to that dtype, which then replaces every floating dtype of the text. In
float64 nothing is rounded, which makes exact comparisons possible.

On a CPU a kernel runs on blocks of the first dim that fit in its caches, where nothing is summed over that dim: so it
reads and writes memory once, as the kernel does on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import INDEXED, Kernel, KernelStep, Operand, Output, Ref
from kernels_triton.ir.table import OPS, UNIFORM, Class, common_class, literal_class

FRESH: Mapping[int, Tensor] = {}
BLOCK = 2**15  # points of a space: 128 KiB of a value in float32


def lifted_dtype(kernel: Kernel, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The dtype that replaces every floating dtype of the text; None if the inputs have the dtypes of the text."""
    for tensor, dtype in zip(kernel.inputs, dtypes, strict=True):
        if tensor.dtype.is_floating_point and dtype != tensor.dtype:
            return dtype
    return None


def run(
    kernel: Kernel, inputs: Sequence[Tensor], stand_in: torch.dtype | None = None, over: Mapping[int, Tensor] = FRESH
) -> list[Tensor]:
    """The outputs, fresh and contiguous, or in the contiguous memory that `over` gives for some that `writes_once`.

    That may be an input's if the kernel can overwrite it (`inplace_pairs`). `stand_in` is the dtype that the graph is
    lifted to, for kernels whose inputs do not show it.
    """
    stand_in = stand_in or lifted_dtype(kernel, [x.dtype for x in inputs])
    compute = torch.float64 if stand_in == torch.float64 or (stand_in is None and kernel.is_float64) else torch.float32
    device = inputs[0].device
    floats = {"f": compute, "i": torch.int64, "b": torch.bool}
    given = [
        strided_view(x.detach().contiguous(), tensor.access_map, kernel.space)
        for tensor, x in zip(kernel.inputs, inputs, strict=True)
    ]
    outputs: list[Tensor] = []
    stores: list[tuple[int, Tensor]] = []
    for number, output in enumerate(kernel.outputs):
        dtype = stand_in if stand_in is not None and output.dtype.is_floating_point else output.dtype
        out = over[number] if number in over else torch.empty(output.shape, dtype=dtype, device=device)
        if len(output.stores) > 1 and dtype.is_floating_point:
            out.fill_(float("nan"))  # an element that no store writes becomes visible
        if output.padded:
            out.zero_()
        stores += [(s.value.index, strided_view(out, s.access_map, kernel.space)) for s in output.stores]
        outputs.append(out)
    overwritten = {out.untyped_storage().data_ptr() for out in over.values()}
    literals: dict[tuple[str, Class], Tensor] = {}
    values: list[Tensor] = []

    def operand(of: Operand, into: Class) -> Tensor:
        if isinstance(of, Ref):
            return values[of.index].to(floats[into])
        key = repr(of), into
        if key not in literals:
            literals[key] = torch.tensor(of, dtype=floats[into], device=device)
        return literals[key]

    size = _block(kernel, device)
    for first in range(0, kernel.space[0], size):
        values[:] = [
            _part(view, first, size).to(compute) if tensor.dtype.is_floating_point else _part(view, first, size)
            for tensor, view in zip(kernel.inputs, given, strict=True)
        ]
        for step in kernel.steps:
            values.append(_run_step(kernel, step, values, operand, stand_in))
        results = [values[index] for index, _ in stores]
        if overwritten:  # a value may be an input as it is, which the store of another overwrites
            results = [r.clone() if r.untyped_storage().data_ptr() in overwritten else r for r in results]
        for (_, view), result in zip(stores, results, strict=True):
            _part(view, first, size).copy_(result)
    return outputs


def writes_once(output: Output) -> bool:
    """Whether an output's elements are each written once, by one store, so that it may overwrite an input."""
    return len(output.stores) == 1 and not output.padded


def _block(kernel: Kernel, device: torch.device) -> int:
    """How many indices of the first dim are computed at a time: all, or on a CPU what its caches hold of a kernel whose
    values there depend on no others."""
    whole = max(1, kernel.space[0])
    if device.type != "cpu" or any(step.op in INDEXED or OPS[step.op].reduces == "col" for step in kernel.steps):
        return whole
    if len(kernel.space) == 1 and any(OPS[step.op].reduces for step in kernel.steps):
        return whole
    if any(len(output.stores) > 1 for output in kernel.outputs):
        return whole
    maps = [*(i.access_map for i in kernel.inputs), *(s.access_map for o in kernel.outputs for s in o.stores)]
    return whole if any(m.strides[0] < 0 for m in maps) else max(1, BLOCK // max(1, math.prod(kernel.space[1:])))


def _part(view: Tensor, first: int, size: int) -> Tensor:
    """A block of a view over the space, or all of one that does not vary along the first dim."""
    return view if view.shape[0] <= min(1, size) or size >= view.shape[0] else view[first : first + size]


def strided_view(x: Tensor, access_map: AccessMap, space: Sequence[int]) -> Tensor:
    """A contiguous tensor as a view over the space, of size 1 along dims where the value does not vary."""
    sizes = [n if s else 1 for s, n in zip(access_map.strides, space, strict=True)]
    if all(s >= 0 for s in access_map.strides):
        return torch.as_strided(x, sizes, access_map.strides, x.storage_offset() + access_map.offset)
    flipped_dims = [dim for dim, s in enumerate(access_map.strides) if s < 0]
    strides, first = [abs(s) for s in access_map.strides], access_map.first_element(space)
    return torch.as_strided(x, sizes, strides, x.storage_offset() + first).flip(flipped_dims)


def _run_step(
    kernel: Kernel,
    step: KernelStep,
    values: list[Tensor],
    operand: Callable[[Operand, Class], Tensor],
    stand_in: torch.dtype | None,
) -> Tensor:
    op, space, device = OPS[step.op], kernel.space, values[0].device
    if step.op == "iota":
        dim = step.attributes[0]
        return torch.arange(space[dim], device=device).view([space[dim] if d == dim else 1 for d in range(len(space))])
    if step.op == "uniform":
        seed, offset = (operand(o, "i").reshape(()) for o in step.operands)
        strides = step.attributes[1:]
        sizes = [n if s else 1 for s, n in zip(strides, space, strict=True)]
        return UNIFORM(seed, step.attributes[0], sizes, list(strides), offset)
    classes: list[Class] = [kernel.classes[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands]
    if step.op == "cast":
        assert step.dtype is not None
        value = operand(step.operands[0], classes[0])
        if not step.dtype.is_floating_point:
            return value.to(step.dtype)
        wide = torch.float64 if stand_in == torch.float64 or (stand_in is None and kernel.is_float64) else torch.float32
        return value.to(wide if stand_in is not None else step.dtype).to(wide)
    common = common_class(op, classes)
    letters: list[Class] = [common if letter in "na" else letter for letter in op.operands]  # type: ignore[misc]
    args = [operand(o, c) for o, c in zip(step.operands, letters, strict=True)]
    if not op.reduces:
        return op.torch(*args)
    value: Tensor = args[0]
    if op.reduces == "row":
        return op.torch(value.expand(*value.shape[:-1], space[-1]), -1, keepdim=True)
    rows = list(range(kernel.batch, len(space) - 1))
    value = value.expand(*value.shape[: kernel.batch], *space[kernel.batch : -1], value.shape[-1])
    return op.torch(value, rows, keepdim=True) if rows else value
