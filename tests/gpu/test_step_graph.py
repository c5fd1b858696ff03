"""Steps that a GPU replays from a CUDA graph: bit by bit those that it runs without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.gpu


def rows(*command: str) -> list[dict[str, object]]:
    """What benchmarks/step_graphs.py prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    arguments = ("-m", "benchmarks.step_graphs", "--steps", "5", "--rounds", "1")
    command = (sys.executable, *command, *arguments, "--batches", "2", "--sequence", "256")
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=500, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_one_gpu_replays_the_same_steps() -> None:
    compared, measured = rows()
    assert compared["graphs"] == measured["graph_how"] == "replayed"
    assert compared["repeats"], "without graphs no two runs are equal, also with deterministic kernels"
    assert compared["equal"]


@pytest.mark.gpu(2)
def test_two_gpus_replay_their_collectives() -> None:
    compared, measured = rows("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert compared["graphs"] == measured["graph_how"] == "replayed"
    assert not compared["repeats"] or compared["equal"]
