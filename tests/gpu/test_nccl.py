"""Two GPUs over NCCL: GPT-2 trains as in its simulation. Run with `python -m pytest tests/gpu -m gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_gpt2

ROOT = Path(__file__).parents[2]
STEPS = 5


def on_gpus(folder: Path, *arguments: str) -> list[list[float]]:
    """The losses of each of two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/distributed/watched.py"), "train", str(folder)]
    (folder / "arguments.json").write_text(json.dumps(arguments))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    assert {rank["device"] for rank in ranks} == {"cuda:0", "cuda:1"}
    return [rank["losses"] for rank in ranks]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("mesh", ["dp=1, tp=2", "dp=2, tp=1"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_gpt2_equals_its_simulation(
    mesh: str, dtype: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--mesh", mesh, "--dtype", dtype, "--steps", str(STEPS), "--optimizer", "sgd", "--lr", "0.02"]
    found = on_gpus(tmp_path, *arguments)
    monkeypatch.delenv("RANK", raising=False)
    simulated = train_gpt2.main(train_gpt2.options(arguments))
    assert simulated[-1] < simulated[0]
    for losses in found:
        assert losses == pytest.approx(simulated, rel=tolerance)
