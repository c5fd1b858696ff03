"""Parts of batches of several shapes, brought by real processes: the steps of a simulation that is given them.

A simulation is held against plain PyTorch by `tests.hostile.test_training_combinations`.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

import shardc
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "combined_worker.py"


def worker(case: str) -> ModuleType:
    """The worker's model and batches, in this process."""
    import importlib

    argv = sys.argv
    sys.argv = ["combined_worker.py", case, "."]
    try:
        return importlib.import_module("tests.distributed.combined_worker")
    finally:
        sys.argv = argv


@pytest.mark.parametrize(
    "case",
    [
        "dp2, padded, frozen",
        "dp2 halves",
        "dp2 host, padded, frozen",
        *(pytest.param(case, marks=pytest.mark.long) for case in ("dp2", "dp2, padded", "pp2 dp2, padded")),
        *(pytest.param(case, marks=pytest.mark.long) for case in ("pp2 dp2, frozen", "pp2 dp2 host, frozen")),
    ],
)
def test_a_job_makes_the_steps_of_its_simulation(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout's masks too: a rank pads its own part, which lies in the midst of the whole batch."""
    assert "RANK" not in os.environ
    layout = case.partition(", ")[0]
    w = worker(case)
    monkeypatch.setattr(w, "FROZEN", "frozen" in case)
    given = [shardc.Parts(w.parts(number)) for number in range(len(w.SHAPES))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = w.both(layout, "padded" in case, given, tmp_path / "simulated")
    assert len(expected["losses"]) == 6
    results = start(case, 4 if "pp2" in case else 2, tmp_path, limit=240.0, worker=WORKER)
    for result in results:
        assert result is not None
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for what in ("parameters", "averages"):
            assert result[what] == pytest.approx(expected[what], rel=1e-10)
