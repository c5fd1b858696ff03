"""Softmax over the last dim. A fully masked row is all zeros."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_triton.library.reference.wide import wide


def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(x * scale + mask) over the last dim of x [..., columns].

    mask [...] broadcasts against x: boolean, True where a column counts, or added. `causal` keeps column c of query q
    of x [..., queries, columns] where c <= q + columns - queries. Raises ValueError for `causal` of a single dim.
    """
    logits = wide(x) * scale
    if mask is not None:
        keep = mask.dtype == torch.bool
        logits = logits.masked_fill(~mask, -torch.inf) if keep else logits + mask.to(logits.dtype)
    if causal:
        logits = logits.masked_fill(~seen(x), -torch.inf)
    y = torch.softmax(logits, -1)
    return y.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0).to(x.dtype)


def softmax_backward(dy: Tensor, y: Tensor, scale: float = 1.0, causal: bool = False) -> Tensor:
    """scale * y * (dy - sum(dy * y)), of dy and y [..., columns]; what they hold past the causal edge is not read.

    Raises ValueError for `causal` of a single dim.
    """
    g, wy = wide(dy), wide(y)
    if causal:
        g, wy = (t.masked_fill(~seen(t), 0.0) for t in (g, wy))
    return (scale * wy * (g - (g * wy).sum(-1, keepdim=True))).to(y.dtype)


def seen(x: Tensor) -> Tensor:
    """[queries, columns], True where causal attention looks."""
    queries, cols = x.shape[-2:]
    return torch.ones(queries, cols, dtype=torch.bool, device=x.device).tril(cols - queries)
