"""Optimizers that need whole matrices, several optimizers, and what they may be given: as eager PyTorch steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import Net, case

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Orthogonal(torch.optim.Optimizer):
    """Muon as people write it, in the dtype of its parameters: tall matrices are transposed, others not."""

    def __init__(self, params: Any, lr: float = 0.05, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(p.grad)
                x = p.grad.add(state["momentum"], alpha=group["momentum"])
                tall = x.size(-2) > x.size(-1)
                x = x.mT if tall else x
                x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
                for _ in range(3):
                    a, b, c = COEFFICIENTS
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * gram @ gram) @ x
                x = x.mT if tall else x
                p.add_(x, alpha=-group["lr"] * max(1, p.size(-2) / p.size(-1)) ** 0.5)


def by_shape(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    every = list(params)
    rest = torch.optim.SGD([p for p in every if p.ndim != 2], lr=0.05, momentum=0.9)
    return [Orthogonal([p for p in every if p.ndim == 2]), rest]


def matrices_only(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [Orthogonal([p for p in params if p.ndim == 2 and p.requires_grad])]


def overlapping(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    every = list(params)
    return [torch.optim.AdamW(every), Orthogonal([p for p in every if p.ndim == 2])]


def muon(params: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    """torch's own, which rounds to bfloat16."""
    every = list(params)
    rest = torch.optim.SGD([p for p in every if p.ndim != 2], lr=0.05)
    return [torch.optim.Muon([p for p in every if p.ndim == 2], lr=0.01), rest]


adafactor: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.Adafactor(params, lr=0.1)  # noqa: E731


@case(optimizer=by_shape)
class TwoOptimizers(Net):
    """Two matrices of one shape, shared out; biases are another optimizer's."""


@case(optimizer=overlapping, refused="SC107")
class TwoOptimizersOfOneParameter(Net):
    pass


@case(optimizer=matrices_only)
class ParametersOfNoOptimizer(Net):
    """Biases stay as they are."""


@case(optimizer=muon, tolerance=2e-4)
class MuonOfTorch(Net):
    pass


@case(optimizer=by_shape)
class MatricesThatDoNotDivide(Net):
    """Five of one shape, whose rows and columns no mesh divides, and two alone: tall, wide, of one row or column."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.ParameterList(nn.Parameter(torch.randn(5, 7) / 3) for _ in range(5))
        self.tall = nn.Parameter(torch.randn(7, 3) / 3)
        self.row, self.column = nn.Parameter(torch.randn(1, 6) / 3), nn.Parameter(torch.randn(6, 1) / 3)

    def between(self, h: Tensor) -> Tensor:
        x = h.tanh() * self.row + h @ self.column
        for w in self.wide:
            x = x + (x[..., :5] @ w @ self.tall)[..., :1].tanh()
        return x


@case(optimizer=by_shape)
class WholeTiedMatrix(Net):
    """One matrix, used at both ends: under a pipeline in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


@case(optimizer=matrices_only)
class FrozenMatrixAmongWholeOnes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.middle[1].weight.requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        for layer in self.middle:
            h = h + layer(h).tanh()
        return h


@case(optimizer=by_shape)
class UnusedMatrixAmongWholeOnes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(6, 6))


@case(optimizer=adafactor)
class FactoredMoments(Net):
    """Adafactor of what has one dim, none, and three; of rows that no mesh divides."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.odd, self.many = nn.Parameter(torch.randn(7, 6) / 3), nn.Parameter(torch.randn(3, 6, 5) / 3)

    def between(self, h: Tensor) -> Tensor:
        many = torch.einsum("...i,kij->...j", h, self.many).mean(-1, keepdim=True)
        return (h + (h @ self.odd.T).sin().mean(-1, keepdim=True) + many).tanh() * self.scale


@case(optimizer=adafactor)
class FactoredMomentsOfATiedMatrix(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight
