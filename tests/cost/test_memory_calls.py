"""The memory report against what a rank's own code holds at every begin, wait and run of a call: to the byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.memory import memory
from shardc.ir.graph import Graph
from shardc.ir.ops.buckets import PACK
from tests.cost.rank_meter import Key, held_by_a_rank
from tests.models.zoo import PLANS, make

ZERO: dict[int, dict[str, Any]] = {n: {"storage": {"zero": n, "axes": ["dp"]}} for n in (1, 2, 3)}
SMALL: dict[str, dict[str, Any]] = {
    "zero-2": {**ZERO[2], "bucket": True},
    "zero-2 fuse": {**ZERO[2], "bucket": True, "fuse": True},
    "accumulate fuse": {"bucket": True, "fuse": True, "accumulate": 2},
    "accumulate zero-3": {**ZERO[3], "bucket": True, "accumulate": 2},
    "accumulate bf16 zero-1": {**ZERO[1], "bucket": True, "accumulate": 4, "precision": "bf16"},
    "accumulate bf16 zero-2 fuse": {**ZERO[2], "bucket": True, "fuse": True, "accumulate": 2, "precision": "bf16"},
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "sequence parallel": ("gpt2_sp", "dp=1, tp=2", {}),
    "gpt2 zero-2 fuse bucket": ("gpt2", "dp=2, tp=1", {**ZERO[2], "fuse": True, "bucket": True}),
    "zero-1": ("gpt2", "dp=2, tp=1", {**ZERO[1], "bucket": False}),
    "zero-3": ("gpt2", "dp=2, tp=2", ZERO[3]),
    "scaled": ("gpt2", "dp=2, tp=1", {**ZERO[2], "precision": {"compute": "fp16"}, "clip_grad_norm": 0.1}),
    "bf16": ("gpt2", "dp=2, tp=1", {**ZERO[2], "precision": "bf16", "clip_grad_norm": 0.1, "bucket": True}),
    "recompute full": ("gpt2", "dp=2, tp=2", {**ZERO[3], "recompute": "full"}),
    "recompute selective": ("gpt2_sp", "dp=2, tp=2", {"recompute": "selective"}),
    "zero-3 fuse bucket": ("gpt2", "dp=2, tp=1", {**ZERO[3], "fuse": True, "bucket": 20_000, "clip_grad_norm": 0.1}),
    "llama fuse": ("llama_sp", "dp=2, tp=2", {"fuse": True, "bucket": False}),
    "bf16 accumulate": ("gpt2", "dp=2, tp=2", {**ZERO[1], "precision": "bf16", "accumulate": 2, "bucket": False}),
    "t5": ("t5", "dp=2, tp=2", {"bucket": True}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))).square().mean()


def small(plan: dict[str, Any]) -> Graph:
    torch.manual_seed(0)
    model = Model()
    mine = torch.optim.AdamW(model.parameters())
    plan = {"mesh": "dp=2", "inputs": {"x": "dp, -"}, **plan}
    return shardc.compile(model, {"x": torch.randn(8, 8)}, plan=plan, optimizer=mine).body


def modelled(case: str) -> Graph:
    name, mesh, extra = MODELS[case]
    torch.manual_seed(0)
    model, batch, loss = make(name.removesuffix("_sp"), layers=2)
    plan = shardc.Plan.load(PLANS / f"{name}.yaml").merge(shardc.Plan.from_dict(extra))
    mine = torch.optim.AdamW(model.parameters())
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=mine, loss=loss).body


def check(body: Graph) -> None:
    """With an arena and without: in the report's order, as much as it says, and the same peak."""
    for placed in (False, True):
        real, on_host = held_by_a_rank(body, placed=placed)
        report = memory(body, arena=placed, overlap=True)
        said: dict[Key, int] = {
            (action.kind, action.at): size for action, size in zip(report.actions, report.timeline, strict=True)
        }
        assert list(real) == [key for key in said if key in real]
        absent = {kind for kind, at in said if (kind, at) not in real}
        assert absent <= {"run", "free"}, "of calls that are views, or made before the step; of frees after a call"
        differ = [(key, said[key] - size) for key, size in real.items() if size != said[key]]
        assert not differ, f"{len(differ)} of {len(real)}: {differ}"
        assert on_host == report.host.most - report.host.stored
        assert max(real.values()) == max(report.timeline) == report.peak - report.stored


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", SMALL)
def test_a_rank_holds_what_the_report_says(case: str) -> None:
    body = small(SMALL[case])
    assert any(call.target is PACK for call in body.calls())
    check(body)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("case", MODELS)
def test_a_rank_of_a_model_holds_what_the_report_says(case: str) -> None:
    check(modelled(case))


def test_what_is_in_flight_counts() -> None:
    """Gathers hold their results early, reductions what they read late, and both their buffers: more at the peak."""
    body = small({"params": {"up.weight": "dp, -"}, "inputs": {"x": "-, dp"}})
    check(body)
    waiting, report = memory(body), memory(body, overlap=True)
    assert max(report.timeline) > 1.2 * max(waiting.timeline)
    assert waiting.row("in flight").most == 0 < report.row("in flight").most
    assert sum(row.bytes for row in report.of_rank(0)) == report.peak == sum(one.bytes for one in report.live)
