"""The cheapest Python callable that does what an op of a graph does: the same ATen kernel on the same operands.

    aten.add.Tensor       torch.add: its arguments are parsed in C++
    shardc.linear         its Python kernel for the device, without the dispatcher's way there and back
    any other             the op's own builtin

`DIRECT` lists ops whose function in `torch` has the op's arguments in the op's order, and takes no other overload for
them; `tests/runtime/test_direct_call.py` compares each with its op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import isbuiltin, signature
from typing import Any

import torch
from torch._ops import OpOverload

from kernels_triton.base.library import kernel_for
from shardc.torch_compat import builtin_of

aten = torch.ops.aten
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.add.out: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.sub.out: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.mul.out: torch.mul,
    aten.div.Tensor: torch.div,
    aten.div.out: torch.div,
    aten.sqrt.default: torch.sqrt,
    aten.sqrt.out: torch.sqrt,
    aten.rsqrt.default: torch.rsqrt,
    aten.neg.default: torch.neg,
    aten.exp.default: torch.exp,
    aten.tanh.default: torch.tanh,
    aten.maximum.default: torch.maximum,
    aten.where.self: torch.where,
    aten.lerp.Scalar: torch.lerp,
    aten.lerp.Scalar_out: torch.lerp,
    aten.reshape.default: torch.reshape,
    aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.t.default: torch.t,
    aten.expand.default: torch.Tensor.expand,
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.embedding.default: torch.embedding,
    aten.native_layer_norm.default: torch.native_layer_norm,
}


def direct_call(
    target: Callable[..., Any], device: torch.device | None = None, named: Iterable[str] = ()
) -> Callable[..., Any]:
    """What to call in the place of an op, given the names of keyword arguments. Functions that are no ops stay."""
    if not isinstance(target, OpOverload):
        return target
    if target in DIRECT:
        return DIRECT[target]
    kernel = None if device is None else kernel_for(target, device)
    names = {*named}
    if kernel is None or (names and (isbuiltin(kernel) or not names <= signature(kernel).parameters.keys())):
        return builtin_of(target)
    return kernel
