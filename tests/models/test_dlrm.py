"""DLRM (Naumov et al. 2019): tables of bags with offsets, whose batch is over dp and whose rows are over tp."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.collectives import collectives

TABLES, BATCH, DENSE, WIDTH = (32, 16, 8), 8, 6, 8


class DLRM(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(DENSE, 16), nn.ReLU(), nn.Linear(16, WIDTH), nn.ReLU())
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode=mode) for n in TABLES)
        self.top = nn.Sequential(nn.Linear(WIDTH + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, indices: Tensor, offsets: Tensor, labels: Tensor) -> Tensor:
        x = self.bottom(dense)
        bags = [table(i, o) for table, i, o in zip(self.tables, indices, offsets, strict=True)]
        features = torch.stack([x, *bags], 1)
        rows, columns = torch.tril_indices(len(bags) + 1, len(bags) + 1, -1)
        products = features.bmm(features.transpose(1, 2))[:, rows, columns]
        score = self.top(torch.cat([x, products], 1))[:, 0]
        return nn.functional.binary_cross_entropy_with_logits(score, labels)


def batch() -> dict[str, Tensor]:
    """Bags of 0 to 4 indices."""
    random = torch.Generator().manual_seed(0)
    return {
        "dense": torch.randn(BATCH, DENSE, generator=random),
        "indices": torch.randint(0, min(TABLES), (len(TABLES), 20), generator=random),
        "offsets": torch.tensor([[0, 2, 5, 5, 9, 12, 13, 18]] * len(TABLES)),
        "labels": torch.rand(BATCH, generator=random).round(),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize(
    ("mesh", "params", "of_tables"),
    [("dp=2", {}, {}), ("dp=2, tp=2", {"tables.*.weight": "tp, -"}, {"all_reduce tp": len(TABLES)})],
    ids=["dp2", "dp2tp2"],
)
def test_rows_of_tables_are_sharded(mesh: str, params: dict[str, str], of_tables: dict[str, int], mode: str) -> None:
    plan: Any = {"inputs": {"dense": "dp", "labels": "dp"}, "params": params, "bucket": False}
    model = DLRM(mode)
    program = shardc.compile(model, batch(), mesh=mesh, plan=plan)
    assert not program.diagnostics
    gradients = {"all_reduce dp": sum(1 for _ in model.parameters()) + 1}  # and the loss
    assert Counter(f"{c.kind} {'.'.join(c.axes)}" for c in collectives(program.body)) == gradients | of_tables
    assert program.verify().ok
