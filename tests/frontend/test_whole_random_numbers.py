"""`randint`, `random_` and `randperm` draw the same numbers under every layout, in torch's range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc

X = torch.ones(512, 8)
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "randint": (lambda x: torch.randint(2, 9, (512, 8)), 2, 9),
    "randint to": (lambda x: torch.randint(9, (512, 8)), 0, 9),
    "randint of one": (lambda x: torch.randint(5, 6, (512, 8)), 5, 6),
    "below zero": (lambda x: torch.randint(-9, -2, (512, 8), dtype=torch.int32), -9, -2),
    "many": (lambda x: torch.randint(0, 3 << 40, (512, 8)), 0, 3 << 40),
    "like": (lambda x: torch.randint_like(x, 9), 0, 9),
    "like from": (lambda x: torch.randint_like(x, 3, 9), 3, 9),
    "random_": (lambda x: torch.empty(512, 8).random_(9), 0, 9),
    "random_ from": (lambda x: torch.empty(512, 8).random_(3, 9), 3, 9),
    "randperm": (lambda x: torch.randperm(4096).view(512, 8), 0, 4096),
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("dp=1", {}),
    ("dp=2", {"inputs": {"x": "dp"}}),
    ("tp=2", {"params": {"scale": "tp"}}),
    ("dp=2, tp=2", {"inputs": {"x": "dp"}, "params": {"scale": "tp"}, "fuse": True}),
]


class Drawn(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.draw = nn.Parameter(torch.ones(8, dtype=torch.float64)), draw

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        drawn = self.draw(x).double()
        return {"loss": (drawn * x * self.scale).mean(), "drawn": drawn}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DRAWS)
def test_same_under_every_layout(name: str) -> None:
    draw, low, high = DRAWS[name]
    drawn: list[Tensor] = []
    for mesh, plan in LAYOUTS:
        program = shardc.compile(Drawn(draw), X, mesh=mesh, plan=plan | {"outputs": {"drawn": "?"}})
        trainer = program.launch()
        drawn.append(trainer.step(X).outputs["drawn"].full())
        second = trainer.step(X).outputs["drawn"].full()
        assert high - low == 1 or not torch.equal(second, drawn[-1])
    first = drawn[0]
    assert all(torch.equal(first, other) for other in drawn[1:])
    assert first.min() >= low
    assert first.max() < high
    assert torch.equal(first, first.floor())
    if name == "randperm":
        assert torch.equal(first.flatten().sort().values, torch.arange(4096).double())
    elif high - low < 100:
        counts = torch.bincount((first - low).long().flatten(), minlength=high - low)
        assert counts.min() > 0.8 * 4096 / (high - low)
    else:
        assert abs(first.mean() / (high - 1) - 0.5) < 0.03
