"""Whether a batch runs in halves where a prediction decides: the faster of both ways, and whole where it may not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import shardc
from benchmarks.measured_models import SIZES
from shardc.cli.summary import predicted_choices
from shardc.compiler.decompose_auto import MARGIN
from shardc.compiler.split_auto import SplitChoice, Splitting
from shardc.ir.diagnostic import ShardcError
from shardc.partition.rank_costs import most_sent
from tests.passes.test_late_gradients import BATCH, COLUMNS, SEQUENCE, SLOW, SMALL, small

AUTO: dict[str, Any] = {"overlap": {"split": "auto"}}
SLOW_LINKS: dict[str, Any] = {"like": "h200-nvlink", "links": [], "link_bytes_per_second": 5e10}

# So slow that tiny tensors take longer than the host does: products half as long as sending.
SLOW_DEVICE: dict[str, Any] = {
    **SLOW,
    **dict.fromkeys(("kernel_launch_seconds", "kernel_gap_seconds"), 1e-9),
    "device": "gpu",
    "collective_start_seconds": 1e-6,
    "link_bytes_per_second": 1e8,
}


def large(split: object, hardware: object, rows: int = 4, **said: Any) -> shardc.Program:
    """A layer of gpt-6.7b on tp=4, on the meta device."""
    sizes = replace(SIZES["gpt-6.7b-slice"], layers=1)
    with torch.device("meta"):
        model, ids = sizes.model().to(torch.bfloat16), torch.zeros(rows, sizes.sequence, dtype=torch.long)
    plan = {"mesh": "tp=4", "params": COLUMNS, "hardware": hardware, "overlap": {"split": split}, **said}
    return shardc.compile(model, {"tokens": ids, "targets": ids}, plan=plan)


@pytest.mark.parametrize("hardware", [SLOW_LINKS, "h200-nvlink"], ids=["slow links", "nvlink"])
def test_the_faster_way_is_taken(hardware: object) -> None:
    programs = {said: large(said, hardware) for said in (1, 2, "auto")}
    ms = {said: program.predict().step_ms for said, program in programs.items()}
    auto = programs["auto"]
    choice = SplitChoice(*auto.plan.get("halves", ()))
    assert (choice.whole_ms, choice.halves_ms) == pytest.approx((ms[1], ms[2]))
    pays = ms[2] < (1 - MARGIN) * ms[1]
    assert choice.halves == pays == (hardware is SLOW_LINKS)
    taken = 2 if pays else 1
    assert auto.body.halves == taken
    assert auto.text() == programs[taken].text()
    assert shardc.Plan.parse(auto.plan.get("text", "")).overlap.split == taken
    chosen, other = ("in halves", "whole") if pays else ("whole", "in halves")
    (line,) = predicted_choices(auto)
    assert line.startswith(f"batch: {chosen}, predicted {ms[taken]:.2f} ms a step, {other} {ms[3 - taken]:.2f}")
    assert line.endswith("; off by overlap: {split: 1}") == pays


@pytest.mark.parametrize(
    ("why", "rows", "said"),
    [
        ("as the plan's hardware is no GPU", 4, {"hardware": "cpu-gloo"}),
        ("as its sizes are symbols", 4, {"symbols": {"B": ["tokens.0", "targets.0"]}}),
        ("as the rows of a microbatch are odd", 3, {}),
        ("as the rows of a microbatch are odd", 4, {"accumulate": 4}),
        ("as collectives keep compute waiting for 0.0% of the step", 4, {"mesh": "tp=1"}),
        (
            "as of halves a warning is given: 'zero: 2' does not shard the gradients of a step of 2 microbatches",
            8,
            {"mesh": "dp=2, tp=2", **BATCH, "storage": {"zero": 2, "axes": "dp"}, "strict": True},
        ),
    ],
    ids=["cpu", "symbols", "odd", "odd microbatches", "nothing to hide", "warned"],
)
def test_why_a_batch_stays_whole(why: str, rows: int, said: dict[str, Any]) -> None:
    program = small(SMALL, {"mesh": "tp=2", "hardware": SLOW_DEVICE, **AUTO, **said}, rows)
    assert program.body.halves == 1
    (line,) = predicted_choices(program)
    assert line.startswith(f"batch: whole, {why}")
    assert shardc.Plan.parse(program.plan.get("text", "")).overlap.split == 1


def test_halves_that_exceed_the_budget_are_not_taken() -> None:
    """They reduce two losses, which is more than a budget that the whole step meets to the byte."""
    said = {"mesh": "tp=2", "hardware": SLOW_DEVICE}
    ways = [small(SMALL, {**said, "overlap": {"split": split}}) for split in (1, 2)]
    sent = [most_sent(way.staged, way.mesh, "total")["total"] for way in ways]
    assert sent[1] > sent[0]
    for budget, halves in ((sent[0], 1), (sent[1], 2)):
        program = small(SMALL, {**said, **AUTO, "budget": {"total": budget}})
        assert program.body.halves == halves
        assert ("exceed the plan's budget" in predicted_choices(program)[0]) == (halves == 1)


def test_a_small_step_stays_whole() -> None:
    """Its time is the host's, and halves launch twice as much."""
    program = small(SMALL, {"mesh": "tp=2", "hardware": SLOW_LINKS, **AUTO})
    choice = SplitChoice(*program.plan.get("halves", ()))
    assert not choice.halves
    assert choice.halves_ms > choice.whole_ms > 0
    assert program.body.halves == 1


class Wide(nn.Module):
    """Products of columns and rows over tp, with something between them, and a loss."""

    def __init__(self, between: nn.Module, *, contrasts: bool = False, least: int = 1) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 8192), nn.Linear(8192, 1024)
        self.between, self.contrasts, self.least = between, contrasts, least

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < self.least:
            raise ValueError(f"{len(x)} rows are too few")
        for _ in range(4):
            x = self.down(self.between(self.up(x)).relu())
        if self.contrasts:  # each row with all others
            return functional.cross_entropy(x @ x.T, torch.arange(len(x), device=x.device))
        return x.square().mean()


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Wide(nn.Identity()), ""),
        (lambda: Wide(nn.BatchNorm1d(8192)), "as forward changes buffers"),
        (lambda: Wide(nn.Identity(), contrasts=True), "as halves compute other products"),
        (lambda: Wide(nn.Identity(), least=16384), "halves cannot be compiled: "),
    ],
    ids=["rows", "batch norm", "contrastive", "refused"],
)
def test_rows_that_depend_on_each_other(model: Callable[[], Wide], why: str) -> None:
    with torch.device("meta"):
        wide, x = model(), torch.zeros(16384, 1024)
    plan = {"mesh": "tp=4", "params": {"up.weight": "tp, -", "down.weight": "-, tp"}, "hardware": SLOW_LINKS, **AUTO}
    program = shardc.compile(wide, x, plan=plan)
    assert program.body.halves == (1 if why else 2)
    assert SplitChoice(*program.plan.get("halves", ())).why.startswith(why)


def test_the_passes_of_one_way_are_watched() -> None:
    program = large("auto", SLOW_LINKS)
    assert program.request is not None
    seen = list[str]()
    watched = program.recompiled(
        replace(
            program.request,
            watch=lambda pass_, *_: seen.append(pass_.name),
            plan={"mesh": "tp=4", **AUTO, "params": COLUMNS, "hardware": SLOW_LINKS},
        )
    )
    assert watched.body.halves == 2
    assert seen.count("split_batch") == seen.count("fuse") == 1
    assert watched.text() == program.text()


def test_with_products_by_prediction_and_a_pipeline() -> None:
    """Each way has its own products; the microbatches of a pipeline are split in turn."""
    both = large("auto", SLOW_LINKS, **SEQUENCE, overlap={"split": "auto", "decompose": "auto"})
    assert [line.partition(":")[0] for line in predicted_choices(both)][:1] == ["batch"]
    assert "decompose" in both.plan
    stages = {"mesh": "pp=2, tp=2", "pipeline": {"microbatches": 2}, "hardware": SLOW_DEVICE}
    auto, *ways = (small(SMALL, {**stages, "overlap": {"split": split}}, 8) for split in ("auto", 1, 2))
    choice = SplitChoice(*auto.plan.get("halves", ()))
    assert [choice.whole_ms, choice.halves_ms] == pytest.approx([way.predict().step_ms for way in ways])
    texts = [way.staged.text(0) for way in ways]
    assert texts[0] != texts[1]
    assert auto.staged.text(0) == texts[choice.halves]


def test_it_is_verified_and_saved(tmp_path: Any) -> None:
    program = small(SMALL, {"mesh": "tp=2", "hardware": SLOW_DEVICE, **AUTO})
    assert program.body.halves == 2
    assert program.verify().ok
    program.save(tmp_path / "program.shardc")
    loaded = shardc.Program.load(tmp_path / "program.shardc")
    assert predicted_choices(loaded) == predicted_choices(program) != []


def test_words_of_a_plan() -> None:
    auto = shardc.Plan.from_dict(AUTO)
    assert shardc.Plan.parse(auto.dump()) == auto != shardc.Plan.from_dict({})
    assert auto.microbatches == 1
    assert shardc.Plan.from_dict({"accumulate": 4, **AUTO}).microbatches == 4
    with pytest.raises(ShardcError, match=r"SC208(.|\n)*'overlap.split' should be 1, 2 or auto, not 'halves'"):
        shardc.Plan.from_dict({"overlap": {"split": "halves"}})


def test_other_batches_and_evaluations_run_whole() -> None:
    """Nothing is left to a prediction of them, and they make what whole steps make."""
    program = small(SMALL, {"mesh": "tp=2", "hardware": SLOW_DEVICE, **AUTO})
    whole = small(SMALL, {"mesh": "tp=2", "hardware": SLOW_DEVICE})
    assert program.body.halves == 2
    trainers = [one.launch() for one in (program, whole)]
    with patch.object(Splitting, "chosen", side_effect=AssertionError("asked a prediction")):
        for rows in (4, 6, 4):
            draws = torch.Generator().manual_seed(rows)
            tokens = torch.randint(0, SMALL.vocabulary, (rows, SMALL.sequence), generator=draws)
            batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
            losses = [float(trainer.step(batch).loss) for trainer in trainers]
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
            evaluated = [trainer.evaluate([batch]).loss for trainer in trainers]
            assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
        assert program.request is not None
        evaluation = replace(program.request, mode="eval", optimizer=None)
        assert program.recompiled(evaluation).body.halves == 1


def test_passes_are_shown_as_far_as_they_come() -> None:
    """Of a plan that the whole step cannot have, which is found behind its last pass over the body."""
    seen = list[str]()
    with torch.device("meta"):
        model, x = Wide(nn.Identity()), torch.zeros(64, 1024)
    plan = {"mesh": "tp=4", "params": {"up.weight": "tp, -"}, "hardware": SLOW_LINKS, **AUTO}
    plan["fuse"] = {"exclude": ["no_such_op"]}
    with pytest.raises(ShardcError, match="SC202"):
        shardc.compile(model, x, plan=plan, watch=lambda pass_, *_: seen.append(pass_.name))
    assert seen.count("normalize") == seen.count("split_batch") == 1
