"""AdamW on one flat bucket: unscale, clip, update and the low-precision copy in one pass."""

from __future__ import annotations

import math

from torch import Tensor

from kernels_triton import launch, reference
from kernels_triton.checks import checked, expect, floats, scalars, shaped

BLOCK = 1024


@checked
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
    """In place on `param` and both moments, each flat and contiguous.

    `lr`, `step` (1 in the first), `grad_scale` (1 / loss scale times the clipping coefficient) and `skip` (nothing
    happens where it is not 0) are 0-dim tensors: a CUDA graph replays with new values. `copy` gets the new parameters
    in its own dtype.
    """
    floats("adamw", param, param=param, grad=grad, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, copy=copy, lr=lr)
    scalars("adamw", param, lr=lr, step=step, grad_scale=grad_scale, skip=skip)
    for name, value in (("grad", grad), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("copy", copy)):
        shaped("adamw", name, value, (param.numel(),), param)
        expect(value is None or value.is_contiguous(), "adamw", f"{name} is not contiguous")
    shaped("adamw", "param", param, (param.numel(),), param)
    expect(param.is_contiguous(), "adamw", "param is not contiguous")
    fits = len(betas) == 2 and all(0.0 < beta < 1.0 for beta in betas)
    expect(fits, "adamw", f"betas are {betas}, expected two between 0 and 1", "0.9 and 0.999 are usual")
    if not launch.on_triton(param):
        reference.adamw(param, grad, exp_avg, exp_avg_sq, lr, step, betas, eps, weight_decay, grad_scale, skip, copy)
        return
    count = param.numel()
    launch.run(
        "adamw.adamw",
        (-(-count // BLOCK),),
        *(param, grad, exp_avg, exp_avg_sq, copy, lr, step, grad_scale, skip, count),
        *(math.log(betas[0]), math.log(betas[1]), 1.0 - betas[0], 1.0 - betas[1], betas[1], eps, weight_decay),
        BLOCK=BLOCK,
        warps=4,
    )
