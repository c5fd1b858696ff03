"""Connectionist temporal classification: minus the log-probability of each sequence of labels, and its gradient.

    ctc       [T, N, C], [N, S], [N], [N] -> [N]                  sequence by sequence
    ctc_grad  [N], [T, N, C], [N, S], [N], [N] -> [T, N, C]       linear in the first

torch's own `_ctc_loss` yields, beside the losses, a table whose width is the length of the longest labels: a number
that depends on the batch, and no shape of a program. `ctc` yields the losses alone, and `ctc_grad` computes that table
anew, which costs little beside a network. Labels are padded to the same length; `ctc_loss` pads those that come one
after another, without gaps, as `labels.masked_select(labels >= 0)` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define

aten = torch.ops.aten


def _ctc(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int) -> Tensor:
    losses, _ = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank)
    return losses.contiguous()


def _ctc_fake(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


def _ctc_grad(
    g: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    losses, table = aten._ctc_loss.Tensor(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    lengths = input_lengths, target_lengths
    return aten._ctc_loss_backward.Tensor(
        g.contiguous(), log_probs, targets, *lengths, losses, table, blank, zero_infinity
    ).contiguous()


def _ctc_grad_fake(g: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


CTC = define(
    "ctc(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank) -> Tensor",
    _ctc,
    _ctc_fake,
)
CTC_GRAD = define(
    "ctc_grad(Tensor g, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity) -> Tensor",
    _ctc_grad,
    _ctc_grad_fake,
)


class _CtcGradient(torch.autograd.Function):
    """Linear in `g`; of the rest it has no derivative, as in torch."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        return CTC_GRAD(*operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("torch's ctc_loss has no second derivative")


class _Ctc(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, *rest: Any) -> Tensor:
        *lengths, blank, zero_infinity = rest
        ctx.save_for_backward(log_probs, *lengths)
        ctx.options = blank, zero_infinity
        return CTC(log_probs, *lengths, blank)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _CtcGradient.apply(grads[0], *ctx.saved_tensors, *ctx.options), None, None, None, None, None


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str | int = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss` out of the ops above."""
    lengths_in, lengths = _as_tensor(input_lengths), _as_tensor(target_lengths)
    batched = log_probs.dim() == 3
    if not batched:
        log_probs = log_probs.unsqueeze(1)
        targets = targets.reshape(1, -1)
    count = log_probs.shape[1]
    lengths_in, lengths = lengths_in.reshape(count), lengths.reshape(count)
    if targets.dim() == 1:
        targets = _in_rows(targets, lengths)
    losses = _Ctc.apply(log_probs, targets, lengths_in, lengths, blank, zero_infinity)
    assert isinstance(losses, Tensor)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction in ("mean", 1):
        return (losses / lengths.clamp(min=1).to(losses.dtype)).mean()
    if reduction in ("sum", 2):
        return losses.sum()
    if reduction not in ("none", 0):
        raise ValueError(f"{reduction} is not a valid value for reduction")
    return losses if batched else losses.squeeze(0)


def _as_tensor(lengths: Tensor | Sequence[int]) -> Tensor:
    return lengths.to(torch.int64) if isinstance(lengths, Tensor) else torch.tensor(lengths, dtype=torch.int64)


def _in_rows(targets: Tensor, lengths: Tensor) -> Tensor:
    """Labels that stand one after another, a row for each sequence; what is behind a sequence's end is not read."""
    first = lengths.cumsum(0) - lengths
    places = first[:, None] + torch.arange(targets.shape[0])
    return targets[places.clamp(max=targets.shape[0] - 1)]


def left_aligned(targets: Tensor, mask: Tensor) -> Tensor:
    """Rows with what a mask chooses of each first, in order."""
    order = mask.logical_not().to(torch.int8).argsort(dim=1, stable=True)
    return targets.gather(1, order)
