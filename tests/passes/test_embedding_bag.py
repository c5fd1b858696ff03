"""Embedding bags: sharded by bag, by row and by column of the table, they equal the single device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh

ROWS = 12


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 8, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


class Weighted(nn.Module):
    """What each row counts for is learned too."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 8, mode="sum", **options)
        self.counts = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x, per_sample_weights=self.counts.expand(x.shape).contiguous()).square().mean()


class Ragged(nn.Module):
    """Bags that begin at offsets, with what each index counts for."""

    def __init__(self, weighted: bool = False, **options: Any) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(ROWS, 8, **options)
        self.counts = nn.Parameter(torch.randn(40)) if weighted else None

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.table(x, offsets, per_sample_weights=self.counts).square().mean()


X = torch.randint(ROWS, (8, 5), generator=torch.Generator().manual_seed(0))
X[3] = 2  # a bag of nothing but padding, where 2 is that
MODELS = {
    "sum": Bags(mode="sum"),
    "mean": Bags(mode="mean"),
    "mean-padding": Bags(mode="mean", padding_idx=2),
    "sum-padding": Bags(mode="sum", padding_idx=2),
    "weighted": Weighted(),
    "weighted-padding": Weighted(padding_idx=2),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", ["tp, -", "-, tp", ""])
@pytest.mark.parametrize("name", MODELS)
def test_sharded_equals_the_single_device(name: str, table: str) -> None:
    plan = {"inputs": {"x": "dp"}, "params": {"table.weight": table} if table else {}}
    mesh = Mesh(dp=2, tp=2) if table else Mesh(dp=4)
    program = shardc.compile(MODELS[name], (X,), mesh=mesh, plan=plan)
    assert not [d for d in program.diagnostics if d.code == "SC301"]
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None


def test_halves() -> None:
    for model in (Bags(mode="mean"), Weighted()):
        program = shardc.compile(model.bfloat16(), (X,), mesh=Mesh(dp=2), plan={"inputs": {"x": "dp"}})
        assert not [d for d in program.diagnostics if d.code == "SC301"]
        assert program.verify().ok


RAGGED = {
    "sum": Ragged(mode="sum"),
    "mean": Ragged(mode="mean"),
    "mean-padding": Ragged(mode="mean", padding_idx=2),
    "weighted": Ragged(weighted=True, mode="sum"),
    "weighted-padding": Ragged(weighted=True, mode="sum", padding_idx=2),
    "last": Ragged(mode="mean", include_last_offset=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("table", ["tp, -", "-, tp", ""])
@pytest.mark.parametrize("name", RAGGED)
def test_bags_that_begin_at_offsets(name: str, table: str) -> None:
    """One of the bags is empty, and one is the whole of what follows the last offset, or nothing."""
    offsets = torch.tensor([0, 3, 3, 15, 20, 40 if name == "last" else 31])
    plan = {"inputs": {"x": "dp", "offsets": "-"}, "params": {"table.weight": table} if table else {}}
    program = shardc.compile(RAGGED[name], (X.flatten(), offsets), mesh=Mesh(dp=2, tp=2), plan=plan)
    assert not [d for d in program.diagnostics if d.code == "SC301"]
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    text = program.text()
    assert "%table.weight.all_gather" not in text
    assert "%x.all_gather" not in text


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Bags(mode="max"), (X,)),
        (Bags(mode="sum", scale_grad_by_freq=True), (X,)),
        (Ragged(mode="max"), (X.flatten(), torch.tensor([0, 3, 3, 20, 31]))),
    ],
    ids=["max", "by-frequency", "ragged maxima"],
)
def test_what_is_not_taken_apart_runs_whole_and_is_said(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    program = shardc.compile(model, batch, mesh=Mesh(dp=2), plan={"params": {"table.weight": "dp, -"}})
    assert [d for d in program.diagnostics if d.code == "SC301"]
    report = program.verify()
    assert report.ok, str(report)
