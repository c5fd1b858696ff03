"""What is drawn at random has eager PyTorch's distribution, on every rank, row and column, and in every step.

Every random op that compiles draws 65,536 numbers in one program over two ranks, from a seed that stays the same. The
largest gap between the two samples' distribution functions, of which a share of zeros, a mean or a bound would be one,
is below what chance allows (Kolmogorov and Smirnov, one in 10,000); halves, columns and steps are not correlated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Exponential, Gumbel, Laplace, Normal, Uniform
from torch.nn import functional

import shardc

ROWS, COLUMNS = 512, 128
ALLOWED = 2.23  # times sqrt(2 / n): chance exceeds it once in 10,000
Draw = Callable[[Tensor], Tensor]  # of ones

# Name -> what is drawn, and how many elements get one number together.
DRAWS: dict[str, tuple[Draw, int]] = {
    "dropout": (lambda x: functional.dropout(x, 0.3), 1),
    "rare dropout": (lambda x: functional.dropout(x, 0.02), 1),
    "dropout in place": (lambda x: functional.dropout(x * 1, 0.7, True, inplace=True), 1),
    "alpha dropout": (lambda x: functional.alpha_dropout(x, 0.3, training=True), 1),
    "channels": (lambda x: functional.dropout1d(x.view(-1, 32, 4), 0.4).reshape(x.shape), 4),
    "planes": (lambda x: functional.dropout2d(x.view(-1, 32, 2, 2), 0.4).reshape(x.shape), 4),
    "feature alpha": (lambda x: functional.feature_alpha_dropout(x.view(-1, 32, 4), 0.4, True).reshape(x.shape), 4),
    "rand": (lambda x: x * torch.rand(x.shape), 1),
    "rand_like": (torch.rand_like, 1),
    "randn": (lambda x: x * torch.randn(x.shape), 1),
    "randn_like": (torch.randn_like, 1),
    "bernoulli": (lambda x: torch.bernoulli(x * 0.2), 1),
    "bernoulli of a number": (lambda x: torch.bernoulli(x, 0.9), 1),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.35), 1),
    "bernoulli_ of tensors": (lambda x: torch.empty_like(x).bernoulli_(x * 0.6), 1),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-2.0, 5.0), 1),
    "normal_": (lambda x: torch.empty_like(x).normal_(3.0, 0.5), 1),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(2.0), 1),
    "Normal": (lambda x: Normal(x, x * 2, validate_args=False).rsample(), 1),
    "Uniform": (lambda x: Uniform(x, x * 3, validate_args=False).rsample(), 1),
    "Exponential": (lambda x: Exponential(x * 3, validate_args=False).rsample(), 1),
    "Laplace": (lambda x: Laplace(x, x * 2, validate_args=False).rsample(), 1),
    "Gumbel": (lambda x: Gumbel(x, x * 2, validate_args=False).rsample(), 1),
    "Bernoulli": (lambda x: Bernoulli(x * 0.7, validate_args=False).sample(), 1),
    "gumbel_softmax": (lambda x: functional.gumbel_softmax(x.view(-1, 2), tau=0.5).reshape(x.shape), 2),
    "hard gumbel_softmax": (lambda x: functional.gumbel_softmax(x.view(-1, 2), hard=True).reshape(x.shape), 2),
}


class Draws(nn.Module):
    """All of them, and of the first dropout the gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(COLUMNS))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        kept = functional.dropout(x * self.scale, 0.3)
        return {"kept": kept} | {name: draw(x) for name, (draw, _) in DRAWS.items()}


@cache
def ours() -> list[tuple[dict[str, Tensor], Tensor]]:
    """What each of two steps of a program over two ranks draws, and the gradient of `scale`."""
    batch = torch.ones(ROWS, COLUMNS)
    plan = {"inputs": {"x": "dp, -"}, "outputs": {"*": "dp, -"}}
    program = shardc.compile(Draws(), batch, mesh="dp=2", plan=plan, loss=lambda drawn, _: drawn["kept"].sum())
    trainer = program.launch(seed=5)

    def step() -> dict[str, Tensor]:
        return {name: output.full() for name, output in trainer.step(batch).outputs.items()}

    return [(step(), trainer.gather_grads()["scale"]) for _ in range(2)]


@cache
def eager() -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(11)
        return Draws()(torch.ones(ROWS, COLUMNS))


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference of two samples' distribution functions; to 5 digits, as sums in another order round."""
    a, b = (t.double().flatten().mul(1e5).round().sort().values for t in (a, b))
    places = torch.cat([a, b])
    below = [torch.searchsorted(t, places, right=True).double() / len(t) for t in (a, b)]
    return float((below[0] - below[1]).abs().max())


def moment_gap(a: Tensor, b: Tensor, independent: float) -> float:
    """The differences of means and of variances, the larger in standard errors of them."""
    a, b = a.double().flatten(), b.double().flatten()
    centred = (b - b.mean()).square()
    errors = [(a.mean() - b.mean()) / b.std(), ((a - a.mean()).square().mean() - centred.mean()) / centred.std()]
    return max(abs(float(one.nan_to_num())) for one in errors) * math.sqrt(independent / 2)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]).double())[0, 1])


@pytest.mark.parametrize("name", DRAWS)
def test_drawn_as_eager_draws(name: str) -> None:
    (first, second), (_, together) = (step[name] for step, _ in ours()), DRAWS[name]
    independent = first.numel() / together
    halves = first.chunk(2)  # those of the two ranks
    assert gap(first, eager()[name]) < ALLOWED * math.sqrt(2 / independent)
    assert gap(*halves) < ALLOWED * math.sqrt(4 / independent)
    assert moment_gap(first, eager()[name], independent) < 4
    for a, b in (halves, (first, second), (first, first.roll(1, 0)), (first, first.roll(together, 1))):
        assert abs(correlation(a, b)) < 4 * math.sqrt(2 / independent)


def test_backward_drops_what_forward_dropped() -> None:
    for outputs, gradient in ours():
        torch.testing.assert_close(gradient, outputs["kept"].sum(0))


def test_bounds_and_shares() -> None:
    """Beside the distribution as a whole: what must never be drawn, and a dropout that keeps the mean."""
    drawn = ours()[0][0]
    for name, low, high in (("rand", 0.0, 1.0), ("rand_like", 0.0, 1.0), ("uniform_", -2.0, 5.0)):
        assert low <= float(drawn[name].min()) < low + 1e-3 * (high - low)
        assert high - 1e-3 * (high - low) < float(drawn[name].max()) < high
    for name in ("randn", "randn_like", "exponential_", "Gumbel", "Laplace"):
        assert drawn[name].isfinite().all()
    assert float(drawn["exponential_"].min()) >= 0.0
    for name, rate in (("dropout", 0.3), ("rare dropout", 0.02), ("dropout in place", 0.7)):
        assert set(drawn[name].unique().tolist()) == set(eager()[name].unique().tolist())
        share = float((drawn[name] == 0).float().mean())
        assert abs(share - rate) < 4 * math.sqrt(rate * (1 - rate) / drawn[name].numel())
