"""Constant values: a value that is one number throughout becomes a literal in the kernel, which then reads nothing.

    %scale = full([8, 64], 0.5)              0.5
    %count = _to_copy(full([8], 2.7))        i64: no constant, since 2.7 would have to be cast
    %small = full([8, 64], 0.1)              bf16: no constant, since the literal 0.1 has more bits than bfloat16

All other values are read from memory.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.graph import type_of

aten = torch.ops.aten
PASSING = (aten._to_copy.default, aten.view.default, aten.expand.default, aten.unsqueeze.default)
# By their ids: an op's own hash is written in Python.
CONSTANT = {id(op) for op in (*PASSING, aten.full.default, aten.scalar_tensor.default)}


def constant_value(node: fx.Node) -> float | int | bool | None:
    """The number that every element of a value equals, if the calls that compute it tell, and if its dtype holds that
    number exactly."""
    if id(node.target) not in CONSTANT:
        return None
    dtype = before = type_of(node).dtype
    if dtype.is_complex:
        return None
    if node.target in PASSING:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        number, before = constant_value(source), type_of(source).dtype
    elif node.target is aten.full.default and isinstance(node.args[1], (bool, int, float)):
        number = node.args[1]
    elif node.target is aten.scalar_tensor.default and isinstance(node.args[0], (bool, int, float)):
        number = node.args[0]
    else:
        return None
    if number is None or dtype == torch.bool:
        return None if number is None else bool(number)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return int(number) if limits.min <= number <= limits.max and number == int(number) else None
    rounds = dtype.itemsize == 2 or (dtype, before) == (torch.float64, torch.float32)
    stored = torch.tensor(float(number), dtype=before if dtype == torch.float64 else dtype).item() if rounds else number
    return float(number) if stored == number or number != number else None
