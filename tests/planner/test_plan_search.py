"""No plan is better than what the search returns: random ones of five models, all of a small space."""

import dataclasses
import math

import pytest

from benchmarks.plan_search import BATCH, MODELS, compare, subject_of
from shardc.plan.hardware import hardware
from shardc.planner.space import Limits, candidates, variants

MACHINE = hardware("h200-nvlink")


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_none_of_random_plans_is_better(name: str) -> None:
    subject, length = subject_of(name, MACHINE)
    outcome = compare(subject, Limits(16, 80e9, BATCH, length), 500)
    assert outcome.fitting > 125
    assert outcome.holds, f"{outcome.best} beats {outcome.chosen}"


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("memory", [80e9, 6e9])
def test_nothing_of_a_small_space_is_better(name: str, memory: float) -> None:
    subject, length = subject_of(name, MACHINE)
    outcome = compare(subject, Limits(2, memory, 8, length), 0)
    assert outcome.holds, f"{outcome.best} beats {outcome.chosen}"


def test_the_space_has_every_choice() -> None:
    subject, length = subject_of("llama", MACHINE)
    space = list(candidates(subject, Limits(16, 80e9, BATCH, length, {"recompute": ("none",), "rows": (1,)})))
    assert len(space) == len(set(space))
    assert all(math.prod(c.sizes) == 16 and c.batch == BATCH for c in space)
    assert {c.schedule for c in space} == {"", "1f1b", "interleaved", "zb-h1", "zb-v"}
    assert {c.zero for c in space} == {0, 1, 3}
    assert {c.dp_replicate for c in space} >= {1, 2, 4, 8}
    assert len({c.bucket for c in space if c.dp > 1}) == 3
    assert any(c.sequence for c in space)
    assert any(c.cp > 1 for c in space)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kept", [True, 0, 2**20])
def test_buckets_that_are_kept_leave_every_mesh(kept: bool | int) -> None:
    subject, length = subject_of("llama", MACHINE)
    pinned: dict[str, tuple[object, ...]] = {"recompute": ("none",), "rows": (1,)}
    free, fixed = (
        list(candidates(subject, Limits(16, 80e9, BATCH, length, pins), varied=False))
        for pins in (pinned, {**pinned, "bucket": (kept,)})
    )
    assert {c.sizes for c in fixed} == {c.sizes for c in free}
    assert {c.bucket for c in fixed} == {kept}
    assert any(c.copies == 1 for c in fixed)


def test_variants_keep_the_work() -> None:
    subject, length = subject_of("llama", MACHINE)
    limits = Limits(16, 80e9, BATCH, length, {"dp": (8,)}, ("bf16",))
    first = next(c for c in candidates(subject, limits, varied=False) if c.zero == 1)
    assert {v.dp for v in variants(first, limits)} == {8}, "what is kept stays"
    free = dataclasses.replace(limits, pinned={})
    found = list(variants(first, free))
    assert {v.reduce for v in found} == {"fp32", "bf16"}
    assert {v.dp for v in found} == {2, 4, 8}
    assert {(v.batch, v.ranks, v.inner) for v in found} == {(first.batch, first.ranks, first.inner)}
