"""AdamW on one flat bucket, as torch.optim.AdamW computes it, with unscaling, clipping and the copy in the same
pass."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    lr: Tensor,
    step: Tensor,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    grad_scale: Tensor | None = None,
    skip: Tensor | None = None,
    copy: Tensor | None = None,
) -> None:
    """In place on param, exp_avg and exp_avg_sq [numbers], by grad [numbers] (Loshchilov & Hutter 2019, algorithm 2).

    lr [], step [] (1 in the first), grad_scale [] (1 / loss scale times the clipping coefficient) and skip [] (nothing
    happens where it is not 0) are 0-dim tensors; copy [numbers] gets the new parameters in its own dtype.

    Raises what torch does for a param that is a leaf, where autograd is on.
    """
    p = wide(param)
    g, m, v, rate = (t.to(p.device, p.dtype) for t in (grad, exp_avg, exp_avg_sq, lr))
    if grad_scale is not None:
        g = g * grad_scale.to(p.dtype)
    beta1, beta2 = betas
    first = 1.0 - beta1 ** step.double()
    second = 1.0 - beta2 ** step.double()
    m = m + (g - m) * (1.0 - beta1)
    v = v * beta2 + g.square() * (1.0 - beta2)
    denominator = v.sqrt() / second.sqrt().to(p.dtype) + eps
    p = p * (1.0 - rate * weight_decay) - (rate / first.to(p.dtype)) * (m / denominator)
    keep = torch.zeros((), dtype=torch.bool, device=param.device) if skip is None else skip.reshape(()) != 0
    for target, value in ((param, p), (exp_avg, m), (exp_avg_sq, v)):
        target.copy_(torch.where(keep, target, value.to(target.dtype)))
    if copy is not None:
        copy.copy_(param)
