"""Batches that are copied to a GPU during the step before: the same steps, and the same errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.launched import run

WORKER = Path(__file__).parent / "data_worker.py"


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))]
)
def test_a_batch_is_copied_while_the_step_before_is_computed(ranks: int, tmp_path: Path) -> None:
    for result in run(WORKER, ranks, tmp_path):
        ahead, inline = result["True"], result["False"]
        assert (ahead["fed"], inline["fed"]) == (["Copied"], ["dict"])
        assert len(ahead["losses"]) == 16
        assert ahead["losses"] == inline["losses"]
        assert ahead["state"] == inline["state"]
        assert len(ahead["busy"]) == 14
        assert all(ahead["busy"])
        assert not any(inline["busy"])
        code, said = result["bad"]
        assert code == "SC507"  # found on the host, before it is an assertion of the device
        assert "'ids' holds 64 at [3, 5]" in said
