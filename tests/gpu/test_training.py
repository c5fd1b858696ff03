"""GPT-2 and gpt-1.3b at full size on GPUs: gradients, and 20 steps with AdamW in the graph, against eager torch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardc
from benchmarks.gpt import SHAPES, loss_of
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RUNS = ("ours-dp", "ours-dp-zero3", "ours-tp")
TOLERANCE = 1e-2  # of a loss: some of bfloat16's roundings, 1/256 each

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """What benchmarks/train_step.py prints."""
    command = [sys.executable, "-m", "benchmarks.train_step", "--gpus", "2", "--steps", "2"]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    command += ["--runs", "reference", *RUNS]
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=500, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.gpu(2)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("precision", ["pure", "master"])
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_are_those_of_one_gpu(shape: str, precision: str, run: str, rows: list[dict[str, Any]]) -> None:
    asked = {"shape": shape, "precision": precision, "run": run}
    (row,) = (row for row in rows if asked.items() <= row.items())
    assert row["loss_20"] < 0.5 * row["loss_1"]
    assert row["loss_gap"] < TOLERANCE


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_as_near_to_float32_as_eager_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each parameter's, by its relative error: what a wrong rule or a sum in too few digits would show in.

    Not quite as near: a bias is added to a product that is rounded already, where eager torch rounds their sum once.
    Over 24 layers of gpt-1.3b that was seen to make 0.2 % into 0.45 %; GPT-2's biases start at 0, and its errors equal.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}.items():
        monkeypatch.setenv(key, value)
    shape, device = SHAPES[name], torch.device("cuda", 0)
    torch.manual_seed(0)
    with device:
        model = shape.model(torch.bfloat16)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    (batch,) = shape.batches(1, shape.batch, device)

    def eager() -> dict[str, Tensor]:
        model.zero_grad()
        loss_of(model(**batch)).backward()
        return {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}

    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):  # as ours chooses
        theirs = eager()
    model.float()
    truth = eager()
    with torch.device("meta"):
        compiled = shape.model(torch.bfloat16)
        sample = {key: torch.empty_like(x, device="meta") for key, x in batch.items()}
    with shardc.compile(compiled, sample, mesh="dp=1").launch(state=state, timeout=60) as trainer:
        ours = trainer.step(batch).grads
        assert ours.keys() == truth.keys()
        for key, exact in truth.items():
            mine, others = (float((g[key].float() - exact).norm() / exact.norm()) for g in (ours, theirs))
            assert mine < 3 * others + 1e-3, f"{key}: {mine:.4f} off, eager torch {others:.4f}"
