"""One parameter's update by AdamW, as one op: what the pass `merge_updates` makes of some twenty calls.

    w, m, v = adamw(w, g, m, v, step, lr, beta1, beta2, weight_decay, eps)

    m = lerp(m, g, 1 - beta1)            v = beta2 v + (1 - beta2) g^2
    w = (1 - lr weight_decay) w - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + eps)

It is elementwise, so that a rank updates its own shards, and holds nothing else meanwhile. A `step` is counted up
before. On CPUs, and on GPUs in float32, it is ATen's fused kernel.

Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization"; with a weight decay of 0, Kingma and Ba 2015,
"Adam: A Method for Stochastic Optimization".
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kernels_triton.base.inplace import INTO, Into
from kernels_triton.base.library import define
from shardc import torch_compat

DTYPES = (torch.float32, torch.float64)
IN_PLACE = {0: 0, 1: 2, 2: 3}  # result -> the operand of which it is the new value


def write_adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, weight_decay: float, eps: float, *, over: Mapping[int, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The update with some results, by their positions, written `over` tensors: the operands', or any other."""
    if over and _stays(over.get(0), w) and _stays(over.get(1), m) and _stays(over.get(2), v) and g.is_contiguous():
        torch_compat.fused_adamw(w, g, m, v, step, lr, (beta1, beta2), weight_decay, eps)
        return w, m, v
    updated: list[Tensor] = []
    for result, old in enumerate((w, m, v)):
        new = over.get(result) if over else None
        if new is None:
            new = old.clone(memory_format=torch.contiguous_format)
        elif new is not old:
            new.copy_(old)
        updated.append(new)
    # The kernel goes through memory and looks at no strides.
    plain = [x if x.is_contiguous() else x.contiguous() for x in (*updated, g)]
    torch_compat.fused_adamw(plain[0], plain[3], plain[1], plain[2], step, lr, (beta1, beta2), weight_decay, eps)
    for new, x in zip(updated, plain, strict=False):
        if new is not x:
            new.copy_(x)
    w, m, v = updated
    return w, m, v


def _stays(new: Tensor | None, old: Tensor) -> bool:
    """Can the kernel write a result where its operand lies?"""
    return new is old and old.is_contiguous()


def _adamw(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, weight_decay: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return write_adamw(w, g, m, v, step, lr, beta1, beta2, weight_decay, eps)


def _adamw_fake(
    w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: Tensor, lr: Tensor,
    beta1: float, beta2: float, weight_decay: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return w.new_empty(w.shape), m.new_empty(m.shape), v.new_empty(v.shape)


ADAMW = define(
    "adamw(Tensor w, Tensor g, Tensor m, Tensor v, Tensor step, Tensor lr, float beta1, float beta2,"
    " float weight_decay, float eps) -> (Tensor, Tensor, Tensor)",
    _adamw,
    _adamw_fake,
)
INTO[ADAMW] = Into(lambda *_: frozenset(IN_PLACE.items()), write_adamw, anywhere=True)
