"""Experts over two GPUs, by NCCL's uneven all-to-all and without: a small Mixtral trains as one device does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.experts_worker import STEPS
from tests.distributed.test_experts import eager
from tests.gpu.experts_worker import CASES

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "experts_worker.py"
LAYERS = 2

pytest.importorskip("transformers", minversion="5.24")  # before, experts are traced as they are written


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [*command, str(WORKER), case, str(folder)],
        env=env,
        cwd=ROOT,
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@cache
def losses_of_one_device() -> list[float]:
    return eager()


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_device(case: str, tmp_path: Path) -> None:
    found = run(case, tmp_path)
    tolerance = 2e-2 if "bf16" in case else 1e-4  # GPUs' products are rounded otherwise, over 20 steps
    for result in found:
        assert result["device"].startswith("cuda")
        assert result["losses"] == pytest.approx(losses_of_one_device(), rel=tolerance)
        if case in ("together", "all-to-all"):
            assert result["reads"] == (0 if case == "together" else STEPS * LAYERS)


@pytest.mark.gpu(2)
def test_what_a_batch_answers_is_checked_on_the_device(tmp_path: Path) -> None:
    for result in run("answers", tmp_path):
        first, refused, again = result["found"]
        assert refused == "SC512"
        assert isinstance(first, float)
        assert isinstance(again, float)  # the device has not failed: no assertion of a kernel is left behind
        assert again < first
