"""Buckets on two GPUs over NCCL: a small GPT in bfloat16 has the same losses with and without buckets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bucket_worker import CASES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bucket")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/gpu/bucket_worker.py"), str(folder)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=500, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("bucket", ["small", "large"])
@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_without_buckets(case: str, bucket: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, bucketed = rank[case]["none"], rank[case][bucket]
        assert plain["losses"][-1] < plain["losses"][0]
        assert bucketed["losses"] == pytest.approx(plain["losses"], rel=1e-3)
        assert bucketed["collectives"] < plain["collectives"]
    assert ranks[0][case][bucket]["losses"] == ranks[1][case][bucket]["losses"]
