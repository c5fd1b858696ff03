"""Experts as libraries write them with grouped products, for tests that choose the routing."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """`ids` routes each token of `x` to some experts, whose results are added, weighted by `scale`."""

    def __init__(self, experts: int = 4, hidden: int = 6, width: int = 8, *, bias: bool = False) -> None:
        super().__init__()
        self.experts = experts
        self.up = nn.Parameter(torch.randn(experts, 2 * width, hidden) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / width**0.5)
        self.up_bias = nn.Parameter(torch.randn(experts, 2 * width)) if bias else None
        self.down_bias = nn.Parameter(torch.randn(experts, hidden)) if bias else None

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        tokens, chosen = ids.flatten(0, -2), ids.shape[-1]
        flat = tokens.reshape(-1)
        ordered, perm = torch.sort(flat)
        rows = x.flatten(0, -2)[perm // chosen]
        counts = torch.histc(ordered.float(), bins=self.experts, min=0, max=self.experts - 1)
        offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
        y = F.grouped_mm(rows, self.up.transpose(-2, -1), offs=offs)
        if self.up_bias is not None:
            y = y + self.up_bias[ordered]
        gate, up = y.chunk(2, dim=-1)
        y = F.grouped_mm(F.silu(gate) * up, self.down.transpose(-2, -1), offs=offs)
        if self.down_bias is not None:
            y = y + self.down_bias[ordered]
        y = y * scale.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0))
        return y[inverse].view(tokens.shape[0], chosen, -1).sum(1).view(x.shape)


def routed(ids: Tensor, hidden: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """A batch whose tokens are routed so."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(*ids.shape[:-1], hidden, generator=generator),
        "ids": ids,
        "scale": torch.rand(*ids.shape, generator=generator),
    }
