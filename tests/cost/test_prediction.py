"""Predicted steps whose time follows by hand: overlap, chains, pipelines; and what holds of every prediction."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.hardware import Hardware

FLAT = Hardware(
    bf16_flops_per_second=1e12,
    fp32_flops_per_second=1e12,
    memory_bytes_per_second=1e18,
    link_bytes_per_second=1e9,
    collective_start_seconds=1e-9,
    kernel_launch_seconds=1e-9,
    kernel_gap_seconds=1e-9,
)


class Chain(nn.Module):
    def __init__(self, layers: int = 4, width: int = 256) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().sum()


def test_dependent_products_add_up() -> None:
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={})
    predicted = program.predict(FLAT)
    # Forward, and both gradients of every layer, without that of the batch.
    assert predicted.step_ms == pytest.approx(1e3 * (3 * 4 - 1) * 2 * 64 * 256 * 256 / 1e12, rel=1e-3)
    assert predicted.mfu == pytest.approx(1.0, rel=1e-3)
    assert predicted.tokens == 64
    assert predicted.peak_bytes == program.memory().peak


def test_an_equal_pipeline_is_idle_as_long_as_its_schedule_says() -> None:
    plan = {"pipeline": {"microbatches": 8, "schedule": "1f1b", "split": ["layers.1", "layers.2", "layers.3"]}}
    fast = dataclasses.replace(FLAT, link_bytes_per_second=1e18, network_bytes_per_second=1e18)
    program = shardc.compile(Chain(), torch.randn(512, 256), mesh=shardc.Mesh(pp=4), plan=plan)
    predicted = program.predict(fast)
    # The first stage has no gradient of the batch to compute: its backward is shorter, but no other stage waits for it.
    forward = 2 * 64 * 256 * 256 / 1e12
    assert predicted.step_ms == pytest.approx(1e3 * (8 + 3) * 3 * forward, rel=0.06)
    assert predicted.timeline is not None
    assert predicted.timeline.makespan == pytest.approx(predicted.step_ms / 1e3)


def test_hardware_that_is_not_known_is_refused_by_name() -> None:
    program = shardc.compile(Chain(1), torch.randn(8, 256), mesh=shardc.Mesh(dp=1), plan={})
    assert program.predict("h200").hardware == "h200"
    with pytest.raises(shardc.ShardcError, match="there is no hardware named 'h20'"):
        program.predict("h20")
    with pytest.raises(shardc.ShardcError, match="SC208"):
        program.predict("missing.yaml")
