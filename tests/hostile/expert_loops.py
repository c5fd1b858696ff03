"""Loops over experts with something in them that a grouped form could forget."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import Net, case


class Mixture(Net):
    """Three experts, of which each row has two."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts: Any = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.gate(h).softmax(-1).topk(2)

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.experts[e](rows).tanh()

    def between(self, h: Tensor) -> Tensor:
        weights, ids = self.route(h)
        out = torch.zeros_like(h)
        for e in range(3):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, h[token]) * weights[token, choice, None])
        return out


@case()
class ExpertsOfAList(Mixture):
    pass


@case()
class ExpertsThatShareAWeight(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts[2].weight = self.experts[0].weight


@case()
class ExpertsThatAreOne(Mixture):
    """The same module under each number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(6, 6)] * 3)


@case()
class ExpertsOfWhichOneIsFrozen(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.experts[1].requires_grad_(False)


@case()
class ExpertsThatTheRouterTrains(Mixture):
    """All of them frozen; the router is not."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)


@case()
class ExpertsWithAdapters(Mixture):
    """Frozen weights and low-rank additions, of which all share the first half."""

    def __init__(self) -> None:
        super().__init__()
        self.experts.requires_grad_(False)
        self.first = nn.Linear(6, 2, bias=False)
        self.second = nn.ParameterList([nn.Parameter(torch.randn(6, 2) / 2) for _ in range(3)])

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return (self.experts[e](rows) + F.linear(self.first(rows), self.second[e]) * (e + 1)).tanh()


@case()
class ExpertsWithScales(Mixture):
    """A scale that all share, one for each, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.own = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.arange(3.0))

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return (self.experts[e](rows) * self.scale * self.own[e] + self.shift[e]).tanh()


@case()
class ExpertsWithANorm(Mixture):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(6) for _ in range(3)])

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.norms[e](self.experts[e](rows))


@case()
class ExpertsThatDiffer(Mixture):
    """By a number of Python."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.experts[e](rows) * (e + 1)


@case()
class ExpertsByAnotherNumber(Mixture):
    """The weights of the expert before."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.experts[e - 1](rows)


@case()
class ExpertsThatReadTheScoresOfOthers(Mixture):
    def between(self, h: Tensor) -> Tensor:
        scores = self.gate(h).softmax(-1)
        ids = scores.topk(2)[1]
        out = torch.zeros_like(h)
        for e in range(3):
            token, _ = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, h[token]) * scores[token, (e + 1) % 3, None])
        return out


@case()
class ExpertsOfTheWorstScores(Mixture):
    """Chosen by a slice of an order."""

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(h).softmax(-1)
        ids = scores.argsort(-1)[:, :2]
        return scores.gather(1, ids), ids


@case()
class ExpertsThatATokenMayChooseTwice(Mixture):
    """No two of the ids have to differ, and one is of no expert."""

    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        first = self.gate(h).argmax(-1)
        ids = torch.stack([first, (first * 2) % 4], -1)
        return h[:, :2].sigmoid(), ids


@case()
class ExpertsUnderACheckpoint(Mixture):
    def between(self, h: Tensor) -> Tensor:
        out: Any = checkpoint(super().between, h, use_reentrant=False)
        return out


@case()
class ExpertsEachUnderACheckpoint(Mixture):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        out: Any = checkpoint(super().expert, e, rows, use_reentrant=False)
        return out


@case()
class ExpertsWithoutAGradientOfTheRouter(Mixture):
    def route(self, h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            weights, ids = super().route(h)
        return weights, ids


@case()
class ExpertsThatWriteOverEachOther(Mixture):
    """The last one wins."""

    def between(self, h: Tensor) -> Tensor:
        out = h.clone()
        _, ids = self.route(h.detach())
        for e in range(3):
            mask = (ids == e).any(-1)
            out[mask] = self.expert(e, h[mask])
        return out


@case()
class ExpertsOneBehindTheOther(Mixture):
    """Each reads what those before have made."""

    def between(self, h: Tensor) -> Tensor:
        weights, ids = self.route(h)
        out = h.clone()
        for e in range(3):
            token, choice = torch.where(ids == e)
            out[token] = out[token] + self.expert(e, out[token]) * weights[token, choice, None]
        return out


@case()
class ExpertsInTwoLoops(Mixture):
    """The second one reads what the first has made, by the same ids."""

    def between(self, h: Tensor) -> Tensor:
        weights, ids = self.route(h)
        first, second = torch.zeros_like(h), torch.ones_like(h)
        for e in range(3):
            token, choice = torch.where(ids == e)
            first.index_add_(0, token, self.expert(e, h[token]) * weights[token, choice, None])
        for e in range(3):
            token, _ = torch.where(ids == e)
            second[token] += self.expert(e, first[token])
        return second


@case()
class ExpertsWhoseSumIsASlice(Mixture):
    """Rows are added to a part of another tensor."""

    def between(self, h: Tensor) -> Tensor:
        weights, ids = self.route(h)
        whole = torch.ones(2, *h.shape, dtype=h.dtype)
        out = whole[1]
        for e in range(3):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, h[token]) * weights[token, choice, None])
        return whole.sum(0)


@case()
class ExpertsWhoseSumIsReturned(Mixture):
    """By a function of autograd, which reads it as it is then."""

    def between(self, h: Tensor) -> Tensor:
        class Doubled(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, *grads: Tensor) -> Tensor:
                return grads[0] * 2

        weights, ids = self.route(h)
        out = torch.zeros_like(h)
        for e in range(3):
            token, choice = torch.where(ids == e)
            out.index_add_(0, token, self.expert(e, h[token]) * weights[token, choice, None])
        doubled: Any = Doubled.apply(out)
        return doubled


@case(random=True)
class ExpertsWithDropout(Mixture):
    def expert(self, e: int, rows: Tensor) -> Tensor:
        return F.dropout(self.experts[e](rows), 0.3, self.training)


@case(refused="SC101")
class ExpertsThatAreCounted(Mixture):
    """How many have rows is a number of Python."""

    def between(self, h: Tensor) -> Tensor:
        weights, ids = self.route(h)
        out, busy = torch.zeros_like(h), 0
        for e in range(3):
            token, choice = torch.where(ids == e)
            if token.numel():
                busy += 1
                out.index_add_(0, token, self.expert(e, h[token]) * weights[token, choice, None])
        return out / max(busy, 1)


@case(refused="SC101")
class ExpertsWithBatchStatistics(Mixture):
    """Each standardises its rows together."""

    def expert(self, e: int, rows: Tensor) -> Tensor:
        return self.experts[e](rows) - rows.mean(0).cumsum(0) * rows.cumsum(0)


@case(refused="SC101")
class ExpertsByRowsOfAnother(Mixture):
    def between(self, h: Tensor) -> Tensor:
        _, ids = self.route(h)
        first, second = (torch.where(ids == e)[0] for e in (0, 1))
        return torch.zeros_like(h).index_add(0, first, self.expert(0, h[second]))
