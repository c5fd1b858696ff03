"""The eager witness: asked of models that float64 does not suit, and never an alarm for what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (4, 2))) @ self.w.mT).square().mean()


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 4)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).to(torch.bfloat16).float().square().mean()


class OwnFloats(Cast):
    """A float32 tensor that forward makes does not mix with float64 parameters."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x) * self.scale
        return torch.zeros(3, 4).index_add(0, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]), y).square().mean()


class Nothing(Cast):
    """Its gradients are rounding and nothing else: the length of a vector that was divided by its length."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return (y / y.norm()).square().sum()


@pytest.mark.parametrize(
    ("model", "near"), [(Complex, 1e-10), (Cast, 1e-1), (OwnFloats, 1e-4), (Nothing, None)], ids=lambda v: str(v)
)
def test_right_programs_are_right(model: type[nn.Module], near: float | None) -> None:
    torch.manual_seed(0)
    program = shardc.compile(model(), torch.randn(8, 8), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    report = program.verify()
    assert report.ok, str(report)
    if near is not None:
        assert report.eager_error is not None, report.absent
        assert report.eager_error < near


def test_a_reference_that_is_not_the_model_is_told_in_its_own_dtype_too() -> None:
    model = OwnFloats()
    program = shardc.compile(model, torch.randn(8, 8), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    assert program.verify().ok
    model.scale = 1.1
    with pytest.raises(ShardcError, match="SC124"):
        program.verify()
    report = replace(program, compiled=None).verify()
    assert not report.ok
    assert report.equal


def test_a_model_in_half_precision_is_held_to_the_same() -> None:
    """Its casts are lifted with its weights: only one that rounds by itself, between float32s, is given room."""
    model = nn.Linear(8, 4).to(torch.bfloat16)
    program = shardc.compile(
        model, torch.randn(8, 8, dtype=torch.bfloat16), mesh="dp=2", plan={"inputs": {"input": "dp, -"}},
        loss=lambda y, _: y.float().square().mean(),
    )  # fmt: skip
    report = program.verify()
    assert report.ok
    assert report.eager_tolerance == 1e-5
