"""Batches that are copied to a GPU during the step before: the same steps, in less time, and the same errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "data_worker.py"


def run(ranks: int, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(WORKER), str(folder)],
        env=env,
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.gpu(1)), pytest.param(2, marks=pytest.mark.gpu(2))]
)
def test_a_batch_is_copied_while_the_step_before_is_computed(ranks: int, tmp_path: Path) -> None:
    for result in run(ranks, tmp_path):
        ahead, inline = result["True"], result["False"]
        assert (ahead["fed"], inline["fed"]) == (["Copied"], ["dict"])
        assert len(ahead["losses"]) == 16
        assert ahead["losses"] == inline["losses"]
        assert ahead["state"] == inline["state"]
        print(f"{ranks} GPUs: {ahead['seconds']:.2f} s ahead, {inline['seconds']:.2f} s in turn")
        assert ahead["seconds"] < 0.9 * inline["seconds"]
        code, said = result["bad"]
        assert code == "SC507"  # found on the host, before it is an assertion of the device
        assert "'ids' holds 64 at [3, 5]" in said
