"""GPT-2 and gpt-1.3b at full size on GPUs: gradients, and 20 steps with AdamW in the graph, against eager torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardc
from benchmarks.gpt import SHAPES, loss_of
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
RUNS = ("ours-dp", "ours-zero3", "ours-tp")

pytestmark = pytest.mark.gpu


@pytest.mark.gpu(2)
def test_the_benchmark_finds_ours_right(tmp_path: Path) -> None:
    """On two GPUs: losses and gradients of gpt-1.3b are as near to float32's as twice eager torch's."""
    out = tmp_path / "lines.jsonl"
    command = [sys.executable, "-m", "benchmarks.train_step", "--gpus", "2", "--steps", "1", "--rounds", "1"]
    command += ["--out", str(out), "--contestants", *RUNS]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=570, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["contestant"] for line in lines if line.get("correct")} == {*RUNS}


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
