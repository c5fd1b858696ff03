"""Mixtures of experts as tutorials and older libraries write them: a loop over experts, each with its own tokens.

Mixtral            transformers before 5: `torch.where` of a one-hot mask, `index_add_`, experts without tokens skipped
MixtralHit         the same over `nonzero` of the experts that have tokens
DeepSeek           the authors' own code of V3: counts as Python numbers, `y[token] += rows`
DeepSeekTrained    the authors' own code of V2 while training: `y[flat == e] = expert(x[flat == e])`
MakeMoe            a tutorial: masks of tokens, scores by column
LitGpt             `zip(masks, experts)`
Mistral            the reference of Mistral
Switch             one expert a token; all are called before any result is written
Stacked            weights of all experts in one parameter
Regularised        biases, and dropout behind each expert
Unlike             experts of different widths
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, WIDTH, EXPERTS, CHOSEN = 16, 24, 4, 2


class Expert(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Mixture(nn.Module):
    """A layer, a router, experts; the loss is the mean of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts: Any = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(CHOSEN)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        return (h + self.moe(h)).square().mean()

    def moe(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Mixtral(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = x.view(-1, HIDDEN)
        weights, ids = self.route(x)
        out = torch.zeros((batch * length, HIDDEN), dtype=x.dtype, device=x.device)
        mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            expert = self.experts[e]
            choice, token = torch.where(mask[e])
            if token.shape[0] == 0:
                continue
            current = expert(x[None, token].reshape(-1, HIDDEN)) * weights[token, choice, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out.reshape(batch, length, HIDDEN)


class MixtralHit(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        x = x.view(-1, HIDDEN)
        weights, ids = self.route(x)
        out = torch.zeros((batch * length, HIDDEN), dtype=x.dtype, device=x.device)
        mask = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            expert = self.experts[e]
            choice, token = torch.where(mask[e].squeeze(0))
            current = expert(x[None, token].reshape(-1, HIDDEN)) * weights[token, choice, None]
            out.index_add_(0, token, current.to(x.dtype))
        return out.reshape(batch, length, HIDDEN)


class DeepSeek(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, HIDDEN)
        weights, ids = self.route(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
        for e in range(EXPERTS):
            if counts[e] == 0:
                continue
            token, choice = torch.where(ids == e)
            y[token] += self.experts[e](x[token]) * weights[token, choice, None]
        return y.view(shape)


class DeepSeekTrained(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, HIDDEN)
        weights, ids = self.route(x)
        flat = ids.view(-1)
        x = x.repeat_interleave(CHOSEN, dim=0)
        y = torch.empty_like(x)
        for e, expert in enumerate(self.experts):
            y[flat == e] = expert(x[flat == e])
        return (y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(dim=1).view(*shape)


class MakeMoe(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        top, ids = logits.topk(CHOSEN, dim=-1)
        scores = F.softmax(torch.full_like(logits, float("-inf")).scatter(-1, ids, top), dim=-1)
        out = torch.zeros_like(x)
        flat, flat_scores = x.view(-1, x.size(-1)), scores.view(-1, scores.size(-1))
        for e, expert in enumerate(self.experts):
            mask = (ids == e).any(dim=-1)
            flat_mask = mask.view(-1)
            if flat_mask.any():
                rows = expert(flat[flat_mask]) * flat_scores[flat_mask, e].unsqueeze(1)
                out[mask] += rows.squeeze(1)
        return out


class LitGpt(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        x = x.view(-1, width)
        weights, ids = self.route(x)
        masks = (ids.unsqueeze(-1) == torch.arange(EXPERTS, device=x.device)).permute(2, 0, 1)
        y = torch.zeros_like(x)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, choice = torch.where(mask)
            y[token] += weights[token, choice, None] * expert(x[token])
        return y.view(batch, length, width)


class Mistral(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        weights, ids = self.route(flat)
        results = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, choice = torch.where(ids == e)
            results[token] = results[token] + weights[token, choice].unsqueeze(-1) * expert(flat[token])
        return results.view_as(x)


class Switch(Mixture):
    def moe(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, HIDDEN)
        weight, route = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(x.shape)
        tokens = [torch.eq(route, e).nonzero(as_tuple=True)[0] for e in range(EXPERTS)]
        rows = [self.experts[e](x[tokens[e], :]) for e in range(EXPERTS)]
        for e in range(EXPERTS):
            out[tokens[e], :] = rows[e]
        return (out * weight[:, None]).view(shape)


class Stacked(Mixture):
    def __init__(self) -> None:
        super().__init__()
        del self.experts
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH) / 4)

    def moe(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.view(-1, HIDDEN)
        weights, ids = self.route(x)
        out = torch.zeros_like(x)
        for e in range(EXPERTS):
            token, choice = torch.where(ids == e)
            if token.numel() == 0:
                continue
            gate, up = (F.linear(x[token], self.up[e]) + self.bias[e]).chunk(2, -1)
            rows = F.linear(F.silu(gate) * up, self.down[e])
            out.index_add_(0, token, rows * weights[token, choice].unsqueeze(-1))
        return out.view(shape)


class Regularised(LitGpt):
    def __init__(self, dropout: float = 0.25) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN), nn.Dropout(dropout))
            for _ in range(EXPERTS)
        )


class Unlike(Mistral):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Expert(WIDTH + e) for e in range(EXPERTS)])


GROUPED: tuple[type[Mixture], ...] = (
    Mixtral, MixtralHit, DeepSeek, DeepSeekTrained, MakeMoe, LitGpt, Mistral, Switch, Stacked,
)  # fmt: skip


def rows(seed: int = 1, batch: int = 4, length: int = 6) -> Tensor:
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
