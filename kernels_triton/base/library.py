"""The one `torch.library.Library("shardc")`, and how an op is added to it.

An op is a schema, a reference kernel and a fake (shapes and strides only). Plain `Library.define` is
used instead of `custom_op`: the latter wraps every call in Python, which costs more than a small op.
The reference kernel is CompositeExplicitAutograd: one Python function for every real device, and the
op stays whole under tracing. Faster kernels register for their own dispatch key.

Ops carry no autograd formula at the dispatcher: gradients are written into the graph when it is
traced (each file here has an `autograd.Function` beside its ops), and a finished graph needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

LIBRARY = torch.library.Library("shardc", "DEF")
_KERNELS: dict[tuple[str, str], Callable[..., Any]] = {}  # by op and dispatch key, those in Python


def define(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> OpOverload:
    """Add `shardc::<schema>` and return its overload, the target that graphs hold.

    `fake` must give the strides that `kernel` gives. No op may return one of its arguments: a schema without
    alias annotations promises fresh results, and functionalization relies on that.
    """
    name = schema.partition("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    implement(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"shardc::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.shardc, name).default


def implement(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register the kernel of an op for a dispatch key."""
    LIBRARY.impl(name, kernel, key)
    _KERNELS[name, key] = kernel


def kernel_for(op: OpOverload, device: torch.device) -> Callable[..., Any] | None:
    """The Python kernel that the dispatcher calls for tensors of a device without gradients; None of other ops."""
    if op.namespace != LIBRARY.ns:
        return None
    name = op.name().partition("::")[2]
    keys = ("CUDA" if device.type == "cuda" else "CPU", "CompositeExplicitAutograd")
    return next((_KERNELS[name, key] for key in keys if (name, key) in _KERNELS), None)
