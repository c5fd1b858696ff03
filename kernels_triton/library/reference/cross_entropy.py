"""Cross-entropy of logits against class indices: loss and gradient together; in one piece, or per vocabulary shard.

A shard's part of a row is three numbers: its maximum m, the sum s of exp(x - m), and the target's logit (0 where the
target lies in another shard). Gathered over the shards, they give every rank the same log-sum-exp:

    M = max m,   total = sum of s * exp(m - M),   loss = log total - (sum of target logits - M),   lse = M + log total

Only differences to M enter what follows: lse is rounded at the logits' size.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.library.reference.wide import wide


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    grad_scale: Tensor | None = None,
    ignore: int = -100,
    in_place: bool = False,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [tokens], lse [tokens], dlogits), of logits [tokens, vocabulary] and target, int64 [tokens].

    dlogits is the gradient of the sum of losses, times grad_scale [] or None: 0 where that is 0, whatever the logits. A
    target that is `ignore` has loss and gradient 0; one out of range, NaN. `padded`: the rows of dlogits are whole 16
    bytes apart, as products want them, and zeros are between them.

    Raises what torch does for a target of another dtype, and for no classes.
    """
    stats, classes = cross_entropy_stats(logits, target).unsqueeze(0), logits.shape[-1]
    return cross_entropy_finish(logits, target, stats, classes, 0, grad_scale, ignore, in_place, padded)


def cross_entropy_stats(logits: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """[tokens, 3] of a shard, logits [tokens, columns], whose first class is `start`: what the caller gathers.

    target, int64 [tokens], are classes of the whole vocabulary. Raises what torch does for no columns.
    """
    x = wide(logits)
    top = x.amax(-1)
    finite = torch.where(top == -torch.inf, 0.0, top)
    total = (x - finite.unsqueeze(-1)).exp().sum(-1)
    here = (target >= start) & (target < start + x.shape[-1])
    logit = x.gather(-1, (target - start).clamp(0, x.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    return torch.stack((top, total, torch.where(here, logit, 0.0)), -1)


def cross_entropy_finish(
    logits: Tensor,
    target: Tensor,
    stats: Tensor,
    classes: int,
    start: int = 0,
    grad_scale: Tensor | None = None,
    ignore: int = -100,
    in_place: bool = False,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss, lse, this shard's dlogits), given every shard's stats [shards, tokens, 3]; `classes` in all.

    logits [tokens, columns], target [tokens], grad_scale [] or None, and the rest as in `cross_entropy`. Raises what
    torch does for stats of no shards.
    """
    top = stats[..., 0].amax(0)
    finite = torch.where(top == -torch.inf, 0.0, top)
    total = (stats[..., 1] * (stats[..., 0] - finite).exp()).sum(0)
    lse = top + total.log()
    ignored = target == ignore
    wrong = ~ignored & ((target < 0) | (target >= classes))
    loss = torch.where(ignored, 0.0, torch.where(wrong, torch.nan, total.log() - (stats[..., 2].sum(0) - top)))
    grad = (wide(logits) - top.unsqueeze(-1)).exp() / total.unsqueeze(-1)
    column = torch.arange(start, start + logits.shape[-1], device=logits.device)
    grad = grad - (column == target.unsqueeze(-1)).to(grad.dtype)
    if grad_scale is not None:
        factor = wide(grad_scale)
        grad = torch.where(factor == 0.0, 0.0, grad * factor)
    grad = torch.where(ignored.unsqueeze(-1), 0.0, torch.where(wrong.unsqueeze(-1), torch.nan, grad)).to(logits.dtype)
    if padded:
        more = -grad.shape[-1] % (16 // grad.element_size())
        grad = pad(grad, (0, more))[:, : grad.shape[-1]]
    return loss, lse, logits.copy_(grad) if in_place else grad
