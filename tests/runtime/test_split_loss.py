"""Of several microbatches, `verify` says where the mean of their losses is not the loss of the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.runtime.oracle.report import Report


class Rows(nn.Module):
    """A loss by `kind`, behind dropout: eager PyTorch cannot be asked for its step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc, self.drop = nn.Linear(8, 8), nn.Dropout(0.2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y = self.drop(self.fc(x))
        if self.kind == "contrastive":
            target = torch.arange(y.shape[0])
            return F.cross_entropy(F.normalize(y, dim=-1) @ F.normalize(x, dim=-1).t(), target)
        return F.cross_entropy(y, labels, reduction="sum" if self.kind == "sum" else "mean")


def report(kind: str, labels: Tensor | None = None, **plan: Any) -> Report:
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "labels": torch.randint(8, (8,)) if labels is None else labels}
    mesh = "pp=1, dp=2" if "pipeline" in plan else "dp=2"
    inputs = {"inputs": {"x": "dp", "labels": "dp"}}
    found = shardc.compile(Rows(kind), batch, mesh=mesh, plan={**inputs, **plan}).verify()
    assert found.ok
    return found


@pytest.mark.parametrize("kind", ["contrastive", "sum"])
@pytest.mark.parametrize("plan", [{"accumulate": 2}, {"pipeline": {"microbatches": 2}}], ids=["accumulate", "pipeline"])
def test_a_loss_over_all_rows_is_another_in_microbatches(kind: str, plan: dict[str, Any]) -> None:
    (finding,) = report(kind, **plan).diagnostics
    assert finding.code == "SC225"
    assert finding.severity == "warning"
    assert "2 microbatches" in finding.message


def test_the_two_losses_are_named() -> None:
    found = report("sum", accumulate=4)
    torch.manual_seed(0)
    x, labels = torch.randn(8, 8), torch.randint(8, (8,))
    model = Rows("sum").eval()  # drawn behind the batch, as above
    whole = float(model(x, labels).detach())
    assert f"{whole / 4:.4g}"[:4] in found.diagnostics[0].message
    assert f"{whole:.4g}"[:4] in found.diagnostics[0].message
    assert "SC225" in str(found)


def test_a_mean_over_rows_is_the_same() -> None:
    assert report("mean", accumulate=4).diagnostics == ()
    assert report("contrastive").diagnostics == ()  # one microbatch


def test_tokens_that_count_unequally() -> None:
    labels = torch.tensor([0, 1, 2, 3, 4, -100, -100, -100])
    assert [d.code for d in report("mean", labels, accumulate=2).diagnostics] == ["SC225"]
    assert report("mean", labels, accumulate=2, loss={"tokens": "labels"}).diagnostics == ()
