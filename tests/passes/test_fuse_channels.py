"""Batch norm, sums of a convolution's gradients and pooling in kernels: what they move, and that nothing stays a call.

A batch norm's statistics are sums over images and positions, its gradient two more: each is in the kernel of what comes
before it, and the rest in that of what comes after.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from kernels_triton.match.op import kernel_of
from shardc.ir.graph import op_name
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.fuse import fuse

SIZE = 8 * 16 * 8 * 8 * 2  # bytes of an image's channels, in bfloat16


class Residual(nn.Module):
    """Convolutions with batch norms, as in a ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn0 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.conv1, self.bn1 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn0(self.stem(x)))
        y = functional.relu(self.bn1(self.conv1(x)))
        x = functional.relu(x + self.bn2(self.conv2(y)))
        return self.head(x.mean((2, 3))).float().square().mean()


class Pooled(nn.Module):
    """The mean of a sequence's tokens, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(30, 16), nn.LayerNorm(16)
        self.mlp, self.head = nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        return self.head((h + functional.gelu(self.mlp(h))).mean(1)).float().square().mean()


def compiled(mesh: str = "dp=1", **plan: Any) -> shardc.Program:
    torch.manual_seed(0)
    return shardc.compile(Residual(), {"x": torch.randn(8, 3, 8, 8) + 2.0}, mesh=mesh, plan=plan)


def test_batch_norm_in_kernels() -> None:
    body = compiled(precision="bf16").body
    fused = fuse(body)
    assert not any(op_name(node.target).startswith("sum") for node in fused.calls())
    kernels = [kernel for node in fused.calls() if (kernel := kernel_of(node.target, node.args)) is not None]
    large = [kernel for kernel in kernels if kernel.bytes_moved >= SIZE and kernel.rows > 1]
    # Of a norm, the moments, and its value with the activation; of its gradient, the sums, and the rest.
    assert len(large) == 3 * 4
    assert sum(kernel.batch for kernel in large) == 3 + 1  # and the sum of a convolution's bias
    assert sum(kernel.bytes_moved for kernel in large) < 29 * SIZE
    assert traffic(fused).bytes < 0.135 * traffic(body).bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_a_batch_that_is_sharded(mesh: str) -> None:
    """Statistics are those of the whole batch; and channels that are sharded have their own."""
    plan: dict[str, Any] = {"inputs": {"x": "dp, -, -, -"}}
    if mesh == "tp=2":
        plan = {"params": {"conv1.weight": "tp, -, -, -", "conv2.weight": "-, tp, -, -"}}
    program = compiled(mesh, fuse=True, **plan)
    assert program.verify().ok, str(program.verify())


def test_tokens_that_are_pooled() -> None:
    torch.manual_seed(0)
    plan = {"fuse": True, "inputs": {"x": "dp, -"}}
    program = shardc.compile(Pooled(), {"x": torch.randint(30, (8, 32))}, mesh="dp=2", plan=plan)
    calls = list(program.body.calls())
    assert not any(op_name(node.target).startswith("sum") for node in calls)
    kernels = [kernel for node in calls if (kernel := kernel_of(node.target, node.args)) is not None]
    assert [kernel.space for kernel in kernels if kernel.batch] == [(4, 32, 16)]
    assert program.verify().ok, str(program.verify())
