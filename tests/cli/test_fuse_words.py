"""What is said of a plan that asks for kernels and gets none, or says nothing; and where their sources are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc.cli.kernel_sources import emit_triton
from shardc.cli.summary import fusion
from shardc.explain.fusion import asked_of
from shardc.plan.schema import Plan
from tests.cli.test_cli import shardc_cli

NONE_ASKED = "no call is fused: write fuse: true in the plan"
LEFT = "no call is fused of those that the plan leaves: it excludes '**'"
WORTHLESS = "no call is fused: the plan asks for kernels, and none is worth it"


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


class Chain(Product):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ self.weight) * x).sum()


def compiled(fuse: object, model: nn.Module | None = None) -> shardc.Program:
    return shardc.compile(model or Chain(), (torch.ones(4, 4),), mesh="dp=1", plan={"fuse": fuse})


def test_why_there_are_no_kernels() -> None:
    cases = ((False, None, NONE_ASKED), ({"exclude": ["**"]}, None, LEFT), (True, Product(), WORTHLESS))
    for fuse, model, why in cases:
        program = compiled(fuse, model)
        assert emit_triton([program.body], asked_of(program)) == f"# {why}\n"
        assert fusion(program) == ([why] if fuse else [])
    program = compiled(True)
    assert "no call is fused" not in emit_triton([program.body], asked_of(program))
    assert fusion(program)[0].startswith("fused: ")


@pytest.mark.parametrize("text", ["fuse: {}", "mesh: dp=1\nfuse: {}"])
def test_what_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(shardc.ShardcError, match=r"SC208.*'fuse' is empty") as refused:
        Plan.parse(text)
    assert "fuse: true" in str(refused.value)
    assert not Plan.parse("mesh: dp=1").fuse.enabled
    assert Plan.parse("fuse: {enabled: true}").fuse.enabled


ROOT = Path(__file__).parent.parent.parent
MODEL, PLAN = str(ROOT / "examples/mlp.py:mlp"), ("--plan", str(ROOT / "configs/plans/mlp.yaml"))


@pytest.mark.parametrize(("form", "suffix"), [("triton", ".json"), ("json", ".py"), ("triton", ".triton")])
def test_a_suffix_that_contradicts_the_form_is_refused(form: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    ran = shardc_cli("compile", MODEL, *PLAN, "--emit", form, "-o", str(path))
    assert ran.code == 2
    assert "SC409" in ran.err
    assert f"out{'.py' if form == 'triton' else '.json'}" in ran.err
    assert not path.exists()


def test_kernels_go_to_a_file_of_python(tmp_path: Path) -> None:
    path = tmp_path / "out.py"
    plan = tmp_path / "plan.yaml"
    plan.write_text(Path(PLAN[1]).read_text() + "fuse: true\n")
    ran = shardc_cli("compile", MODEL, "--plan", str(plan), "--emit", "triton", "-o", str(path))
    assert ran.code == 0
    compile(path.read_text(), str(path), "exec")
