"""Is the loss of a step of several microbatches the loss of its whole batch?

    mean over rows            a microbatch's loss averages as the batch's does
    contrastive, sum, tokens  rows meet in the loss, are summed, or count unequally: the mean of the microbatches'
                              losses is another number, and its gradient another gradient
    balance of experts        a product of two means over the batch; its coefficient makes it a small part of the loss

The step is what the plan says either way, and what torch does when it accumulates. Nothing in the program shows it, so
the model is asked: eager PyTorch evaluates the batch once whole, and once in microbatches. It does so as
`model.eval()`, which draws no random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.diagnostic import Diagnostic
from shardc.runtime.oracle.eager_witness import EagerTraining

ROUNDED = 1e-4  # relative: beyond what rounding in the model's own dtype explains
ROUNDED_IN_DOUBLE = 3e-6  # the model is lifted to float64; what it casts to float32 by itself still rounds


def whole_batch_finding(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor] | None,
    batch: Any,
    microbatches: int,
    counted: Callable[[Any], int] | None,
    dtypes: tuple[torch.dtype | None, ...],
) -> Diagnostic | None:
    """SC225 where the two losses differ. `dtypes` are tried in turn; None is the model's own."""
    for dtype in dtypes:
        try:
            whole, parts = (_evaluated(model, loss, batch, count, counted, dtype) for count in (1, microbatches))
        except Exception:  # of the user's code: `verify` says that it does not run
            continue
        if whole is None or parts is None or not math.isfinite(whole) or not math.isfinite(parts):
            return None
        rounded = ROUNDED_IN_DOUBLE if dtype is torch.float64 else ROUNDED
        if abs(whole - parts) <= rounded * max(abs(whole), abs(parts)):
            return None
        digits = 6 if f"{parts:.6g}" != f"{whole:.6g}" else 9
        return Diagnostic(
            "SC225",
            f"{microbatches} microbatches have a mean loss of {parts:.{digits}g}, and the whole batch one of "
            f"{whole:.{digits}g}",
            "warning",
            cause="the loss is no mean over rows that count alike, so it depends on how the batch is split",
            hint="if tokens count, write loss: {tokens: labels}; a loss over all rows (a contrastive one, the balance "
            "of experts) or a sum is itself in one microbatch alone",
        )
    return None


def _evaluated(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor] | None,
    batch: Any,
    microbatches: int,
    counted: Callable[[Any], int] | None,
    dtype: torch.dtype | None,
) -> float | None:
    training = EagerTraining(model, loss, dtype, microbatches=microbatches, counted=counted, evaluates=True)
    with training.active() as eager:
        value = eager.step(batch).get(("loss", "loss"))
    return None if value is None else float(value)
