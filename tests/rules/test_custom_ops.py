"""A user's own op: with a rule it is sharded, and its program can be saved; rules of both its directions are tried."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.rules import registry
from tests.hostile.custom_ops import row_norm

OPS = torch.ops.hostile


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(row_norm(self.a(x), 1e-3)).square().mean()


def compiled() -> shardc.Program:
    model = Rows().double()
    batch = {"x": torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
    return shardc.compile(model, batch, mesh="dp=2", plan={"inputs": {"x": "dp"}})


@pytest.fixture
def ruled(monkeypatch: pytest.MonkeyPatch) -> None:
    """For as long as a test runs, the op and its gradient have a rule."""
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_FITTED", {})
    shardc.rule(OPS.row_norm.default, "... n -> ... n", whole="n", examples=[((4, 6), 1e-3)])
    shardc.rule(
        OPS.row_norm_backward.default,
        "... n, ... n -> ... n",
        whole="n",
        linear=(0,),
        examples=[((4, 6), (4, 6), 1e-3)],
    )


def test_without_a_rule_it_runs_replicated_and_is_not_saved() -> None:
    program = compiled()
    warned = [d for d in program.diagnostics if d.code == "SC301"]
    assert [d.op for d in warned] == ["hostile.row_norm.default", "hostile.row_norm_backward.default"]
    assert "shardc.rule(torch.ops.hostile.row_norm.default, '... n -> ... n', whole='n')" in str(warned[0].hint)
    assert ".all_gather = " in program.text()
    assert program.verify().ok
    with pytest.raises(ShardcError, match=r"SC301(.|\n)*shardc.rule\(torch.ops.hostile.row_norm.default"):
        program.to_json()


def test_with_a_rule_it_is_sharded_and_saved(ruled: None) -> None:
    program = compiled()
    assert {d.code for d in program.diagnostics} <= {"SC211"}
    text = program.text()
    assert ".all_gather" not in text
    assert "%row_norm = hostile.row_norm(" in text
    assert "%d.row_norm_backward = hostile.row_norm_backward(" in text
    assert program.verify().ok
    shardc.parse(text)
    assert shardc.Program.from_json(program.to_json()).text() == text
