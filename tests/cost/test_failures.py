"""What failures cost: the formulas against a search, against a simulation, and against cases known by hand."""

import math
import random

import pytest
import torch
from torch import nn

import shardc
from shardc.cost.failures import (
    HOUR,
    FailureCost,
    Recovery,
    daly_interval,
    duration,
    failure_cost,
    goodput,
    young_interval,
)
from shardc.ir.hardware import Hardware


def best(save: float, restart: float, mtbf: float) -> float:
    """The interval of the best goodput, by ternary search."""
    low, high = save * 1e-3, 20 * mtbf
    for _ in range(300):
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if goodput(left, save, restart, mtbf) < goodput(right, save, restart, mtbf):
            low = left
        else:
            high = right
    return low


@pytest.mark.parametrize("share", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.3])
def test_the_interval_is_that_of_the_best_goodput(share: float) -> None:
    mtbf = 10_000.0
    found, exact = daly_interval(share * mtbf, mtbf), best(share * mtbf, 60.0, mtbf)
    assert found == pytest.approx(exact, rel=0.01 if share < 0.1 else 0.05)
    loss = 1 - goodput(found, share * mtbf, 60.0, mtbf) / goodput(exact, share * mtbf, 60.0, mtbf)
    assert 0 <= loss + 1e-12 < 1e-3


def test_young_is_the_first_order() -> None:
    for share in (1e-6, 1e-4, 1e-2):
        young, daly = young_interval(share, 1.0), daly_interval(share, 1.0)
        assert young == math.sqrt(2 * share)
        assert abs(daly / young - 1) < math.sqrt(share)
    assert daly_interval(2.0, 1.0) == daly_interval(5.0, 1.0) == 1.0, "saves that take longer than ranks live"


def test_without_failures_only_saves_cost() -> None:
    assert goodput(600, 20, 300, 1e12) == pytest.approx(600 / 620, rel=1e-6)


def test_a_job_that_never_gets_through_has_no_goodput() -> None:
    assert goodput(1e6, 1, 1, 10) == 0
    assert goodput(1, 1, 1e6, 10) == 0


@pytest.mark.parametrize(("save", "restart", "mtbf"), [(30, 300, 3600), (120, 600, 1800), (5, 60, 600)])
def test_goodput_is_that_of_simulated_failures(save: float, restart: float, mtbf: float) -> None:
    """Segments of work and save, repeated from the last save after each failure; restarts fail too."""
    draw = random.Random(0)
    interval = daly_interval(save, mtbf)
    clock, segments = 0.0, 20_000
    for _ in range(segments):
        while (fails := draw.expovariate(1 / mtbf)) < interval + save:
            clock += fails
            while (fails := draw.expovariate(1 / mtbf)) < restart:
                clock += fails
            clock += restart
        clock += interval + save
    assert goodput(interval, save, restart, mtbf) == pytest.approx(segments * interval / clock, rel=0.01)


def test_shares_add_up() -> None:
    cost = failure_cost(Recovery(2**33, 2**33, 68.7, 68.7, 300.0), 2048, 6300.0)
    assert cost.goodput + sum(cost.shares.values()) == pytest.approx(1, abs=1e-12)
    assert all(share > 0 for share in cost.shares.values())
    assert cost.mtbf_seconds == pytest.approx(6300 * HOUR / 2048)


def test_more_nodes_and_slower_storage_cost_more() -> None:
    def at(nodes: int, save: float) -> FailureCost:
        return failure_cost(Recovery(1, 1, save, save, 300.0), nodes, 6300.0)

    goods = [at(nodes, 30.0).goodput for nodes in (1, 16, 256, 2048, 16384)]
    assert goods == sorted(goods, reverse=True)
    assert at(2048, 60.0).goodput < at(2048, 30.0).goodput
    assert at(2048, 30.0).interval_seconds < at(16, 30.0).interval_seconds


@pytest.mark.parametrize("hours", [0.0, -1.0, math.inf, math.nan])
def test_hours_that_are_none(hours: float) -> None:
    with pytest.raises(shardc.ShardcError, match="SC208"):
        failure_cost(Recovery(1, 1, 1.0, 1.0, 1.0), 2, hours)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.85, "850 ms"), (12, "12 s"), (570, "9.5 min"), (11160, "3.1 h"), (864000, "10 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------------- of a program
class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


WEIGHTS = 4 * 64 * 64 * 4
STORAGE = Hardware(storage_bytes_per_second=1e6, accelerators_per_node=2)


def program(mesh: str, **plan: object) -> shardc.Program:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    return shardc.compile(
        model, torch.randn(16, 64), mesh=mesh, plan={"inputs": {"x": "dp"}, **plan}, optimizer=optimizer
    )


def test_bytes_are_those_of_weights_and_moments() -> None:
    whole = program("dp=4").failures(100.0, STORAGE).recovery
    steps = 4 * 8  # AdamW counts the steps of each weight, in float64
    assert whole.save_bytes == whole.load_bytes == 3 * WEIGHTS + steps
    assert whole.save_seconds == whole.save_bytes / 1e6
    halves = program("dp=2, tp=2", params={"layers.*.weight": "tp, -"}).failures(100.0, STORAGE).recovery
    assert halves.save_bytes == 3 * WEIGHTS // 2 + steps
    shards = program("dp=4", storage={"zero": 3, "axes": ["dp"]}).failures(100.0, STORAGE).recovery
    assert shards.save_bytes == 3 * WEIGHTS // 4 + steps


def test_stages_save_their_own() -> None:
    piped = program("pp=2, dp=2", pipeline={"microbatches": 4}).failures(100.0, STORAGE).recovery
    assert piped.save_bytes == 3 * WEIGHTS // 2 + 8 * 2


def test_a_job_that_restarts_on_another_mesh_reads_its_own_shards() -> None:
    four = program("dp=2, tp=2", params={"layers.*.weight": "tp, -"})
    two = program("dp=4")
    cost = four.failures(100.0, STORAGE, restarted=two, relaunch_seconds=10.0)
    assert cost.nodes == 2
    r = cost.recovery
    assert r.reshard_bytes == two.failures(100.0, STORAGE).recovery.load_bytes
    assert r.restart_seconds == 10.0 + r.reshard_bytes / 1e6
    assert "onto the other mesh" in str(cost)
    assert cost.goodput < four.failures(100.0, STORAGE, relaunch_seconds=10.0).goodput
