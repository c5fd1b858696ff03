"""benchmarks/cpu_step.py: a mode runs, and two sides that do not train alike are no result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import cpu_step

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_mode_of_two_ranks_is_measured() -> None:
    command = [sys.executable, "-m", "benchmarks.cpu_step", "--tiny", "--models", "llama", "--modes", "dp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = map(json.loads, done.stdout.splitlines())
    assert (line["model"], line["mode"]) == ("llama", "dp")
    assert line["loss_gap"] < 1e-4
    assert min(line["ms"].values()) > 0
    assert min(line["mib"].values()) > 0
    assert line["spread"][0] <= line["spread"][1]


def test_losses_must_agree_and_fall() -> None:
    assert cpu_step.agreed([3.0, 2.0], [3.0, 2.0], "dp") == 0
    with pytest.raises(AssertionError, match="dp: the losses differ"):
        cpu_step.agreed([3.0, 2.0], [3.0, 2.001], "dp")
    with pytest.raises(AssertionError, match="dp: nothing is trained"):
        cpu_step.agreed([3.0, 3.0], [3.0, 3.0], "dp")
