"""What a kernel computes, in plain torch: on a CPU, and wherever a result is held against it.

Floats are computed in float32 and integers in int64, as on a GPU. Where an input comes in another floating dtype than
the kernel's text says, the whole graph was lifted to that dtype, and it stands for every floating dtype of the text: in
float64 nothing is rounded at all, which is what makes an exact comparison possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels_triton.fused.kernel import Kernel, Operand, Ref, Step, Walk
from kernels_triton.fused.table import OPS, UNIFORM, Class, call_class, literal_class


def lifted(kernel: Kernel, dtypes: Sequence[torch.dtype]) -> torch.dtype | None:
    """The dtype that stands for every floating one; None where the inputs are as the text says."""
    for given, dtype in zip(kernel.inputs, dtypes, strict=True):
        if given.dtype.is_floating_point and dtype != given.dtype:
            return dtype
    return None


def run(kernel: Kernel, inputs: Sequence[Tensor], stand_in: torch.dtype | None = None) -> list[Tensor]:
    """The outputs, fresh and contiguous. `stand_in`: what the graph is lifted to, where its inputs do not tell."""
    stand_in = stand_in or lifted(kernel, [x.dtype for x in inputs])
    compute = torch.float64 if stand_in == torch.float64 or (stand_in is None and kernel.double) else torch.float32
    device = inputs[0].device
    floats = {"f": compute, "i": torch.int64, "b": torch.bool}
    values: list[Tensor] = []
    for given, x in zip(kernel.inputs, inputs, strict=True):
        read = walked(x.detach().contiguous(), given.walk, kernel.space)
        values.append(read.to(compute) if given.dtype.is_floating_point else read)

    def operand(of: Operand, into: Class) -> Tensor:
        if isinstance(of, Ref):
            return values[of.index].to(floats[into])
        return torch.tensor(of, dtype=floats[into], device=device)

    for step in kernel.steps:
        values.append(_compute(kernel, step, values, operand, stand_in))
    outputs: list[Tensor] = []
    for made in kernel.outputs:
        dtype = stand_in if stand_in is not None and made.dtype.is_floating_point else made.dtype
        out = torch.empty(made.shape, dtype=dtype, device=device)
        if len(made.stores) > 1 and dtype.is_floating_point:
            out.fill_(float("nan"))  # what no store writes shall be seen
        if made.padded:
            out.zero_()
        for store in made.stores:
            walked(out, store.walk, kernel.space).copy_(values[store.value.index])
        outputs.append(out)
    return outputs


def walked(x: Tensor, walk: Walk, space: Sequence[int]) -> Tensor:
    """A contiguous tensor over the space, of size 1 along the dims that it does not vary in."""
    sizes = [n if s else 1 for s, n in zip(walk.strides, space, strict=True)]
    if all(s >= 0 for s in walk.strides):
        return torch.as_strided(x, sizes, walk.strides, x.storage_offset() + walk.offset)
    flipped = [at for at, s in enumerate(walk.strides) if s < 0]
    strides, first = [abs(s) for s in walk.strides], walk.first(space)
    return torch.as_strided(x, sizes, strides, x.storage_offset() + first).flip(flipped)


def _compute(
    kernel: Kernel,
    step: Step,
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
    given: list[Class] = [kernel.classes[o.index] if isinstance(o, Ref) else literal_class(o) for o in step.operands]
    if step.op == "cast":
        assert step.dtype is not None
        value = operand(step.operands[0], given[0])
        if not step.dtype.is_floating_point:
            return value.to(step.dtype)
        wide = torch.float64 if stand_in == torch.float64 or (stand_in is None and kernel.double) else torch.float32
        return value.to(wide if stand_in is not None else step.dtype).to(wide)
    common = call_class(op, given)
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
