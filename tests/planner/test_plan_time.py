"""What `python -m benchmarks.plan_time` counts: planning costs what it compiles, which no busy machine changes."""

from __future__ import annotations

import pytest

from benchmarks.plan_time import measured


def test_eight_billion_parameters_on_eight_gpus() -> None:
    row = measured("8b")
    assert 3500 < row["candidates"] < 4000
    assert row["compiles"] <= 17, "small programs; the CPU seconds of a search are mostly theirs"
    assert row["best"] == "dp=8; zero 1, recompute none, 8 microbatches of 1"
    assert row["step_ms"] == pytest.approx(row["closed_form_ms"], rel=0.03), "a compiled copy of few layers says so"
    assert row["peak_bytes"] <= 80 * 2**30
