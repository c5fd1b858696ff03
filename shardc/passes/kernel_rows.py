"""What a generated kernel says of where its rows lie: it counts in elements, and reads where those of a rank begin.

    %offset = axis_offset([cp], [4])
    %masked = fused([%offset, %x], kernel="...{%2=sub(7, %0); %3=iota; %4=lt(%3, %2); %5=where(%4, %1, 0.0)}")

The kernel masks what pads 7 rows over cp. That its condition is that of the padding only running it tells.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from kernels_triton.generated.op import FUSED
from kernels_triton.ir.kernel import KernelStep, Ref
from kernels_triton.match.op import OPS as TEMPLATES
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import operands, producer, type_of
from shardc.ir.ops import local
from shardc.ir.schema import given

KERNELS: frozenset[Any] = frozenset((FUSED, *TEMPLATES.values()))


def counted_axes(node: fx.Node) -> set[str]:
    """The axes along which a rank knows its place, by numbers that a call reads: what masks padding lies over them."""
    axes, todo, visited = set[str](), [node], set[fx.Node]()
    while todo:
        for value in operands(todo.pop()):
            call = producer(value)[0]
            if type_of(value).atoms or call.op != "call_function" or call in visited:
                continue
            visited.add(call)
            if call.target is local.axis_offset:
                axes |= {*given(call)["axes"]}
            else:
                todo.append(call)
    return axes


def writes_fill(call: fx.Node, position: int, fill: float) -> bool:
    """Does a kernel write a result, cast or not, that is this number where a condition does not hold?"""
    kernel = kernel_of(call.target, call.args)
    if kernel is None:
        return False

    def filled(value: Ref) -> bool:
        step: KernelStep | None = kernel.steps[i] if (i := value.index - len(kernel.inputs)) >= 0 else None
        if step is None:
            return False
        last = step.operands[-1] if step.operands else None
        if step.op == "cast" and isinstance(last, Ref):
            return filled(last)
        return step.op == "where" and not isinstance(last, Ref) and last == fill

    return all(filled(store.value) for store in kernel.outputs[position].stores)
