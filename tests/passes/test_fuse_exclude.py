"""What `fuse: {exclude: [...]}` names stays calls, and a name that nothing goes by is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.graph import info, op_name


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(self.norm(x))
        return x + self.down(self.act(u * 2).exp() + u)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def compiled(fuse: Any) -> shardc.Program:
    return shardc.compile(Model(), (torch.randn(4, 8),), mesh="dp=2", plan={"inputs": {"x": "dp"}, "fuse": fuse})


def single(program: shardc.Program) -> set[str]:
    """The ops that kernels did not take, with their values."""
    names = {node: op_name(node.target) for node in program.body.calls()}
    return {f"{name} {info(node).name}" for node, name in names.items() if not name.startswith("shardc.")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("pattern", "stays", "goes"),
    [
        ("tanh", ["tanh layers.0.act.tanh", "tanh layers.1.act.tanh"], ["tanh_backward"]),
        ("aten.tanh.default", ["tanh layers.0.act.tanh", "tanh layers.1.act.tanh"], ["tanh_backward"]),
        ("layers.0.act", ["tanh layers.0.act.tanh", "tanh_backward d.layers.0.act.tanh_backward"], ["layers.1.act"]),
        ("**.act", ["tanh layers.0.act.tanh", "tanh layers.1.act.tanh"], ["native_layer_norm"]),
        ("layers.1", ["tanh layers.1.act.tanh", "exp layers.1.exp"], ["layers.0.act"]),
        ("layers.1.act.tanh", ["tanh layers.1.act.tanh"], ["layers.0.act", "tanh_backward"]),
    ],
)
def test_stays_calls(pattern: str, stays: list[str], goes: list[str]) -> None:
    program = compiled({"exclude": [pattern]})
    left = single(program)
    assert set(stays) <= left, left
    assert not any(name in one for one in left for name in goes), left
    assert program.verify().ok


def test_a_template_stays_generated() -> None:
    def of(fuse: Any) -> set[str]:
        return {op_name(node.target) for node in compiled(fuse).body.calls()}

    assert "shardc.layer_norm" in of(True)
    assert "shardc.layer_norm" not in of({"exclude": "layer_norm"})
    assert "native_layer_norm" not in of({"exclude": "layer_norm"})


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("tanhh", "did you mean 'tanh'"),
        ("act", "write '**.act': it matches layers.0.act"),
        ("**.zzz.q", "name an op"),
        ("layers.7", "layers"),
    ],
)
def test_what_nothing_goes_by_is_an_error(pattern: str, hint: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"mesh: dp=2\ninputs:\n  x: dp\nfuse:\n  exclude: ['{pattern}']\n")
    with pytest.raises(shardc.ShardcError) as refused:
        shardc.compile(Model(), (torch.randn(4, 8),), plan=str(plan))
    (found,) = refused.value.diagnostics
    assert found.code == "SC202"
    assert found.location is not None
    assert found.location.endswith("plan.yaml:5")
    assert found.hint is not None
    assert hint in found.hint


def test_no_list_of_patterns() -> None:
    with pytest.raises(shardc.ShardcError, match=r"SC208.*list of patterns"):
        compiled({"exclude": {"tanh": True}})
