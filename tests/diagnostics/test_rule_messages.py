"""What is said of an op without a sharding rule, and of a rule that does not fit a call, word for word."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import Mesh, ShardcError
from shardc.rules import registry

ROOT = Path(__file__).parent.parent.parent
INVERSE = torch.ops.aten.linalg_inv_ex.default
RENORM = torch.ops.aten.renorm.default


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(self.up(x)).sum()


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.renorm(torch.renorm(self.up(x), 2, 0, 1.0), 2, 0, 1.0).sum()


def compiled(model: nn.Module) -> shardc.Program:
    return shardc.compile(model, torch.randn(6, 4, 4), mesh=Mesh(dp=2), plan={"inputs": {"x": "dp"}})


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of rules, to which a test may add, and in which the inverse has none."""
    others = {op: rule for op, rule in registry._RULES.items() if op is not INVERSE}
    monkeypatch.setattr(registry, "_RULES", others)
    monkeypatch.setattr(registry, "_FITTED", {})


def cleaned(text: str) -> str:
    return text.replace(f"{ROOT}/", "")


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize(("case", "model"), [("results_of_two_shapes", Inverse), ("rows", Renormed)])
def test_no_rule(case: str, model: type[nn.Module], golden: Callable[[str, str], None]) -> None:
    (warning,) = compiled(model()).diagnostics
    assert warning.code == "SC301"
    golden(f"rule/{case}.txt", cleaned(warning.render()))


@pytest.mark.usefixtures("rules")
def test_the_rule_that_is_suggested_fits() -> None:
    shardc.rule(RENORM, "... n -> ... n", whole="n")
    assert not compiled(Renormed()).diagnostics


def no_results(A: object) -> str:
    raise NotImplementedError("of several matrices")


@pytest.mark.usefixtures("rules")
@pytest.mark.parametrize("case", ["tensors", "sizes", "raises"])
def test_a_rule_that_does_not_fit(case: str, golden: Callable[[str, str], None]) -> None:
    match case:
        case "tensors":
            shardc.rule(INVERSE, "... n -> ... n", whole="n")
        case "sizes":
            shardc.rule(INVERSE, "b m n -> b m n, m", whole="b m n")
        case _:
            shardc.rule(INVERSE)(no_results)
    with pytest.raises(ShardcError) as raised:
        compiled(Inverse())
    assert raised.value.code == "SC303"
    golden(f"rule/misfit_{case}.txt", cleaned(str(raised.value)))
