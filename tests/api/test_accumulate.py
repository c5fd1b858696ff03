"""Accumulation: a step of several microbatches, from the plan to real processes' memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.memory import memory
from shardc.ir.diagnostic import ShardcError
from shardc.ir.microbatch import crossing, in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE, ACCUMULATE_WGRAD
from shardc.ir.ops.streams import fold_in
from shardc.ir.parse import parse
from shardc.runtime.execute.microbatches import feeds, split
from tests.cost.test_memory import measured
from tests.cost.test_memory_calls import check
from tests.sums import sums_apart


class Counted(nn.Module):
    """A buffer that each microbatch changes, an output, a random op, and an input that is too short to be split."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 4)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        y = self.drop(self.fc(self.norm(x) * scale))
        return {"loss": (y * y).mean(), "y": y}


def program(accumulate: int, drop: float = 0.0, **more: Any) -> shardc.Program:
    torch.manual_seed(0)
    batch = {"x": torch.randn(12, 8), "scale": torch.rand(1, 8)}
    plan = {"inputs": {"x": "dp, -"}, "outputs": {"y": "dp, -"}, "accumulate": accumulate, **more}
    return shardc.compile(Counted(drop), batch, mesh="dp=2", plan=plan)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("accumulate", [1, 2, 3, 6])
def test_equals_torch_accumulating(accumulate: int) -> None:
    """Buffers go from microbatch to microbatch, gradients are the mean's, outputs one behind the other."""
    compiled = program(accumulate)
    assert compiled.verify(), str(compiled.verify())
    assert (compiled.verify().eager_error or 0.0) < 1e-12
    model, batch = compiled.model, compiled.sample
    assert model is not None
    result = compiled.launch().step(batch)
    outputs = []
    for part in split(batch, accumulate):
        found = model(**part)
        (found["loss"] / accumulate).backward()
        outputs.append(found["y"].detach())
    for name, p in model.named_parameters():
        torch.testing.assert_close(result.grads[name], p.grad)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(result.buffers[name], buffer)
    torch.testing.assert_close(result.outputs["y"].full(), torch.cat(outputs))


def test_microbatches_draw_other_numbers_and_restarts_the_same() -> None:
    compiled = program(2, drop=0.5)
    batch = {"x": compiled.sample["x"][:6].repeat(2, 1), "scale": compiled.sample["scale"]}
    first, second = (compiled.launch(seed=7).step(batch).outputs["y"].full() for _ in range(2))
    assert torch.equal(first, second)
    halves = first.chunk(2)
    assert not torch.equal(halves[0] == 0, halves[1] == 0)
    seeds = [int(feed["seed"]) for feed in feeds(compiled.body, {"seed": torch.tensor(5)})]
    assert seeds == [fold_in(5, 0), fold_in(5, 1)]


def test_text_and_file_keep_the_microbatches() -> None:
    compiled = program(3)
    text = compiled.text()
    assert "\ngraph @step mesh(dp=2) microbatches(3) {" in text
    assert parse(text).microbatches == 3
    assert shardc.Program.from_json(compiled.to_json()).body.microbatches == 3
    with pytest.raises(ShardcError, match="number of microbatches"):
        parse(text.replace("microbatches(3)", "microbatches(0)"))


def test_what_runs_once_a_step_reads_no_microbatch() -> None:
    assert crossing(program(3).body) == []
    with sums_apart():
        body = program(3).body
    assert crossing(body) == []
    inside = in_microbatch(body)
    sums = [node for node in body.calls() if node.target in (ACCUMULATE, ACCUMULATE_WGRAD)]
    assert len(sums) == 1 + 4
    assert all(node in inside for node in sums)
    added = body.calls_of(ACCUMULATE)[1]
    (total,) = added.users
    total.replace_input_with(added, added.args[0])  # type: ignore[arg-type]
    assert crossing(body)


def test_memory_holds_the_sums_from_the_start() -> None:
    """The second microbatch of a rank, call by call: the first one's sums are there, and all that is fed."""
    check(program(2).body)
    with sums_apart():  # simulations allocate no members in flat tensors
        body = program(2, bucket=False).body
    report = memory(body)
    assert list(report.timeline) == measured(body)
    one = memory(program(1, bucket=False).body)
    each = 8 * 4  # `scale`, which every microbatch is given
    assert report.row("inputs").stored == one.row("inputs").stored + each
    assert report.row("gradients").most >= one.row("gradients").most


@pytest.mark.parametrize(
    ("accumulate", "code"),
    [(5, "SC103"), (0, "SC208")],
)
def test_refused(accumulate: int, code: str) -> None:
    with pytest.raises(ShardcError) as refused:
        program(accumulate)
    assert refused.value.diagnostics[0].code == code


def test_a_budget_counts_every_microbatch() -> None:
    sent = [sum(c.bytes_per_step for c in program(k, params={"fc.weight": "-, dp"}).collectives()) for k in (1, 3)]
    assert sent[1] > sent[0]
    with pytest.raises(ShardcError, match="budget"):
        program(3, params={"fc.weight": "-, dp"}, budget={"dp": sent[1] - 1})


@pytest.mark.parametrize("halves", [1, 2])
def test_a_program_of_a_file_draws_other_rows_for_each_microbatch(halves: int) -> None:
    """Without a model and its batch: one microbatch given to all would not tell a sum from a product."""
    plan = {"mesh": "dp=2", "accumulate": 2, "overlap": {"split": halves}}
    program = shardc.compile(nn.Linear(4, 4), torch.randn(16, 4), loss=lambda y, _: y.square().mean(), plan=plan)
    loaded = shardc.Program.from_json(program.to_json())
    rows = loaded.inputs()["input"]
    assert rows.shape == (16, 4)
    assert len(rows.chunk(2 * halves)[0].unique()) < len(rows.unique())
    assert loaded.verify().ok
