"""The reference: a kernel in plain torch. It runs on CPUs and is what GPU results are compared with.

Floats are computed in float32 and integers in int64, as on a GPU. If an input has another floating dtype than the
kernel's text says, the whole graph was lifted to that dtype, which then replaces every floating dtype of the text. In
float64 nothing is rounded, which makes exact comparisons possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import Kernel, KernelStep, Operand, Ref
from kernels_triton.ir.table import OPS, UNIFORM, Class, common_class, literal_class


def lifted_dtype(kernel: Kernel, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The dtype that replaces every floating dtype of the text; None if the inputs have the dtypes of the text."""
    for tensor, dtype in zip(kernel.inputs, dtypes, strict=True):
        if tensor.dtype.is_floating_point and dtype != tensor.dtype:
            return dtype
    return None


def run(kernel: Kernel, inputs: Sequence[Tensor], stand_in: torch.dtype | None = None) -> list[Tensor]:
    """The outputs, fresh and contiguous. `stand_in` is the dtype that the graph is lifted to, for kernels whose inputs
    do not show it."""
    stand_in = stand_in or lifted_dtype(kernel, [x.dtype for x in inputs])
    compute = torch.float64 if stand_in == torch.float64 or (stand_in is None and kernel.is_float64) else torch.float32
    device = inputs[0].device
    floats = {"f": compute, "i": torch.int64, "b": torch.bool}
    values: list[Tensor] = []
    for tensor, x in zip(kernel.inputs, inputs, strict=True):
        view = strided_view(x.detach().contiguous(), tensor.access_map, kernel.space)
        values.append(view.to(compute) if tensor.dtype.is_floating_point else view)

    def operand(of: Operand, into: Class) -> Tensor:
        if isinstance(of, Ref):
            return values[of.index].to(floats[into])
        return torch.tensor(of, dtype=floats[into], device=device)

    for step in kernel.steps:
        values.append(_run_step(kernel, step, values, operand, stand_in))
    outputs: list[Tensor] = []
    for output in kernel.outputs:
        dtype = stand_in if stand_in is not None and output.dtype.is_floating_point else output.dtype
        out = torch.empty(output.shape, dtype=dtype, device=device)
        if len(output.stores) > 1 and dtype.is_floating_point:
            out.fill_(float("nan"))  # an element that no store writes becomes visible
        if output.padded:
            out.zero_()
        for store in output.stores:
            strided_view(out, store.access_map, kernel.space).copy_(values[store.value.index])
        outputs.append(out)
    return outputs


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
