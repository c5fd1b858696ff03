"""The public names: all are there, say what they take, and are short in a terminal."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

import shardc
from shardc import OPEN, P
from shardc.runtime.train import loop, trainer

ROOT = Path(__file__).parents[2]


def test_dir_shows_the_api() -> None:
    public = [name for name in dir(shardc) if not name.startswith("_")]
    assert public == sorted(shardc.__all__)
    assert {"Collective", "Metrics", "Report", "StepResult", "Trainer"} <= set(public)
    assert all(getattr(shardc, name) is not None for name in public)


def test_names_that_are_not_there_are_attribute_errors() -> None:
    assert not hasattr(shardc, "complie")
    assert shardc.plan.__name__ == "shardc.plan", "packages are found as attributes"


def test_launch_and_train_say_what_they_take() -> None:
    for method, function in ((shardc.Program.launch, trainer.launch), (shardc.Trainer.train, loop.train)):
        own, called = inspect.signature(method).parameters, inspect.signature(function).parameters
        assert list(own)[1:] == list(called)[1:]
        for name, parameter in list(called.items())[1:]:
            assert (own[name].kind, own[name].default) == (parameter.kind, parameter.default), name


def test_help_of_compile_describes_every_argument() -> None:
    said = inspect.getdoc(shardc.compile) or ""
    for name in inspect.signature(shardc.compile).parameters:
        assert f"\n{name} " in said, name
    assert "program = shardc.compile(" in said


def test_a_type_checker_sees_the_lazy_names(tmp_path: Path) -> None:
    """What `__getattr__` gives is what is imported under TYPE_CHECKING: no name is in one and not in the other."""
    import ast

    tree = ast.parse((ROOT / "shardc/__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(typed) == sorted(shardc.__all__)
    for name, module in typed.items():
        code = f"import shardc; from {module} import {name}; assert shardc.{name} is {name}"
        exec(code, {})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


@pytest.fixture(scope="module")
def program() -> shardc.Program:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = {"params": {"up.weight": "tp"}, "inputs": {"x": "dp"}, "clip_grad_norm": 1.0}
    return shardc.compile(model, torch.ones(4, 8), mesh="dp=2, tp=2", plan=plan, optimizer=optimizer)


def test_reprs_are_a_line(program: shardc.Program) -> None:
    trained = program.launch()
    result = trained.step(torch.ones(4, 8))
    plan = shardc.Plan.of(mesh="dp=2", params={f"h.{i}.weight": "dp" for i in range(9)})
    shown = {
        "Program(a step of Net: mesh dp=2, tp=2, ": program,
        "Trainer(step 1, all ranks simulated, on cpu, ": trained,
        "StepResult(loss=": result,
        "Report(ok: ": program.verify(),
        "Collective(%": program.collectives()[0],
        "Rank(3: dp=1, tp=1; ": program.rank(3),
        "StagedProgram(1 stages, mesh dp=2, tp=2)": program.staged,
        "ProgramMemory(": program.memory(),
        "Explanation(Collective(%": program.explain(0),
        "Plan(mesh='dp=2', params={'h.0.weight': 'dp', ": plan,
    }
    for start, value in shown.items():
        assert repr(value).startswith(start)
        assert "\n" not in repr(value)
        assert len(repr(value)) < 200
    assert "6 more" in repr(plan)
    assert "grad_norm=" in repr(result)


@pytest.mark.parametrize("placement", [P(), P(None, (3, "tp")), P(("dp", "tp"), OPEN), P("dp", None)])
def test_the_repr_of_a_placement_is_its_constructor(placement: shardc.Placement) -> None:
    assert eval(repr(placement), {"P": P, "OPEN": OPEN}) == placement
