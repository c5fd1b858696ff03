"""`shardc::layer_norm(inputs, kernel)` and the other templates: what graphs hold in the place of `shardc::fused`.

The kernel's text says what is computed, to the last rounding, and is the reference; the op's name says that the
template of that name computes it on a GPU. So whatever knows `fused` knows these, and a graph needs no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from kernels_triton import launch
from kernels_triton.fused import into, op, reference
from kernels_triton.fused.kernel import Kernel
from kernels_triton.fused.text import parse
from kernels_triton.templates.match import found
from kernels_triton.templates.table import NAMES
from shardc.ir.diagnostic import error
from shardc.ir.in_place import INTO, Into, Operand, Place, Scratch
from shardc.ir.ops.library import LIBRARY, define


def checked(name: str, line: str, inputs: Sequence[Tensor]) -> Kernel:
    """The kernel of a text that is the template `name`, once its inputs are what the text says."""
    kernel = op.checked(line, inputs)
    match = found(kernel)
    if match is None or match.template.name != name:
        raise error("SC531", f"{kernel.name}: its steps are not what the template {name} computes")
    return kernel


def _define(name: str) -> OpOverload:
    def simple(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        return reference.run(checked(name, line, inputs), inputs)

    def fake(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        checked(name, line, inputs)
        return op.fake(inputs, line)

    def on_gpu(inputs: Sequence[Tensor], line: str) -> list[Tensor]:
        kernel = checked(name, line, inputs)
        if not launch.HAS_TRITON or reference.lifted(kernel, [x.dtype for x in inputs]) is not None:
            return reference.run(kernel, inputs)
        from kernels_triton.templates.launcher import launcher

        return launcher(kernel)(inputs)

    def run(inputs: Sequence[Tensor], line: str, over: Mapping[int, Tensor] = into.NONE) -> list[Tensor]:
        """As the op, without the way through the dispatcher; the results of `over` in the memory given for them."""
        lifted = reference.lifted(parse(line), [x.dtype for x in inputs]) is not None
        if lifted or not (inputs[0].is_cuda and launch.HAS_TRITON):
            return into.moved(simple(inputs, line), over)
        from kernels_triton.templates.launcher import launcher

        ready = launcher(parse(line))
        if ready.on(inputs[0]) is None:
            checked(name, line, inputs)
        return into.moved(ready(inputs, into.told(ready.kernel, over)), over)

    made = define(f"{name}(Tensor[] inputs, str kernel) -> Tensor[]", simple, fake)
    LIBRARY.impl(name, on_gpu, "CUDA")

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
        from kernels_triton.templates.launcher import launches

        return Prepared(run, operands, line, places, device, scratch, launches)

    INTO[made] = Into(into.nowhere, run, anywhere=True, prepare=prepare)
    return made


OPS: Mapping[str, OpOverload] = {name: _define(name) for name in NAMES}
KERNELS: Mapping[Any, Callable[..., Any]] = dict.fromkeys((op.FUSED, *OPS.values()), parse)


def kernel_of(target: Any, args: Sequence[Any]) -> Kernel | None:
    """The kernel that a call of a graph runs, generated or a template; None for any other call."""
    return parse(str(args[1])) if target in KERNELS else None
