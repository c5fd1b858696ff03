"""Decomposed products on two GPUs over NCCL: torch runs them, and a small GPT in bfloat16 has the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.decompose_worker import CASES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("decompose")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/gpu/decompose_worker.py"), str(folder)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=500, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_whole_products(case: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank[case]
        assert found["unused"] == 0
        assert found["calls"] > 0
        assert found["whole"][-1] < found["whole"][0]
        assert found["losses"] == pytest.approx(found["whole"], rel=2e-3)
    assert ranks[0][case]["losses"] == ranks[1][case]["losses"]
