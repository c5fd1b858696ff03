"""Planted bottlenecks, each named by the first line; and a healthy program, of which none is named."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.explain.bottleneck import LEAST, Bottlenecks
from shardc.plan.hardware import named

H200 = named("h200")
TP = {"params": {"layers.*.up.weight": "tp, -"}, "inputs": {"x": "dp"}}
DP = {"inputs": {"x": "dp"}}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(width) for _ in range(layers)])
        self.head = nn.Linear(width, classes, bias=False) if classes else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return (x if self.head is None else self.head(x)).float().square().mean()


def program(
    mesh: str, plan: dict[str, object], *, rows: int = 16384, width: int = 4096, layers: int = 2, classes: int = 0
) -> shardc.Program:
    with torch.device("meta"):
        model, x = Net(width, layers, classes).bfloat16(), torch.empty(rows, width, dtype=torch.bfloat16)
    return shardc.compile(model, x, mesh=mesh, plan={"fuse": True, **plan})


def first(found: Bottlenecks) -> str:
    return str(found).splitlines()[0]


def test_a_healthy_program_has_none() -> None:
    for healthy in (program("dp=8", DP, rows=8 * 16384), program("dp=2, tp=4", TP, rows=2 * 16384)):
        found = healthy.bottlenecks("h200")
        assert found.causes == (), str(found)
        assert first(found).startswith("no bottleneck: ")


def test_a_slow_link() -> None:
    slow = H200.changed({"link_bytes_per_second": 2e10})
    found = program("dp=2, tp=4", TP, rows=2 * 16384).bottlenecks(slow)
    assert first(found) == "slow link: all_reduce over tp waits for links inside a node that send 20 GB/s"
    cause = found.causes[0]
    fast = H200.changed({"link_bytes_per_second": H200.memory_bytes_per_second / 10})
    assert cause.step_ms == pytest.approx(program("dp=2, tp=4", TP, rows=2 * 16384).predict(fast).step_ms)


def test_a_slow_network() -> None:
    slow = H200.changed({"network_bytes_per_second": 1e9})
    found = program("dp=16", DP, rows=16 * 16384).bottlenecks(slow)
    assert first(found) == "slow network: all_reduce over dp waits for links between nodes that send 1 GB/s"


@pytest.mark.parametrize("plan", [{"align": False}, {}])
def test_an_odd_vocabulary(plan: dict[str, object]) -> None:
    odd = program("dp=8", {**DP, **plan}, rows=8 * 8192, width=1024, layers=1, classes=50257)
    found = odd.bottlenecks("h200")
    even = program("dp=8", DP, rows=8 * 8192, width=1024, layers=1, classes=50264).predict("h200")
    if plan:
        assert first(found).startswith(
            "odd sizes: dim 0 of head.weight has 50,257 elements, which is no multiple of 8:"
        )
        assert "pad it in the model, to 50,264; or leave align: false out of the plan" in str(found)
        assert found.causes[0].step_ms == pytest.approx(even.step_ms, rel=0.03)
    else:  # copies pad it: what they take is no bottleneck, and is said to be none
        assert all(cause.name != "odd sizes" for cause in found.causes)
        assert odd.predict("h200").step_ms < (1 + LEAST) * even.step_ms


def test_tensor_parallelism_across_nodes() -> None:
    across = program("tp=8, dp=16", TP, rows=16 * 16384)
    found = across.bottlenecks("h200")
    assert first(found).startswith("tp across nodes: groups of tp span 8 nodes of 8 ranks")
    assert "write mesh: dp=16, tp=8" in str(found)
    inside = program("dp=16, tp=8", TP, rows=16 * 16384)
    assert found.causes[0].step_ms == pytest.approx(inside.predict("h200").step_ms)
    assert all("across" not in cause.name for cause in inside.bottlenecks("h200").causes)


def test_tiny_microbatches() -> None:
    tiny = program("dp=8", {**DP, "accumulate": 64}, rows=8 * 64 * 16, width=1024)
    found = tiny.bottlenecks("h200")
    assert first(found).startswith("tiny microbatches: ")
    assert "products have 16 rows" in first(found)
    assert "change: fewer and larger microbatches: 64 now" in str(found)
    larger = program("dp=8", {**DP, "accumulate": 8}, rows=8 * 64 * 16, width=1024)
    assert found.causes[0].step_ms == pytest.approx(larger.predict("h200").step_ms)
    assert found.causes[0].share > 0.5
    from_file = shardc.Program.from_json(tiny.to_json()).bottlenecks("h200")
    assert from_file.predicted.step_ms == found.predicted.step_ms
    assert sum(c.saved_ms for c in from_file.causes) < found.causes[0].saved_ms, "without a model, no other is compiled"


def test_recompute_for_nothing() -> None:
    again = program("dp=8", {**DP, "recompute": "full"}, rows=8 * 16384)
    found = again.bottlenecks("h200", memory="80GiB")
    assert first(found).startswith("recompute: backward computes again what would fit: ")
    without = program("dp=8", DP, rows=8 * 16384)
    assert found.causes[0].step_ms == pytest.approx(without.predict("h200").step_ms)
    tight = again.bottlenecks("h200", memory=(again.memory().peak + without.memory().peak) // 2)
    assert tight.causes == (), "memory asks for it"


def test_the_worst_comes_first() -> None:
    slow = H200.changed({"link_bytes_per_second": 1e9})
    found = program("dp=2, tp=4", {**TP, "recompute": "full"}, rows=2 * 16384).bottlenecks(slow)
    assert [cause.name for cause in found.causes][:1] == ["slow link"]
    saved = [cause.saved_ms for cause in found.causes]
    assert saved == sorted(saved, reverse=True)
    assert all(cause.share >= LEAST for cause in found.causes)


def test_links_that_no_collective_waits_for_are_no_cause() -> None:
    slow = dataclasses.replace(H200.changed({"link_bytes_per_second": 1e9}), accelerators_per_node=8)
    assert all(cause.name != "slow link" for cause in program("dp=1", DP).bottlenecks(slow).causes)


def test_ranks_that_share_cores_and_wait_for_each_other() -> None:
    """Ranks of a CPU, whose figures are planted: each cause is the step without it."""
    cores, jitter = {"contention": {"cores": 0.9}}, {"meetings": {"jitter_seconds": 0.005}}
    compiled = program("dp=4", {**DP, "bucket": False}, rows=1024, width=512)
    cpu = named("cpu-gloo").changed({"link_bytes_per_second": 1e9, "contention": {}, "meetings": {}})
    slow = cpu.changed(cores | jitter)
    predicted = compiled.predict(slow)
    taken, met = f"{predicted.taken_ms:.2f} on the compute's cores", f"{predicted.met_ms:.2f} for slower ranks"
    assert f"(of which {taken}, {met})" in str(predicted)
    causes = {cause.name: cause for cause in compiled.bottlenecks(slow).causes}
    for name, left in (("slower ranks", cores), ("shared cores", jitter)):
        assert causes[name].step_ms == pytest.approx(compiled.predict(cpu.changed(left)).step_ms)
    fast = H200.changed({"meetings": {}})
    assert "(of which" not in str(compiled.predict(fast))
    assert not {"shared cores", "slower ranks"} & {c.name for c in compiled.bottlenecks(fast).causes}
