"""AdamW on one flat bucket: unscale, clip, update and the low-precision copy in one pass."""

from __future__ import annotations

import math
from numbers import Real

import torch
from torch import Tensor

from kernels_triton.launch import launch
from kernels_triton.library import reference
from kernels_triton.library.checks import (
    checked,
    expect,
    expect_floats,
    expect_scalars,
    expect_shape,
    expect_writable,
    mark_written,
)

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
    """A step of AdamW (Loshchilov & Hutter 2019, algorithm 2), as torch.optim.AdamW takes it, in place.

        g = grad * grad_scale
        exp_avg += (g - exp_avg) * (1 - beta1),   exp_avg_sq = exp_avg_sq * beta2 + g * g * (1 - beta2)
        m = exp_avg / (1 - beta1 ** step),        v = exp_avg_sq / (1 - beta2 ** step)
        param = param * (1 - lr * weight_decay) - lr * m / (sqrt(v) + eps)

    param, grad, exp_avg and exp_avg_sq [numbers] are flat, contiguous, of floating point each; copy [numbers], if
    given, gets the new parameters in its own dtype. An nn.Parameter needs torch.no_grad(), as in every update, and a
    view if it is not flat: `param.view(-1)`. lr [], step [] (1 in the first), grad_scale [] (1 / loss scale times the
    clipping coefficient) and skip [] (nothing is updated unless it is 0) are 0-dim tensors on param's device, so that a
    CUDA graph replays with new values. The update is computed in float32, or in float64 if param is, and rounded once,
    to each tensor's dtype.

    Raises SC530 for a wrong operand (see `kernels_triton.ops`), for tensors that are not flat or not contiguous, for
    moments in float64 beside a param that is not, and for betas that are negative, or 1 or more.
    """
    flat = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "copy": copy}
    expect_floats("adamw", param, **flat, lr=lr, grad_scale=grad_scale)
    expect_scalars("adamw", param, lr=lr, step=step, grad_scale=grad_scale, skip=skip)
    for name, value in flat.items():
        expect_shape("adamw", name, value, (param.numel(),), param, f"pass {name}.view(-1)")
        if value is not None and not value.is_contiguous():
            hint = (
                "pass grad.contiguous()" if name == "grad" else f"{name} is written: make it contiguous, and keep that"
            )
            expect(False, "adamw", f"{name} is of stride {value.stride(0)}, expected 1", hint)
    for name, value in (("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        is_supported = value.dtype != torch.float64 or param.dtype == torch.float64
        message = f"{name} is {value.dtype}, param {param.dtype}: it would be computed in float32"
        expect(is_supported, "adamw", message, f"keep {name} in torch.float32, or param in torch.float64 too")
    expect_writable("adamw", param=param, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, copy=copy)
    fits = len(betas) == 2 and all(isinstance(beta, Real) and 0.0 <= beta < 1.0 for beta in betas)
    expect(fits, "adamw", f"betas are {betas}, expected two of 0 or more, below 1", "0.9 and 0.999 are usual")
    if not launch.runs_on_triton(param):
        reference.adamw(param, grad, exp_avg, exp_avg_sq, lr, step, betas, eps, weight_decay, grad_scale, skip, copy)
        return
    count = param.numel()
    logs = (math.log(beta) if beta else -math.inf for beta in betas)  # a power of 0 is 0
    launch.run(
        "adamw.adamw",
        (-(-count // BLOCK),),
        *(param, grad, exp_avg, exp_avg_sq, copy, lr, step, grad_scale, skip, count),
        *(*logs, 1.0 - betas[0], 1.0 - betas[1], betas[1], eps, weight_decay),
        BLOCK=BLOCK,
        warps=4,
    )
    mark_written(param, exp_avg, exp_avg_sq, copy)
