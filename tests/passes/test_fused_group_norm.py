"""GroupNorm in kernels: with the activation around it, on any layout, and as exact as torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from kernels_triton.match.op import kernel_of
from shardc.cost.memory import memory
from shardc.ir.graph import info, op_name
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.clustering.memory_budget import allowed_peak
from shardc.passes.fusion.fuse import fuse

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "batch": ("dp=2", {"inputs": {"x": "dp, -, -, -", "t": "dp, -"}}),
    "channels": ("tp=2", {"params": {"conv1.weight": "tp, -, -, -", "conv2.weight": "-, tp, -, -"}}),
}


class Block(nn.Module):
    """A residual block of a diffusion model's UNet."""

    def __init__(self, groups: int = 4, channels: int = 16, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm1, self.conv1 = nn.GroupNorm(2, 8), nn.Conv2d(8, channels, 3, padding=1)
        self.time = nn.Linear(6, channels)
        self.norm2 = nn.GroupNorm(groups, channels, affine=affine)
        self.conv2, self.skip = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(8, channels, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.first(x)
        h = self.conv1(functional.silu(self.norm1(x))) + self.time(functional.silu(t))[:, :, None, None]
        return (self.skip(x) + self.conv2(functional.silu(self.norm2(h)))).square().mean()


class Squares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


def compiled(block: nn.Module, mesh: str = "dp=1", **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(block, {"x": torch.randn(4, 3, 6, 6) + 3.0, "t": torch.randn(4, 6)}, mesh=mesh, plan=plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", PLANS)
def test_a_block_on_every_layout(layout: str) -> None:
    torch.manual_seed(0)
    mesh, plan = PLANS[layout]
    program = compiled(Block(), mesh, fuse=True, **plan)
    names = [op_name(node.target) for node in program.body.calls()]
    assert not any("group" in name for name in names), names
    assert program.verify().ok, str(program.verify())


@pytest.mark.parametrize(("groups", "affine"), [(16, True), (1, False)])
def test_groups(groups: int, affine: bool) -> None:
    """Of one channel each, of all, and without weights."""
    torch.manual_seed(0)
    program = compiled(Block(groups, affine=affine), fuse=True)
    assert program.verify().ok, str(program.verify())


def test_what_comes_before_and_after_is_in_the_kernels() -> None:
    body = compiled(Block(), precision="bf16").body
    fused = fuse(body)
    kernels = [k for node in fused.calls() if (k := kernel_of(node.target, node.args)) is not None]
    size = 4 * 16 * 36 * 2  # bytes of the second norm's operand
    large = [k for k in kernels if "group" in k.name and k.bytes_moved >= size and len(k.space) > 1]
    # Forward reads what the convolution gave once and once more for its value, backward reads it with dy twice.
    assert sum(k.bytes_moved for k in large if any(16 in one.shape for one in k.inputs)) < 11 * size
    assert traffic(fused).bytes < 0.72 * traffic(body).bytes
    assert traffic(fused).kernels <= traffic(body).kernels - 25


def test_norms_alone_between_convolutions_are_fused() -> None:
    """Their statistics, float32 in kernels and 16 bits in calls, raise the peak by a few hundred bytes."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)]
    model = nn.Sequential(*layers, nn.Conv2d(16, 16, 3, padding=1), Squares())
    program = shardc.compile(model, {"input": torch.randn(8, 3, 32, 32)}, mesh="dp=1", plan={"precision": "bf16"})
    body = program.body
    fused = fuse(body)
    assert not fused.diagnostics
    assert not any("group_norm" in op_name(node.target) for node in fused.calls())
    assert traffic(fused).bytes < 0.8 * traffic(body).bytes
    assert traffic(fused).kernels <= 25 < traffic(body).kernels
    assert memory(body).peak < memory(fused).peak <= min(memory(body).peak + 600, allowed_peak(memory(body).peak))
    assert program.verify().ok


def test_an_op_that_is_excluded_stays() -> None:
    body = compiled(Block()).body
    names = [op_name(node.target) for node in fuse(body, ("native_group_norm",)).calls()]
    assert names.count("native_group_norm") == 2
    first = next(info(node).name for node in body.calls() if op_name(node.target) == "native_group_norm")
    assert [op_name(node.target) for node in fuse(body, (first,)).calls()].count("native_group_norm") == 1


def test_double_precision_stays_torchs() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 3, 4, 4).double(), "t": torch.randn(2, 6).double()}
    body = shardc.compile(Block().double(), batch, mesh="dp=1", plan={"fuse": True}).body
    assert "native_group_norm" in [op_name(node.target) for node in body.calls()]


def test_a_mean_far_from_zero_does_not_cancel() -> None:
    """Channels of other means than their group's, a thousand standard deviations away."""

    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.shift = nn.GroupNorm(2, 6), nn.Parameter(1e3 + torch.arange(6.0)[:, None] / 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x + self.shift).square().mul(torch.arange(6.0)[:, None] + 1).mean()

    torch.manual_seed(0)
    model, x = Norm(), torch.randn(3, 6, 64)
    program = shardc.compile(model, (x,), mesh="dp=1", plan={"fuse": True})
    loss = float(program.simulate().loss)
    exact = float(model.double()(x.double()).detach())
    assert abs(loss - exact) < 1e-4 * exact
