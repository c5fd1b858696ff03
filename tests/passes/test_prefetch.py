"""What gathers of parameters send is made when they may begin: products run beside all but the first layer's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import shardc
from benchmarks.measured_models import SIZES
from shardc.cost.beside import beside
from shardc.ir.graph import info
from shardc.ir.ops.collectives import all_gather
from shardc.ir.overlap_schedule import AHEAD
from shardc.ir.parse import parse
from shardc.passes.communication.prefetch import Prefetch
from shardc.passes.verify import same_calls
from tests.passes.test_late_gradients import BATCH, SMALL, results_of, small
from tests.replanned import replanned

MASTER = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}
ZERO = {"storage": {"zero": 3, "axes": "dp"}, **BATCH}
OFF: dict[str, Any] = {"prefetch": False}


@cache
def large(bucket: bool, layers: int = 3) -> shardc.Program:
    """gpt-1.3b's layers under zero-3, with float32 master weights, on the meta device."""
    sizes = replace(SIZES["gpt-1.3b"], layers=layers)
    with torch.device("meta"):
        model, ids = sizes.model().float(), torch.zeros(16, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "dp=4", **ZERO, "precision": MASTER, "bucket": bucket, "fuse": True}
    return shardc.compile(model, {"tokens": ids, "targets": ids}, plan=plan)


def bare(program: shardc.Program) -> list[str]:
    """Gathers of forward without a product beside them."""
    rows = [row for row in beside(program.body) if row.kind == "all_gather" and row.phase == "fwd"]
    return [info(row.node).name for row in rows if not row.products]


@pytest.mark.parametrize(("bucket", "many"), [(True, 8), (False, 15)])
def test_only_the_first_layer_waits_for_its_parameters(bucket: bool, many: int) -> None:
    early = large(bucket)
    late = replanned(early, overlap=OFF)
    assert len(bare(late)) >= many
    assert all("blocks.0" in name or "blocks" not in name for name in bare(early))
    assert not any(name.startswith(("norm", "head")) for name in bare(early))
    assert early.memory().peak <= 1.02 * late.memory().peak
    steps = [program.predict("h200-nvlink").step_ms for program in (early, late)]
    assert steps[0] < steps[1]


def test_shards_are_held_for_a_window_of_collectives() -> None:
    """Not all of a model's are cast at its beginning."""
    program = large(False)
    calls = [node for node in program.body.calls() if info(node).phase == "fwd"]
    at = {node: index for index, node in enumerate(calls)}
    gathers = [node for node in calls if node.target is all_gather and node.all_input_nodes[0] in at]
    assert len(gathers) > 2 * AHEAD
    for index, node in enumerate(gathers):
        if index >= AHEAD:
            assert at[node.all_input_nodes[0]] > at[gathers[index - AHEAD]] - AHEAD


CASES: dict[str, dict[str, Any]] = {
    "pure": {"mesh": "dp=2", **ZERO, "bucket": False},
    "bucket": {"mesh": "dp=2", **ZERO, "precision": MASTER, "bucket": "2 KiB"},
    "master": {"mesh": "dp=2, tp=2", **ZERO, "precision": MASTER, "bucket": False},
    "accumulate": {"mesh": "dp=2", **ZERO, "precision": MASTER, "accumulate": 2, "recompute": "full", "bucket": True},
    "fuse": {"mesh": "dp=2", **ZERO, "precision": MASTER, "fuse": True},
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_no_bit_changes(case: str) -> None:
    early = small(SMALL, {"params": {}, **CASES[case]})
    late = replanned(early, overlap=OFF)
    orders = [[info(node).name for node in program.body.calls()] for program in (early, late)]
    assert (orders[0] != orders[1]) == (case != "pure")
    assert case == "fuse" or same_calls(late.body, early.body) == []
    report = early.verify()
    assert report.ok, str(report)
    for one, other in zip(results_of(early), results_of(late), strict=True):
        assert torch.equal(one, other)


def test_what_is_made_of_a_batch_or_by_a_collective_stays() -> None:
    text = """graph @step mesh(dp=2, tp=2) {
  %w = param "w" : f32[8@dp, 8@tp]
  %x = input "x" : f32[8@dp, 8]
  %tanh = tanh(%x) : f32[8@dp, 8]
  %a = shardc.all_gather(%tanh, axes=["dp"], atoms=[8, 8], pos=0, size=8, shape=[8, 8]) : f32[8, 8]
  %y = shardc.linear(%a, %a) : f32[8, 8]
  %w.tp = shardc.all_gather(%w, axes=["tp"], atoms=[8, 8], pos=1, size=8, shape=[8, 8]) : f32[8@dp, 8]
  %exp = exp(%w.tp) : f32[8@dp, 8]
  %b = shardc.all_gather(%exp, axes=["dp"], atoms=[8, 8], pos=0, size=8, shape=[8, 8]) : f32[8, 8]
  %z = shardc.linear(%y, %b) : f32[8, 8]
  return output "z" = %z
}
"""
    graph = parse(text)
    before = [info(node).name for node in graph.calls()]
    assert [info(node).name for node in Prefetch().run(graph).calls()] == before
