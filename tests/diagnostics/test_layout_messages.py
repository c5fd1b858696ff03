"""What is said where a layout that was asked for is not what the ops compute, word for word; strict refuses all of it.

Planned communication is not such a place: tests/passes/test_honesty.py looks at that side.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc import ShardcError

ROOT = Path(__file__).parent.parent.parent


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cumsum(self.up(x), -1).square().mean()


class Gates(nn.Module):
    """The same in three layers: said once."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(Gate() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([gate(x) for gate in self.gates]).sum()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).split([3, 7], -1)
        return q.cumsum(-1).square().sum() + k.cumsum(-1).square().sum()


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).square().mean()


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[torch.tensor([2, 0, 3, 1])].square().mean()


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x)).square().mean()


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


CASES: dict[str, tuple[nn.Module, Tensor, dict[str, Any]]] = {
    "cumsum_of_columns": (Gates(), torch.randn(4, 8), {"params": {"gates.*.up.*": "tp"}}),
    "sections_of_columns": (Fused(), torch.randn(4, 8), {"params": {"qk.*": "tp"}}),
    "conv_output": (Conv(), torch.randn(2, 3, 8, 8), {"activations": {"conv": "-, -, -, tp"}}),
    "rows_that_are_indexed": (Picks(), torch.randn(4, 8), {"inputs": {"x": "tp"}}),
    "norm_output": (Norm(), torch.randn(4, 8), {"activations": {"norm": "-, tp"}}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_op_that_keeps_a_dim_whole(case: str, golden: Callable[[str, str], None]) -> None:
    model, batch, plan = CASES[case]
    program = shardc.compile(model, batch, mesh="tp=2", plan=plan)
    said = [d for d in program.diagnostics if d.severity == "warning"]
    assert said
    assert all(d.op and d.cause and d.hint and d.location for d in said)
    assert program.verify().ok
    golden(f"layout/{case}.txt", "\n".join(d.render() for d in said).replace(f"{ROOT}/", ""))
    with pytest.raises(ShardcError) as raised:
        shardc.compile(model, batch, mesh="tp=2", plan=plan, strict=True)
    assert [d.code for d in raised.value.diagnostics] == [d.code for d in said]


def test_what_holds_for_every_layer_is_said_once(golden: Callable[[str, str], None]) -> None:
    program = shardc.compile(Uneven(), torch.randn(4, 7), mesh="tp=2", plan={"params": {"layers.*.weight": "tp, -"}})
    golden("layout/uneven_layers.txt", "\n".join(d.render() for d in program.diagnostics).replace(f"{ROOT}/", ""))
