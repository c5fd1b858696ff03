"""Predictions beside what others measured: the errors of `python -m benchmarks.predicted_steps` stay what they are."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from benchmarks import own_steps
from benchmarks import predicted_steps as bench
from shardc.plan.hardware import hardware

SPARE = 0.006
# By run and its measured milliseconds: the predicted time over the measured one, less 1.
ERRORS = {
    ("torch-single gpt-6.7b-slice mb=4", 159): 0.017,
    ("torch-single gpt-6.7b-slice mb=4 AdamW", 167): -0.003,
    ("torch-single llama3-8b-slice mb=2", 218): -0.046,
    ("torch-single llama3-8b-slice mb=2 AdamW", 236): -0.089,
    ("torch-single gpt-1.3b mb=4", 130): 0.008,
    ("torch-single gpt-1.3b mb=1", 35): 0.013,
    ("megatron-core-single gpt-6.7b-slice mb=4", 161): 0.003,
    ("megatron-core-single gpt-6.7b-slice mb=1", 40): 0.029,
    ("megatron-core-single-jitrope llama3-8b-slice mb=2", 209): -0.005,
    ("torch-tp gpt-6.7b-slice mb=4", 54): -0.028,
    ("torch-tp_sp gpt-6.7b-slice mb=4", 54): 0.025,
    ("torch-tp_sp gpt-6.7b-slice mb=4 AdamW", 57): 0.004,
    ("torch-tp gpt-6.7b-slice mb=4", 53): -0.009,
    ("torch-tp_sp gpt-6.7b-slice mb=4", 52): 0.050,
    ("torch-pp-1F1B gpt-1.3b mb=1 M=8", 108): 0.087,
    ("torch-pp-1F1B gpt-1.3b mb=1 M=32", 361): 0.069,
    ("torch-pp-Interleaved1F1B gpt-1.3b mb=1 M=8", 123): 0.019,
    ("torch-pp-Interleaved1F1B gpt-1.3b mb=1 M=32", 502): -0.197,
    ("torch-fsdp gpt-6.7b-slice mb=4", 179): -0.034,
    ("torch-ddp gpt-6.7b-slice mb=4", 172): -0.020,
    ("megatron-core-tp_sp gpt-6.7b-slice mb=4", 52): 0.049,
    ("megatron-core-tp gpt-6.7b-slice mb=4", 52): 0.002,
    ("torch-fsdp gpt-6.7b-slice mb=4 AdamW", 184): -0.061,
}
OURS = {
    ("gpt2", "one"): 0.018,
    ("gpt2", "dp"): -0.055,
    ("gpt2", "zero3"): -0.080,
    ("gpt-1.3b", "one"): -0.021,
    ("gpt-1.3b", "dp"): -0.082,
    ("gpt-1.3b", "zero3"): -0.160,
}
QUICK = ("torch-single gpt-6.7b-slice mb=4", "torch-tp gpt-6.7b-slice mb=4")
ROWS = {(bench.mirrored(row).name, round(row["step_ms"])): row for row in bench.rows() if not bench.why_left_out(row)}


LONG = [pytest.mark.long]
CASES = [pytest.param(key, id=f"{key[0]}, {key[1]} ms", marks=[] if key[0] in QUICK else LONG) for key in ERRORS]


@pytest.mark.slow
@pytest.mark.parametrize("key", CASES)
def test_the_error_of_a_prediction_is_what_it_was(key: tuple[str, int]) -> None:
    row: Mapping[str, Any] = ROWS[key]
    predicted = bench.prediction_of(bench.mirrored(row))
    assert predicted.step_ms / row["step_ms"] - 1 == pytest.approx(ERRORS[key], abs=SPARE)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("config", "run"), OURS)
def test_the_error_of_our_own_step_is_what_it_was(config: str, run: str) -> None:
    """The rows of the last day that measured it."""
    row = [row for row in own_steps.rows() if (row["config"], row["run"]) == (config, run)][-1]
    predicted = own_steps.compiled(row).predict(hardware(bench.HARDWARE))
    assert predicted.step_ms / row["step_ms"] - 1 == pytest.approx(OURS[config, run], abs=SPARE)


def test_own_steps_all_have_an_error() -> None:
    assert {(row["config"], row["run"]) for row in own_steps.rows()} == OURS.keys()
    fitted = [row for row in own_steps.rows() if row["gpus"] == 1 and own_steps.bound_by_the_gpu(row)]
    assert [own_steps.name(row) for row in fitted] == ["ours gpt-1.3b"], "a step of several GPUs is in no fit of power"


def test_every_run_that_can_be_mirrored_has_an_error() -> None:
    assert sum(abs(error) <= 0.1 for error in ERRORS.values()) >= 22
    assert ROWS.keys() == ERRORS.keys()


def test_runs_that_differ_by_more_than_5_percent_are_predicted_in_the_right_order() -> None:
    runs = [(ROWS[key], ROWS[key]["step_ms"] * (1 + error)) for key, error in ERRORS.items()]
    for (one, predicted), (two, other) in combinations(runs, 2):
        alike = one["config"] == two["config"] and one["kind"] == two["kind"]
        if alike and one["step_ms"] > 1.05 * two["step_ms"]:
            assert predicted > other
        elif alike and two["step_ms"] > 1.05 * one["step_ms"]:
            assert other > predicted
