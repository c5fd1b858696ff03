"""Over two GPUs: experts by a capacity, shared experts beside the dispatch, loops over experts, scans, halos."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.sharded_worker import CASES, DEVICE, STEPS, Case, compiled, optimizer_of, trained

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "sharded_worker.py"
LAYERS = {"shared experts": 2, "shared experts fused": 2, "loop": 1}  # whose rows are sent by exact counts

pytest.importorskip("transformers", minversion="5.24")


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


def eager(case: Case) -> list[float]:
    """The losses of plain PyTorch on a CPU."""
    model = case.model()
    optimizer, losses = optimizer_of(model), list[float]()
    for step in range(STEPS):
        output = model(**case.batch(step))
        loss = getattr(output, "loss", output)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def check(name: str, folder: Path) -> None:
    case = CASES[name]
    found = run(name, folder)
    simulated = trained(compiled(case).launch(), case) if case.limited else None
    losses = eager(case) if simulated is None else simulated["losses"]
    assert len(set(losses)) == STEPS
    for result in found:
        assert result["device"].startswith(DEVICE)
        assert result["losses"] == pytest.approx(losses, rel=case.tolerance)
        assert result["reads"] == STEPS * LAYERS.get(name, 0)
        assert result["changed"]
    if simulated is not None:
        assert any(any(step) if isinstance(step, list) else step for step in simulated["dropped"])
        if "bf16" not in name:
            assert found[0]["dropped"][0] == simulated["dropped"][0]  # of later ones rounding decides
        assert found[0]["dropped"] == found[1]["dropped"]


def check_overflow(folder: Path) -> None:
    for result in run("overflow", folder):
        assert (result["losses"], result["changed"], result["reads"]) == (["SC513"] * STEPS, 0, 0)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", CASES)
def test_ranks_train_as_one_device(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.gpu(2)
def test_all_ranks_fail_a_step_that_overflows(tmp_path: Path) -> None:
    check_overflow(tmp_path)
