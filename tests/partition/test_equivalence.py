"""Pipelined steps compute what the single device does: models x meshes x microbatches x ranks x schedules x orders.

`make fuzz` runs the whole product; by default, each model, mesh, number of microbatches and schedule has its turn.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.partition.staged_program import StagedProgram
from tests.partition.whole import PRODUCT, SCHEDULES, Case, agree, check, compiled, programmed

FUZZ = settings.default is not None and settings.default.max_examples > 1000
# Compiling takes longer than running: so many programs, each under several schedules.
PROGRAMS = [
    *(("gpt2", "alone", 3), ("gpt2", "tp2", 1), ("gpt2", "zero1", 8), ("gpt2", "dp2", 3)),
    *(("llama", "zero1", 3), ("llama", "tp2", 1), ("t5", "alone", 1), ("t5", "tp2", 3)),
    *(("resnet", "alone", 8), ("resnet", "dp2", 3)),
]
# And what else a plan may say of a step: token weights, recomputation through which cuts go, both with ZeRO.
PLANS = [
    *(("gpt2", "tokens", 8), ("gpt2", "all", 3), ("llama", "all", 8), ("llama", "full", 3), ("t5", "full", 3)),
    *(("t5", "all", 3), ("resnet", "full", 3)),
]
# A few that the tests above have compiled already; `make fuzz` orders all of them anew.
ORDERED = PROGRAMS[2:] + PLANS if FUZZ else [("gpt2", "zero1", 8), ("gpt2", "tokens", 8)]
PLACES = [(ranks, schedule) for ranks in (2, 3, 4) for schedule in SCHEDULES]
SAMPLE = [Case(*one, *place) for at, one in enumerate(PROGRAMS) for place in random.Random(at).sample(PLACES, 2)]


@pytest.mark.parametrize("case", PRODUCT if FUZZ else SAMPLE, ids=str)
@pytest.mark.sampled(20)
def test_equals_the_single_device(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("program", PLANS, ids=str)
@pytest.mark.sampled(7)
def test_plans(program: tuple[str, str, int]) -> None:
    check(Case(*program, 4, "zb-h1"), seed=2)
    check(Case(*program, 3, "1f1b"), seed=3)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule(schedule: str) -> None:
    check(Case("gpt2", "zero1", 8, 4, schedule), seed=1)


@pytest.mark.slow
@settings(max_examples=2000 if FUZZ else 3)
@given(
    st.sampled_from(ORDERED),
    st.sampled_from((2, 3, 4)),
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_in_any_order(what: tuple[str, str, int], ranks: int, schedule: str, seed: int, buffered: bool) -> None:
    check(Case(*what, ranks, schedule), seed, buffered)


def test_a_program_from_a_file_runs_the_same() -> None:
    case = Case("gpt2", "zero1", 8, 2, "zb-v")  # which other tests compile too
    program = programmed(case)
    read = StagedProgram.from_plain(json.loads(json.dumps(program.to_plain())))
    assert [read.text(rank) for rank in range(2)] == [program.text(rank) for rank in range(2)]
    _, inputs, expected = compiled(*case[:3])
    agree(read, inputs, expected)
