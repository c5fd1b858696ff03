"""Two halves of the batch run interleaved, make what two microbatches make, and leave few collectives alone."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from benchmarks.measured_models import SIZES
from shardc.cli.summary import summary
from shardc.cost.beside import beside
from shardc.cost.memory import memory
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import info
from shardc.ir.ops.collectives import all_gather
from shardc.ir.parse import parse
from shardc.ir.plain import graph_from_plain, graph_to_plain
from shardc.runtime.execute.executor import _output_broadcasts
from shardc.runtime.oracle.simulate_stages import simulate_stages
from tests.cost.test_memory import measured
from tests.cost.test_memory_calls import check
from tests.passes.test_late_gradients import BATCH, COLUMNS, GATED, PLANS, SEQUENCE, SMALL, small
from tests.sums import sums_apart

SPLIT: dict[str, Any] = {"overlap": {"split": 2}}
MORE: dict[str, dict[str, Any]] = {
    **{name: plan for name, plan in PLANS.items() if name != "master"},
    "zero, several": {**PLANS["zero"], "accumulate": 3, "bucket": True, "fuse": True},
    "budget": {"mesh": "tp=2", "recompute": {"budget": 20000}, **SEQUENCE},
    "tokens": {"mesh": "dp=2, tp=2", **BATCH, "loss": {"tokens": "targets"}},
    "stages": {"mesh": "pp=2, tp=2", "pipeline": {"microbatches": 2, "schedule": "zb-h1"}},
}


def halves_and_microbatches(plan: dict[str, Any], rows: int = 12) -> tuple[shardc.Program, shardc.Program]:
    """A program of halves, and one whose microbatches they are."""
    several = {**plan, "accumulate": 2 * plan.get("accumulate", 1)}
    if "pipeline" in plan:
        stages = {**plan["pipeline"], "microbatches": 2 * plan["pipeline"]["microbatches"]}
        several = {**plan, "pipeline": stages}
    return small(GATED, {**plan, **SPLIT}, rows), small(GATED, several, rows)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", MORE)
def test_equals_microbatches(case: str) -> None:
    """To the bit, where no other microbatches are added to them in another order."""
    split, several = halves_and_microbatches(MORE[case])
    assert (split.body.halves, 2 * split.body.microbatches) == (2, several.body.microbatches)
    report = split.verify()
    assert report.ok, str(report)
    assert (report.eager_error or 0.0) < 1e-12
    inputs = split.inputs()
    if "tokens" in case:
        inputs["targets"][:5] = -100  # nothing counts in a half of the second data coordinate
    alone = split.body.microbatches == 1
    found, expected = (simulate_stages(program.staged, inputs) for program in (split, several))
    for port, value in expected.items():
        error = (found[port] - value).abs().max()
        bound = 1e-11 if value.dtype == torch.float64 else 4 * torch.finfo(value.dtype).eps * float(value.abs().max())
        assert torch.equal(found[port], value) if alone else float(error) < bound, (port.name, error)


@cache
def exposed(name: str, split: bool, sequence: bool) -> tuple[float, int, float]:
    """Of forward's collectives on tp=4: milliseconds that compute waits, those without a product beside them; and the
    peak."""
    sizes = replace(SIZES[name], layers=4)
    with torch.device("meta"):
        model, ids = sizes.model(), torch.zeros(2 if sizes.gated else 4, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "tp=4", "params": COLUMNS, "hardware": "h200-nvlink", "fuse": True}
    plan |= (SPLIT if split else {}) | (SEQUENCE if sequence else {})
    program = shardc.compile(model, {"tokens": ids, "targets": ids}, plan=plan)
    waits = sum(row.exposed_ms for row in program.predict("h200-nvlink").exposed_ms if row.phase == "fwd")
    bare = sum(row.phase == "fwd" and not row.products for row in beside(program.body))
    return waits, bare, program.memory().peak


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", ["gpt-6.7b-slice", "llama3-8b-slice"])
def test_little_of_forward_is_exposed(name: str, sequence: bool) -> None:
    before, bare_before, peak_before = exposed(name, False, sequence)
    waits, bare, peak = exposed(name, True, sequence)
    assert waits < before / 5
    assert bare < bare_before / 2  # of twice as many
    assert peak <= 1.1 * peak_before


@pytest.mark.parametrize("case", ["tp", "zero", "recompute", "tokens"])
def test_memory_is_what_ranks_hold(case: str) -> None:
    with sums_apart():  # simulations allocate no members in flat tensors
        body = small(SMALL, {**MORE[case], **SPLIT, "bucket": False}, 8).body
    assert list(memory(body).timeline) == measured(body)
    check(small(SMALL, {**MORE[case], **SPLIT}, 8).body)


def test_a_budget_of_activations_is_for_both_halves() -> None:
    program = small(GATED, {"mesh": "tp=2", "recompute": {"budget": 200000}, **SPLIT}, 16)
    assert 80000 < memory(program.body, overlap=True).row("activations").most <= 200000
    assert not any(found.code == "SC214" for found in program.diagnostics)


def test_gathered_weights_serve_both_halves() -> None:
    """They are gathered as often as for one batch, and the halves stay so close that few are held at a time."""
    plan = {"mesh": "dp=2", "params": {}, **BATCH, "storage": {"zero": 3, "axes": "dp"}}
    split, whole = (small(SMALL, {**plan, **more}, 8).body for more in (SPLIT, {}))
    counts = [len(graph.calls_of(all_gather)) for graph in (split, whole)]
    assert counts[0] == counts[1] > 4
    held = [memory(graph, overlap=True).row("communication").most for graph in (split, whole)]
    assert held[0] <= 1.5 * held[1]


class Counted(nn.Module):
    """Buffers that forward changes, an input that is not split, outputs with and without rows, random numbers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.fc, self.drop = nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Dropout(drop)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        y = self.drop(self.fc(self.norm(x) * scale))
        return {"loss": (y * y).sum() + self.fc.weight.square().sum(), "y": y, "columns": y.sum(0), "largest": y.max()}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_state_outputs_and_draws_are_those_of_microbatches(count: int, drop: float) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 8), "scale": torch.rand(1, 8)}
    plan: dict[str, Any] = {"inputs": {"x": "dp, -"}, "outputs": {"y": "dp, -"}}
    results: list[shardc.StepResult] = []
    for more in ({"accumulate": count, **SPLIT}, {"accumulate": 2 * count}):
        torch.manual_seed(0)
        program = shardc.compile(Counted(drop).double(), _double(batch), mesh="dp=2", plan={**plan, **more})
        report = program.verify()
        assert report.ok, str(report)
        results.append(program.launch(seed=7).step(_double(batch)))
    split, several = results
    torch.testing.assert_close(split.loss, several.loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(split.grads, several.grads, rtol=1e-12, atol=1e-13)
    assert int(split.buffers["steps"]) == 2 * count
    for name, value in several.buffers.items():
        assert torch.equal(split.buffers[name], value), name
    for name, output in several.outputs.items():
        assert torch.equal(split.outputs[name].full(), output.full()), name
    assert split.scalars.keys() == several.scalars.keys() >= {"largest"}
    torch.testing.assert_close(split.scalars, several.scalars, rtol=1e-12, atol=0)


def _double(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in batch.items()}


class Returned(nn.Sequential):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = super().forward(x)
        return {"loss": y.square().mean(), "largest": y.max(), "y": y}


def test_numbers_of_the_last_stage_reach_every_rank() -> None:
    torch.manual_seed(0)
    model, x = Returned(*(nn.Linear(8, 8) for _ in range(4))).double(), torch.randn(8, 8).double()
    plan = {"pipeline": {"microbatches": 2}, "outputs": {"y": "?"}, **SPLIT}
    program = shardc.compile(model, {"x": x}, mesh="pp=2", plan=plan)
    assert {port.name: spec.shape for port, _, spec in _output_broadcasts(program.staged)}["largest"] == (2, 2)
    result = program.launch().step({"x": x})
    torch.testing.assert_close(result.outputs["y"].full(), model(x)["y"].detach(), rtol=1e-12, atol=0)
    assert set(result.scalars) == {"loss", "largest"}


def test_the_summary_says_it() -> None:
    text = str(summary(small(SMALL, {"mesh": "tp=2", "accumulate": 2, **SPLIT}, 8))[0])
    assert "each of 2 microbatches runs in 2 halves" in text
    assert "halves" not in str(summary(small(SMALL, {"mesh": "tp=2"}, 8))[0])


def test_text_and_file_keep_the_halves() -> None:
    program = small(SMALL, {"mesh": "tp=2", "accumulate": 2, **SPLIT}, 8)
    text = program.text()
    assert "graph @step mesh(tp=2) microbatches(2) halves(2) {" in text
    assert parse(text).halves == 2
    read = shardc.Program.from_json(program.to_json())
    assert (read.body.halves, read.reference.halves, read.reference.microbatches) == (2, 1, 4)
    with pytest.raises(ShardcError, match="2"):
        parse(text.replace("halves(2)", "halves(3)"))
    with pytest.raises(ShardcError, match="whole or in 2 halves"):
        graph_from_plain({**graph_to_plain(program.body), "halves": 3})


def test_batches_of_other_shapes_and_evaluations_run_whole() -> None:
    program = small(SMALL, {"mesh": "dp=2, tp=2", **BATCH, **SPLIT}, 8)
    trainer, batch = program.launch(), program.sample
    evaluated = trainer.evaluate([batch]).loss
    other = {name: torch.cat([x, x[:3]]) for name, x in batch.items()}
    with pytest.warns(UserWarning, match="for each shape"):
        assert trainer.step(other).loss.isfinite()
    first = small(SMALL, {"mesh": "dp=2, tp=2", **BATCH}, 8).launch().evaluate([batch]).loss
    assert evaluated == pytest.approx(first, rel=1e-6)


def test_an_index_out_of_range_is_found_in_either_half() -> None:
    program = small(SMALL, {"mesh": "tp=2", **SPLIT}, 8)
    trainer = program.launch()
    for row in (1, 6):
        batch = {name: x.clone() for name, x in program.sample.items()}
        batch["tokens"][row, 3] = 99
        with pytest.raises(ShardcError, match="SC507"):
            trainer.step(batch)


@pytest.mark.parametrize(
    ("rows", "more", "code", "words"),
    [
        (3, {}, "SC103", "multiple of 2"),
        (6, {"accumulate": 2}, "SC103", "multiple of 4"),
        (6, {"data": "per_rank"}, "SC226", "multiple of 4"),
        (8, {"overlap": {"split": 3}}, "SC208", "split: 2"),
        (8, {"overlap": {"split": True}}, "SC208", "split: 2"),
    ],
)
def test_refused(rows: int, more: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(ShardcError) as refused:
        small(SMALL, {"mesh": "dp=2, tp=2", **BATCH, **SPLIT, **more}, rows)
    assert refused.value.diagnostics[0].code == code
    assert words in str(refused.value)


@pytest.mark.parametrize(
    "said", [{"split": 2}, {"split": 2, "prefetch": False}, False, True, {"late_gradients": False}]
)
def test_plans_say_it_again(said: Any) -> None:
    plan = shardc.Plan.of(overlap=said)
    assert shardc.Plan.parse(plan.dump()).overlap == plan.overlap


def test_the_second_half_is_told_from_the_first() -> None:
    body = small(SMALL, {"mesh": "tp=2", "recompute": "full", **SPLIT}, 8).body
    names = {info(node).name for node in body.calls()}
    again = [info(node) for node in body.calls() if info(node).is_recomputed]
    assert again
    assert all(about.origin is not None and about.origin.of in names for about in again if about.name.endswith("/2"))
