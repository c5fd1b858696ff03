"""LSTM, GRU and RNN are traced as the ops that they are made of, shard over the batch, and keep their dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from kernels_triton.base.random import RANDOM_UNIFORM
from shardc.frontend.trace import trace


class Recurrent(nn.Module):
    def __init__(self, cls: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = cls(6, 8, **options), nn.LazyLinear(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).pow(2).mean()


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"num_layers": 2, "bidirectional": True}),
        (nn.LSTM, {"num_layers": 2, "proj_size": 4}),
        (nn.LSTM, {"bias": False, "batch_first": False}),
        (nn.GRU, {"num_layers": 2, "bidirectional": True}),
        (nn.RNN, {"nonlinearity": "relu"}),
    ],
)
def test_sharded_over_the_batch(cls: type[nn.Module], options: dict[str, Any]) -> None:
    options = {"batch_first": True, **options}
    x = torch.randn(4, 3, 6)
    model = Recurrent(cls, **options)
    model(x)  # LazyLinear
    placed = "dp" if options["batch_first"] else "-, dp"
    program = shardc.compile(model, x, mesh="dp=2", plan={"inputs": {"x": placed}}, strict=True)
    assert not any("rnn" in str(node.target) for node in program.body.calls())
    assert {(c.kind, c.phase) for c in program.collectives()} == {("all_reduce", "fwd"), ("all_reduce", "bwd")}
    report = program.verify(dtype=torch.float64)
    assert report.ok, str(report)
    assert report.max_rel_error <= 1e-12
    assert report.eager_error is not None
    assert report.eager_error <= 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_layers(cls: type[nn.Module]) -> None:
    """torch's own decompositions lose it."""
    x, options = torch.randn(2, 3, 6), {"num_layers": 3, "dropout": 0.5}
    for training, drawn in ((True, 2), (False, 0)):
        model = Recurrent(cls, **options)
        model(x)
        graph = trace(model.train(training), x).graph
        assert sum(node.target is RANDOM_UNIFORM for node in graph.nodes) == drawn


def test_eager_lstms_are_left_as_they_were() -> None:
    model, x = Recurrent(nn.LSTM), torch.randn(2, 3, 6)

    def ops() -> set[str]:
        with torch.no_grad(), torch.profiler.profile() as profile:
            model(x)
        return {event.key for event in profile.key_averages()}

    ops()  # LazyLinear
    before = ops()
    trace(model, x)
    assert ops() == before
