"""Small models, batches and a trainer: what the tests of the training loop run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.runtime.train.metrics import Evaluated, Metrics
from shardc.runtime.train.trainer import Trainer

RATE = 0.1


class Line(nn.Module):
    """A regression that also says how often it is within one of what it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        error = self.a(x).squeeze(-1) - x.sum(-1)
        return {"loss": error.square().mean(), "near": (error.abs() < 1).float().mean()}


class TokenModel(nn.Module):
    """Predicts each of its tokens, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(16, 8), nn.Dropout(0.2), nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.drop(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def batch(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))}


def batches() -> Iterator[dict[str, Tensor]]:
    seed = 0
    while True:
        yield batch(seed := seed + 1)


HELD_OUT = [batch(-1), batch(-2)]


def started(rate: float = RATE, mesh: str = "dp=2", **launch: Any) -> tuple[Trainer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    plan = {"inputs": {"x": "dp, -"}, "outputs": {"near": ""}}
    program = shardc.compile(model, batch(0), mesh=mesh, plan=plan, optimizer=optimizer)
    return program.launch(**launch), optimizer


def plateau(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """A ReduceLROnPlateau that reduces at each metric but the first."""
    settings = {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"} | options
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **settings)


def measured(loss: float, step: int = 1, evaluated: float | None = None) -> Metrics:
    evaluation = None if evaluated is None else Evaluated(evaluated, {"near": 0.5}, 1)
    return Metrics(step, loss, None, 0.1, 4, 1, evaluated=evaluation)


def rates(metrics: list[Metrics]) -> list[float]:
    return [one.learning_rates[0] for one in metrics]
