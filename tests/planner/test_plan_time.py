"""What `python -m benchmarks.plan_time` counts: planning costs what it compiles, which no busy machine changes."""

from __future__ import annotations

from benchmarks.plan_time import measured


def test_eight_billion_parameters_on_eight_gpus() -> None:
    row = measured("8b")
    assert row["candidates"] == 3732
    assert row["compiles"] <= 19, "small programs; the CPU seconds of a search are mostly theirs"
    assert row["best"] == "dp=8; zero 3, recompute selective, 8 microbatches of 1"
    assert row["peak_bytes"] <= 80 * 2**30
