"""The models that `benchmarks/measurements` was taken with: a GPT and a Llama, as peers of ours run them in eager mode.

All of a model is bfloat16, embeddings and outputs are not tied, and the loss is computed from float32 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    sequence: int
    vocabulary: int
    gated: bool = False

    def model(self) -> nn.Module:
        """On the default device."""
        return Decoder(self).to(torch.bfloat16)


SIZES = {
    "gpt-1.3b": Sizes(24, 2048, 16, 16, 8192, 2048, 50304),
    "gpt-6.7b-slice": Sizes(8, 4096, 32, 32, 16384, 2048, 50304),
    "llama3-8b-slice": Sizes(8, 4096, 32, 8, 14336, 4096, 128256, gated=True),
}


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.size, narrow = s, s.width // s.heads * s.kv_heads
        self.q, self.out = (nn.Linear(s.width, s.width, bias=not s.gated) for _ in range(2))
        self.k, self.v = (nn.Linear(s.width, narrow, bias=not s.gated) for _ in range(2))

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        s = self.size
        q = self.q(x).unflatten(-1, (s.heads, -1)).transpose(1, 2)
        k, v = (part(x).unflatten(-1, (s.kv_heads, -1)).transpose(1, 2) for part in (self.k, self.v))
        if angles is not None:
            q, k = rotated(q, *angles), rotated(k, *angles)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=s.heads != s.kv_heads)
        return self.out(attended.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Mlp(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(s.width, s.hidden), nn.Linear(s.hidden, s.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class GatedMlp(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(s.width, s.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(s.hidden, s.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        norm = nn.RMSNorm if s.gated else nn.LayerNorm
        self.n1, self.n2 = norm(s.width), norm(s.width)
        self.attn, self.mlp = Attention(s), GatedMlp(s) if s.gated else Mlp(s)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attn(self.n1(x), angles)
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    """Logits and loss of next tokens."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.size, self.tok = s, nn.Embedding(s.vocabulary, s.width)
        if s.gated:
            width = s.width // s.heads
            angles = torch.arange(s.sequence)[:, None] * 500_000.0 ** -(torch.arange(0, width, 2) / width)
            angles = torch.cat((angles, angles), dim=-1)
            self.register_buffer("cos", angles.cos())
            self.register_buffer("sin", angles.sin())
        else:
            self.pos = nn.Parameter(torch.zeros(s.sequence, s.width))
        self.blocks = nn.ModuleList([Block(s) for _ in range(s.layers)])
        self.norm = (nn.RMSNorm if s.gated else nn.LayerNorm)(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(tokens)
        if not self.size.gated:
            x = x + self.pos
        angles = (self.cos, self.sin) if self.size.gated else None
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
