"""Where the ideal speed-up is lost: shares that add up, and planted losses that each have one share."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.explain.scaling import SHARES, Lost, Scaling
from shardc.ir.hardware import Hardware

FAST = Hardware(
    bf16_flops_per_second=1e12,
    fp32_flops_per_second=1e12,
    memory_bytes_per_second=1e18,
    link_bytes_per_second=1e18,
    network_bytes_per_second=1e18,
    collective_start_seconds=1e-9,
    kernel_launch_seconds=1e-9,
    kernel_gap_seconds=1e-9,
)


class Net(nn.Module):
    def __init__(self, layers: int = 2, width: int = 128, *, lonely: bool = False) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(width, 4 * width, bias=False) for _ in range(layers)])
        self.down = nn.ModuleList([nn.Linear(4 * width, width, bias=False) for _ in range(layers)])
        self.lonely = nn.Linear(width, width, bias=False) if lonely else None

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(up(x).relu())
        x = x if self.lonely is None else self.lonely(x)
        return x.square().sum()


PLAN = {"params": {"up.*.weight": "tp, -"}, "inputs": {"x": "dp"}}


def program(mesh: str = "dp=1, tp=1", plan: dict[str, object] | None = None, **net: bool) -> shardc.Program:
    plan = PLAN if plan is None else plan
    return shardc.compile(Net(**net).to("meta"), torch.empty(64, 128, device="meta"), mesh=mesh, plan=plan)


def adds_up(scaled: Scaling) -> None:
    for row in scaled.rows:
        assert math.fsum(row.shares.values()) == pytest.approx(row.lost_ms, rel=1e-9, abs=1e-12)
        assert set(row.shares) == set(SHARES)
    assert all(abs(share) < 1e-12 for share in scaled.rows[0].shares.values())  # but for rounding


def most(row: Lost) -> str:
    return max(row.shares, key=row.shares.__getitem__)


@pytest.mark.parametrize("hardware", ["h200", "default"])
@pytest.mark.parametrize("axis", ["tp", "dp"])
def test_shares_add_up_to_what_is_lost(axis: str, hardware: str) -> None:
    scaled = program().scaling(axis, [1, 2, 4, 8], hardware)
    adds_up(scaled)
    assert [row.parts.ranks for row in scaled.rows] == [1, 2, 4, 8]
    assert scaled.rows[0].lost_ms == 0


def test_nothing_is_lost_where_nothing_costs() -> None:
    scaled = program().scaling("dp", [1, 4], FAST)
    adds_up(scaled)
    assert scaled.rows[1].lost_ms == pytest.approx(0, abs=2e-3 * scaled.rows[1].ideal_ms)
    assert scaled.speed_up(scaled.rows[1]) == pytest.approx(4, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "share"),
    [
        ({"collective_start_seconds": 1e-3}, "latency"),
        ({"link_bytes_per_second": 1e8}, "exposed bytes"),
        ({"kernel_launch_seconds": 1e-3}, "launches"),
    ],
)
def test_a_planted_loss_has_its_share(changes: dict[str, float], share: str) -> None:
    scaled = program().scaling("tp", [1, 2, 4], dataclasses.replace(FAST, **changes))
    adds_up(scaled)
    assert [most(row) for row in scaled.rows[1:]] == [share, share]
    last = scaled.rows[-1]
    assert last.shares[share] > 0.9 * last.lost_ms > 0
    assert f"most is lost by {share}" in str(scaled)


def test_work_that_every_rank_does_is_replicated() -> None:
    scaled = program(lonely=True).scaling("tp", [1, 4], FAST)
    adds_up(scaled)
    row = scaled.rows[1]
    assert most(row) == "replicated work"
    forward = 2 * 64 * 128 * 128 / 1e12 * 1e3
    assert row.shares["replicated work"] == pytest.approx(3 * forward * (1 - 1 / 4), rel=0.01)


def test_products_that_get_smaller_run_slower() -> None:
    """The tables of an H200 have tiles, and what a product takes to begin."""
    scaled = program().scaling("tp", [1, 8], "h200")
    assert scaled.rows[1].shares["smaller products"] > 0


def test_a_pipeline_loses_its_bubble() -> None:
    plan: dict[str, object] = {"inputs": {"x": "dp"}, "pipeline": {"microbatches": 4, "schedule": "gpipe"}}
    piped = program("pp=1, dp=1", plan)
    scaled = piped.scaling("pp", [1, 2], FAST)
    adds_up(scaled)
    assert most(scaled.rows[1]) == "bubble"


def test_what_cannot_be_scaled_is_refused() -> None:
    with pytest.raises(shardc.ShardcError, match="SC201"):
        program().scaling("pt", [1, 2], FAST)
    with pytest.raises(shardc.ShardcError, match="SC210"):
        program().scaling("tp", [1, 0], FAST)
    with pytest.raises(shardc.ShardcError, match="SC105"):
        shardc.Program.from_json(program().to_json()).scaling("tp", [1, 2], FAST)
