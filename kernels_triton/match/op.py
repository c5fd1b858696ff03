"""The template ops in graphs, such as `shardc::layer_norm(inputs, kernel)`. They stand in place of `shardc::fused`.

The kernel's text defines the computation, up to the last rounding, and is the reference. The op's name selects the
template that computes it on a GPU. So code that handles `fused` handles these ops too, and a graph needs no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from kernels_triton.base.diagnostic import error
from kernels_triton.base.inplace import INTO, OVER_DEAD, Into, Operand, Place, Scratch
from kernels_triton.base.library import define, implement
from kernels_triton.generated import inplace_call, op
from kernels_triton.ir import reference
from kernels_triton.ir.kernel import Kernel
from kernels_triton.ir.text import parse
from kernels_triton.launch import launch
from kernels_triton.match.match import match_template
from kernels_triton.match.table import NAMES


def checked_template(name: str, line: str, inputs: Sequence[Tensor]) -> Kernel:
    """The kernel of a text that matches template `name`, after a check that the inputs are as the text says."""
    kernel = op.checked_kernel(line, inputs)
    match = match_template(kernel)
    if match is None or match.template.name != name:
        raise error("SC531", f"{kernel.name}: its steps are not what the template {name} computes")
    return kernel


def _define(name: str) -> OpOverload:
    def simple(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        return reference.run(checked_template(name, line, inputs), inputs)

    def fake(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        checked_template(name, line, inputs)
        return op.fake_outputs(inputs, line)

    def on_gpu(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        kernel = checked_template(name, line, inputs)
        if not launch.HAS_TRITON or reference.lifted_dtype(kernel, [x.dtype for x in inputs]) is not None:
            return reference.run(kernel, inputs)
        from kernels_triton.match.launcher import launcher

        return launcher(kernel)(inputs)

    def run(inputs: Sequence[Tensor], line: str, over: Mapping[int, Tensor] = inplace_call.NONE) -> list[Tensor]:
        """The op without the dispatcher's overhead; the results in `over` use the memory given there."""
        lifted = reference.lifted_dtype(parse(line), [x.dtype for x in inputs]) is not None
        if lifted or not (inputs[0].is_cuda and launch.HAS_TRITON):
            return inplace_call.copy_to_destinations(simple(inputs, line), over)
        from kernels_triton.match.launcher import launcher

        ready = launcher(parse(line))
        if ready.launches_on(inputs[0]) is None:
            checked_template(name, line, inputs)
        return inplace_call.copy_to_destinations(
            ready(inputs, inplace_call.kernel_destinations(ready.kernel, over)), over
        )

    op_overload = define(f"{name}(Tensor[] inputs, str kernel) -> Tensor[]", simple, fake)
    implement(name, on_gpu, "CUDA")

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
        from kernels_triton.match.launcher import template_launches

        return PreparedKernelCall(run, operands, line, places, device, scratch, template_launches)

    INTO[op_overload] = Into(inplace_call.no_inplace_pairs, run, anywhere=True, prepare=prepare)
    if name in OVERWRITES:
        OVER_DEAD[id(op_overload)] = partial(_overwriting, *OVERWRITES[name])
    return op_overload


# Of templates whose programs read a row, or keep it in registers, before they write it: a result that may lie where an
# operand does.
OVERWRITES = {"cross_entropy": ("dlogits", "logits")}


def _overwriting(result: str, operand: str, inputs: Sequence[object], line: str) -> frozenset[tuple[int, int]]:
    """The (result, operand) of a template's call, where both lie alike."""
    kernel = parse(line)
    match = match_template(kernel)
    if match is None or result not in match.results:
        return frozenset()
    written, read = match.results.index(result), int(match.binding[operand])  # type: ignore[arg-type]
    output, tensor = kernel.outputs[written], kernel.inputs[read]
    alike = (output.dtype, output.shape) == (tensor.dtype, tensor.shape)
    alike = alike and output.stores[0].access_map == tensor.access_map
    return frozenset({(written, read)} if alike else ())


OPS: Mapping[str, OpOverload] = {name: _define(name) for name in NAMES}
KERNELS: Mapping[Any, Callable[..., Any]] = dict.fromkeys((op.FUSED, *OPS.values()), parse)


def kernel_of(target: Any, args: Sequence[Any]) -> Kernel | None:
    """The kernel that a call in a graph runs, generated or a template; None for any other call."""
    return parse(str(args[1])) if target in KERNELS else None
