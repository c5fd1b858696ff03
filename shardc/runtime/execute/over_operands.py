"""Which elementwise calls of a CPU's program write their result over an operand that nothing reads any more.

    %a = mul(%x, 0.5)        mul(%x, 0.5)
    %b = exp(%a)       ->    exp(%a, out=%a)       %b is %a's memory
    %c = add(%b, %x)         add(%b, %x, out=%b)

A new result costs a CPU more than its arithmetic: memory that the process may have given back, so that each page of it
is faulted in again, and lines of a cache that are fetched to be overwritten. Values and their layouts are the same, bit
by bit: only results that lie as their operands do are written so, and as many bytes as these hold.

GPUs have an allocator that caches, and kernels that leave no such calls. A graph stays a function of its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.ir.arena import views
from shardc.ir.graph import Graph, operands, producer, type_of
from shardc.ir.in_place import last_reads
from shardc.ir.ops.columns import SUBTRACT_AT, write_subtract_at
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD
from shardc.ir.storages import Operand, layouts
from shardc.runtime.execute.instructions import Listing
from shardc.torch_compat import builtin_of

aten = torch.ops.aten

# Elementwise op -> what computes it into a tensor that it is given, and the name of that argument. Overloads that torch
# generates (`mul.Scalar_out`) are none of these: they make a result, and copy it.
WRITERS: Mapping[Any, tuple[Callable[..., Any], str]] = {
    **{
        getattr(getattr(aten, name), overload): (getattr(torch, name), "out")
        for name, overloads in {
            **dict.fromkeys(("add", "sub", "mul", "div"), ("Tensor", "Scalar")),
            **dict.fromkeys(("neg", "exp", "log", "tanh", "sqrt", "rsqrt", "sigmoid", "cos", "sin"), ("default",)),
            **dict.fromkeys(("maximum", "minimum"), ("default",)),
            "pow": ("Tensor_Scalar",),
            "where": ("self",),
        }.items()
        for overload in overloads
    },
    aten.silu.default: (builtin_of(aten.silu.out), "out"),
    aten.gelu.default: (builtin_of(aten.gelu.out), "out"),
    **{
        getattr(aten, f"{name}_backward").default: (
            builtin_of(getattr(aten, f"{name}_backward").grad_input),
            "grad_input",
        )
        for name in ("tanh", "sigmoid", "silu", "gelu", "threshold")
    },
    SUBTRACT_AT: (write_subtract_at, "out"),
}
# Ops of ours that make memory which is the caller's alone, as ATen's do that view nothing.
FRESH = (LINEAR, LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD, SUBTRACT_AT)


def over_operands(
    graph: Graph, calls: Sequence[fx.Node], sections: Sequence[int], placed: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """The calls that write over an operand, with that operand. `calls` are a graph's in the order in which they run,
    `sections` tell those apart that run once a microbatch, in the first alone, or once a step. What is `placed` lies in
    an arena, a bucket or over what is held, and stays there."""
    over: dict[fx.Node, fx.Node] = {}
    if not any(call.target in WRITERS for call in calls):
        return over
    of, lies, _ = layouts(graph)
    index_of = {call: index for index, call in enumerate(calls)}
    last, returned = last_reads(calls, index_of, of), {of[value] for value in graph.output_values}

    def spent(value: fx.Node, index: int) -> bool:
        """Is the memory of a value its own, all of it, and read by this call for the last time?"""
        storage, made = of[value], producer(of[value].value)[0]
        if storage.value.op == "placeholder" or storage.value in placed or storage in returned or not _is_fresh(made):
            return False
        same_section = sections[index_of[made]] == sections[index]
        return same_section and last[storage] == index and storage.bytes == lies[value].bytes

    for index, call in enumerate(calls):
        if call.target not in WRITERS or call in placed or type_of(call).local_bytes(graph.mesh) != of[call].bytes:
            continue
        read = dict.fromkeys(operands(call))
        for value in (operands(call)[0],) if call.target is SUBTRACT_AT else read:
            alone = sum(of[other] is of[value] for other in read) == 1
            if alone and lies[value] == lies[call] and _in_order(lies[call]) and spent(value, index):
                over[call] = value
                break
    return over


def dead_slots(graph: Graph, listing: Listing) -> dict[fx.Node, int]:
    """The results of kernels that are written over an operand (`ir.dead_operands`), with its slot."""
    over = layouts(graph).over
    if not over:
        return {}
    slot_of = dict(zip(graph.placeholders, listing.inputs, strict=True))
    for instruction in listing.instructions:
        slot_of |= {value: slot for value, _, slot in instruction.yields}
    return {value: slot_of[operand] for value, operand in over.items()}


def _is_fresh(call: fx.Node) -> bool:
    is_aten = isinstance(call.target, OpOverload) and call.target.namespace == "aten"
    return call.target in FRESH or (is_aten and not views(call))


def _in_order(operand: Operand) -> bool:
    return torch.empty_strided(operand.shape, operand.strides, device="meta").is_contiguous()
