"""The eager witness: asked of models that float64 does not suit, and never an alarm for what rounding explains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.backends.cuda import flash_sdp_enabled, math_sdp_enabled
from torch.nn import functional

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


class Float32(Cast):
    """Norms of libraries compute in float32, whatever they are given; others make tables of their own."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        scale = torch.rsqrt(y.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6)
        table = torch.exp(torch.arange(4, dtype=torch.float32) / 3) + torch.zeros(4)
        steps = torch.cumsum(y.float() * table, 0) + torch.full((4,), 0.1)
        return (y * scale + steps.type_as(y)).square().mean()


class Nothing(Cast):
    """Its gradients are rounding and nothing else: the length of a vector that was divided by its length."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return (y / y.norm()).square().sum()


@pytest.mark.parametrize(
    ("model", "near"),
    [(Complex, 1e-10), (Cast, 1e-1), (OwnFloats, 1e-12), (Float32, 1e-12), (Nothing, None)],
    ids=lambda v: str(v),
)
def test_right_programs_are_right(model: type[nn.Module], near: float | None) -> None:
    torch.manual_seed(0)
    program = shardc.compile(model(), torch.randn(8, 8), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    report = program.verify()
    assert report.ok, str(report)
    if near is not None:
        assert report.eager_error is not None, report.absent
        assert report.eager_error < near


class Cancels(Cast):
    """A variance of what is nearly equal: what is left of it is rounding, more or less."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x) * 1e-6 + 3e6).var(-1).mul(1e12).square().mean() * self.scale


def test_what_rounding_explains_is_no_alarm_of_eagers() -> None:
    torch.manual_seed(0)
    model = Cancels().double()
    rows = torch.randn(8, 8, dtype=torch.float64)
    program = shardc.compile(model, rows, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    report = program.verify()
    assert report.eager_error is not None
    assert report.eager_error > 1e-5
    assert report.ok, str(report)
    assert "where rounding explains it" in str(report)
    model.scale = 1.002
    wrong = replace(program, compiled=None).verify()
    assert not wrong.ok  # by more than rounding moves it
    assert "NOT what eager PyTorch computes" in str(wrong)


class Squeezed(Cast):
    """A norm whose derivative needs the cube of a number that float16 has room for."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).float()
        return ((y * 1e-2) * torch.rsqrt((y * 1e-2).pow(2).mean(-1, keepdim=True) + 1e-6) * x[:, :4]).sum()


def test_what_has_no_room_in_half_precision_is_told() -> None:
    torch.manual_seed(0)
    model = Squeezed().half()
    program = shardc.compile(model, torch.randn(8, 8).half() / 8, mesh="dp=2", plan={"inputs": {"x": "dp"}})
    assert program.verify().ok
    assert program.verify(dtype=torch.bfloat16).ok
    report = program.verify(dtype=torch.float16)
    assert not report.ok
    assert report.overflow
    assert "has no room in float16" in str(report)


def test_a_scaled_loss_has_no_room_in_half_precision() -> None:
    plan = {"inputs": {"x": "dp"}, "precision": "float16"}
    program = shardc.compile(Squeezed(), torch.randn(8, 8) / 8, mesh="dp=2", plan=plan)
    with pytest.raises(ShardcError, match="SC508"):
        program.verify(dtype=torch.float16)


def test_casts_of_a_model_in_double_precision_are_lifted_too() -> None:
    x = torch.randn(8, 8, dtype=torch.float64)
    program = shardc.compile(Float32().double(), x, mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    report = program.verify()
    assert report.ok
    assert report.eager_error is not None, report.absent
    assert report.eager_error < 1e-12


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


class Attention(nn.Module):
    """Attention in each of the ways that torch has for it; `mask` is no tensor of the model, and stays float32."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.q, self.kv, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Tensor:
        heads = 1 if self.way == "gqa" else 2
        q, kv = self.q(x).view(*x.shape[:2], 2, 4).transpose(1, 2), self.kv(x)[..., : 4 * heads]
        k = kv.reshape(*x.shape[:2], heads, 4).transpose(1, 2)
        seen = torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1]) - 1
        mask = {"float": torch.where(seen, 0.5, -2.0), "bool": seen}.get(self.way)
        causal, gqa = self.way in ("causal", "gqa"), self.way == "gqa"
        y = functional.scaled_dot_product_attention(
            q, k, k.sin(), attn_mask=mask, dropout_p=0.0, is_causal=causal, enable_gqa=gqa
        )
        return y.square().mean()


@pytest.mark.parametrize("way", ["float", "bool", "causal", "gqa", "plain"])
def test_attention_is_what_eager_computes(way: str) -> None:
    """torch's fused kernel on the CPU is wrong by more than 1 for a float64 query and a float32 mask of 8 keys."""
    torch.manual_seed(0)
    model = Attention(way)
    program = shardc.compile(model, torch.randn(4, 8, 8), mesh="dp=2", plan={"inputs": {"x": "dp"}})
    asked = math_sdp_enabled(), flash_sdp_enabled()
    report = program.verify()
    assert report.ok, str(report)
    assert report.eager_error is not None
    assert report.eager_error < 1e-10
    assert (math_sdp_enabled(), flash_sdp_enabled()) == asked


class Chosen(Cast):
    """Fails where attention is computed by other kernels than the user's."""

    def forward(self, x: Tensor) -> Tensor:
        assert flash_sdp_enabled()
        return self.fc(x).square().mean()


def test_only_the_witness_computes_attention_in_ordinary_ops() -> None:
    program = shardc.compile(Chosen(), torch.randn(8, 8), mesh="dp=2", plan={"inputs": {"x": "dp, -"}})
    report = program.verify()
    assert report.eager_error is None
    assert "does not run" in report.absent
