"""Predicted steps whose time follows by hand: overlap, chains, pipelines; and what holds of every prediction."""

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.profile import CallTime, Profile
from shardc.ir.diagnostic import ShardcError
from shardc.ir.hardware import Hardware
from shardc.plan.hardware import hardware
from shardc.schedule.instructions import Forward

FLAT = Hardware(
    bf16_flops_per_second=1e12,
    peak_flops_per_second=1e12,
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


class Trained(Chain):
    """Its first layer needs the gradient of its input, as all others do: stages are equal."""

    def __init__(self, layers: int) -> None:
        super().__init__(layers)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


def test_dependent_products_add_up() -> None:
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={})
    predicted = program.predict(FLAT)
    # Forward, and both gradients of every layer, without that of the batch.
    assert predicted.step_ms == pytest.approx(1e3 * (3 * 4 - 1) * 2 * 64 * 256 * 256 / 1e12, rel=1e-3)
    assert predicted.mfu == pytest.approx(1.0, rel=1e-3)
    assert (predicted.tokens, predicted.unit) == (64, "samples")
    assert "samples/s" in str(predicted)
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


def test_transfers_between_stages_wait_for_the_slower_rank() -> None:
    """One microbatch meets twice: after the first stage's forward, and after the backward of the last."""
    plan = {"pipeline": {"microbatches": 1, "schedule": "gpipe", "split": ["layers.2"]}}
    fast = dataclasses.replace(FLAT, link_bytes_per_second=1e18)
    program = shardc.compile(Trained(4), torch.randn(64, 256), mesh=shardc.Mesh(pp=2), plan=plan)
    jitter, forward = 1e-6, 2 * 2 * 64 * 256 * 256 / 1e12
    late = [1e3 * (jitter * work) ** 0.5 for work in (forward, 2 * forward)]
    slow = program.predict(fast.changed({"meetings": {"jitter_seconds": jitter}}))
    assert slow.step_ms - program.predict(fast).step_ms == pytest.approx(sum(late), rel=2e-2)


def test_transfers_between_stages_take_the_cores_of_the_work_beside_them() -> None:
    """Of two microbatches, the first stage sends the first while it computes the second, which takes longer by that."""
    plan = {"pipeline": {"microbatches": 2, "schedule": "gpipe", "split": ["layers.2"]}}
    program = shardc.compile(Trained(4), torch.randn(128, 256), mesh=shardc.Mesh(pp=2), plan=plan)
    host = dataclasses.replace(FLAT, link_bytes_per_second=1e12)
    moving = 64 * 256 * 4 / 1e12
    for switch in (0.0, 1e-8):
        contention, taken = {"cores": 0.5, "switch_seconds": switch}, 0.5 * moving + switch
        plain, shared = program.predict(host), program.predict(host.changed({"contention": contention}))
        forwards = [
            [e.end - e.start for e in one.timeline.events if e.rank == 0 and isinstance(e.instruction, Forward)]
            for one in (plain, shared)
            if one.timeline is not None
        ]
        assert [b - a for a, b in zip(*forwards, strict=True)] == pytest.approx([0.0, taken], rel=5e-2, abs=1e-12)
        assert shared.step_ms > plain.step_ms


def test_kernels_are_faster_while_neighbours_wait() -> None:
    """By the share of a step in which they do: of one rank all, of a pipeline its bubble, of equal ranks nothing."""
    plans: dict[str, tuple[int, dict[str, Any]]] = {
        "dp=2": (2, {"inputs": {"x": "dp, -"}}),
        "dp=1": (1, {}),
        "pp=2": (2, {"pipeline": {"microbatches": 1, "schedule": "gpipe", "split": ["layers.2"]}}),
    }
    host = dataclasses.replace(FLAT, link_bytes_per_second=1e18, accelerators_per_node=2)
    shared = host.changed({"contention": {"neighbours": 1.25}})
    for mesh, (ranks, plan) in plans.items():
        program = shardc.compile(Trained(4), torch.randn(64, 256), mesh=mesh, plan=plan)
        alone, beside = program.predict(shared), program.predict(host)
        waiting = beside.bubble if "pp" in mesh else 2.0 - ranks
        assert 0.4 < waiting <= 1 or mesh == "dp=2"
        assert alone.step_ms == pytest.approx(beside.step_ms * (1 - 0.2 * waiting), rel=1e-3), mesh
        assert alone.bubble == pytest.approx(beside.bubble, abs=1e-3)


def test_every_coordinate_has_tracks_of_its_own_in_a_trace(tmp_path: Path) -> None:
    plan = {"pipeline": {"microbatches": 4, "schedule": "1f1b"}, "params": {"layers.0.weight": "tp, -"}}
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(pp=2, tp=2), plan=plan)
    predicted = program.predict("h200")
    predicted.to_trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    shown = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {names[e["pid"], e["tid"]] for e in shown} >= {"compute", "instructions", "collectives over tp", "Send"}
    assert {e["pid"] for e in shown} == {0, 1}
    assert max(e["ts"] + e["dur"] for e in shown) == pytest.approx(predicted.step_ms * 1e3)
    for track, name in names.items():
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in shown if (e["pid"], e["tid"]) == track)
        assert all(start >= -1e-6 and end >= start for start, end in spans)
        assert name == "Send" or all(a[1] <= b[0] + 1e-3 for a, b in pairwise(spans))
    forward = [e for e in shown if e["name"] == "layers.0.linear"]
    assert len(forward) == 4  # once a microbatch
    whole = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={}).predict("h200").trace()
    assert {e["args"].get("phase") for e in whole["traceEvents"] if e["ph"] == "X"} == {"fwd", "bwd"}


@pytest.mark.parametrize("microbatches", [4, 8])
def test_a_bubble_is_that_of_1f1b(microbatches: int) -> None:
    """(p - 1) / (m + p - 1) of four equal stages and free transfers."""
    split = [f"layers.{i}" for i in (2, 4, 6)]
    plan = {"pipeline": {"microbatches": microbatches, "schedule": "1f1b", "split": split}}
    fast = dataclasses.replace(FLAT, link_bytes_per_second=1e18, network_bytes_per_second=1e18)
    program = shardc.compile(Trained(8), torch.randn(8 * microbatches, 256), mesh=shardc.Mesh(pp=4), plan=plan)
    assert program.predict(fast).bubble == pytest.approx(3 / (microbatches + 3), rel=0.02)


def test_what_is_exposed_is_told_by_cause() -> None:
    """Megatron's two all-reduces of a pair of layers, by the annotation that asks for them."""
    plan = {"params": {"layers.0.weight": "tp, -", "layers.2.weight": "tp, -"}}
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(tp=2), plan=plan)
    predicted = program.predict(FLAT)
    forward = next(row for row in predicted.exposed_ms if row.phase == "fwd" and row.bytes > 100)
    assert (forward.kind, forward.axes, forward.times) == ("all_reduce", ("tp",), 2)
    assert "layers.*.weight" in forward.cause
    assert "test_prediction.py" in forward.source
    assert predicted.exposed_total_ms == pytest.approx(
        predicted.step_ms - sum(ms for kind, ms in predicted.kinds_ms.items() if kind != "collective"), rel=1e-2
    )
    assert "all_reduce over tp, fwd, x2" in str(predicted)


def test_programs_from_files_predict_the_same(tmp_path: Path) -> None:
    plan = {"pipeline": {"microbatches": 4, "schedule": "1f1b"}}
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(pp=2), plan=plan)
    program.save(tmp_path / "program.json")
    assert shardc.Program.load(tmp_path / "program.json").predict("h200") == program.predict("h200")


def test_microbatches_of_one_rank_follow_each_other() -> None:
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={"accumulate": 4})
    once = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={})
    four, one = program.predict(FLAT), once.predict(FLAT)
    assert four.kinds_ms["product"] == pytest.approx(one.kinds_ms["product"])
    assert four.tokens == one.tokens
    assert four.launches > 3 * one.launches


def test_products_slow_down_while_a_device_does_nothing_else() -> None:
    program = shardc.compile(Chain(), torch.randn(64, 256), mesh=shardc.Mesh(dp=1), plan={})
    power = FLAT.tables.model_validate({"power": {"sustained": 0.8, "relief": 0.5, "most": 1.25}})
    hot = program.predict(dataclasses.replace(FLAT, tables=power))
    assert hot.kinds_ms["product"] == pytest.approx(program.predict(FLAT).kinds_ms["product"] / 0.8, rel=1e-2)
    slow = dataclasses.replace(FLAT, memory_bytes_per_second=1e9, tables=power)  # the device mostly moves memory
    assert program.predict(slow).kinds_ms["product"] == pytest.approx(hot.kinds_ms["product"] * 0.8 / 1.25, rel=1e-2)


def test_hardware_that_is_not_known_is_refused_by_name() -> None:
    program = shardc.compile(Chain(1), torch.randn(8, 256), mesh=shardc.Mesh(dp=1), plan={})
    assert program.predict("h200").hardware == "h200"
    with pytest.raises(shardc.ShardcError, match="there is no hardware named 'h20'"):
        program.predict("h20")
    with pytest.raises(shardc.ShardcError, match="SC208"):
        program.predict("missing.yaml")


def test_a_profile_of_another_program_is_refused() -> None:
    predicted = shardc.compile(Chain(), torch.randn(8, 256), mesh=shardc.Mesh(dp=1)).predict(FLAT)
    ran = tuple(CallTime(call.within, call.call, call.times, 1.0) for call in predicted.calls)
    assert predicted.diff(Profile("cpu", 0, 5.0, ran)).measured_ms == 5.0
    others = tuple(CallTime("Forward 1", f"other.{n}", 1, 1.0) for n in range(len(ran) + 1))
    with pytest.raises(ShardcError, match=f"SC402.* {len(ran)} of its {2 * len(ran) + 1} calls are in the prediction"):
        predicted.diff(Profile("cpu", 3, 5.0, ran + others))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(64, 32), nn.LayerNorm(32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(self.norm(x)).relu()
        return (x @ self.embed.weight.T).square().mean()


def test_no_collective_is_exposed_for_longer_than_it_takes() -> None:
    """Compute that waits for one in a queue stands still for those in front of it, too: they are what is exposed."""
    plan = {"inputs": {"ids": "dp, -"}, "storage": {"zero": 3, "axes": "dp"}}
    program, cpu = shardc.compile(Tied(), torch.randint(0, 64, (8, 16)), mesh="dp=2", plan=plan), hardware("cpu-gloo")
    slow = program.predict(cpu)  # whose collectives take cores, and whose ranks wait for each other
    switches = sum(row.times for row in slow.exposed_ms) * cpu.tables.contention.switch_seconds * 1e3
    together = sum(row.ms for row in slow.exposed_ms) + slow.met_ms + switches
    assert sum(row.exposed_ms for row in slow.exposed_ms) <= together
    assert 0 < slow.taken_ms < sum(row.ms for row in slow.exposed_ms)
    predicted = program.predict(cpu.changed({"contention": {}, "meetings": {}}))
    assert len(predicted.exposed_ms) == 4
    for row in predicted.exposed_ms:
        assert 0 < row.exposed_ms <= row.ms * (1 + 1e-9)
    assert 0.9 * predicted.step_ms < predicted.exposed_total_ms < predicted.step_ms


def test_sums_over_stages_are_exposed() -> None:
    plan = {
        "pipeline": {"microbatches": 2, "schedule": "1f1b", "split": ["layers.1"]},
        "clip_grad_norm": 1.0,
    }
    model, ids = Tied(), torch.randint(0, 64, (8, 16))
    program = shardc.compile(model, ids, mesh="pp=2", plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    slow = dataclasses.replace(FLAT, link_bytes_per_second=1e6)
    predicted = program.predict(slow)
    assert predicted.unit == "tokens"
    rows = {row.cause: row for row in predicted.exposed_ms if row.axes == ("pp",)}
    tied, norm = rows["gradients of weights that stages share"], rows["norm of all stages' gradients"]
    size = 4 * (64 * 32 + 2 * 32)  # of the table and of the norm: 2 (k-1)/k of each
    assert (tied.kind, tied.phase, tied.times, tied.bytes) == ("all_reduce", "bwd", 3, size)
    assert tied.exposed_ms == tied.ms == pytest.approx(1e3 * size / 1e6, rel=1e-3)
    assert (norm.phase, norm.times, norm.bytes) == ("opt", 1, 8)
    assert sum(row.exposed_ms for row in rows.values()) < predicted.step_ms
