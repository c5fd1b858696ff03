"""The ops that torch has, of which each must be known to kernels and to sharding rules, or be in a table that says why
it is not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
TAGS = [torch.Tag.pointwise, *([torch.Tag.reduction] if hasattr(torch.Tag, "reduction") else [])]


def functional() -> Iterator[OpOverload]:
    """Those that a graph may have: functions of tensors, no versions in place or of Python numbers. Of the dispatcher,
    which has all of them: `dir(torch.ops.aten)` has those that someone has used."""
    for name in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, path = name.partition("::")
        packet, _, overload = path.partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None) if namespace == "aten" else None
        if isinstance(op, OpOverload) and not op._schema.is_mutable:
            yield op


def tagged(tag: torch.Tag) -> Iterator[OpOverload]:
    """Those that torch says are pointwise, or reductions."""
    return (op for op in functional() if tag in op.tags)


def backward_formulas() -> Iterator[OpOverload]:
    """Those whose name says that they are the gradient of another op; none of them is tagged."""
    return (op for op in functional() if "_backward" in short(op))


def short(op: OpOverload) -> str:
    """`aten::glu_backward` without its namespace."""
    return op._schema.name.removeprefix("aten::")


def composite(op: OpOverload) -> bool:
    """Does torch itself make a trace of it in other ops?"""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
