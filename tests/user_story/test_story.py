"""The whole story of a job, by torchrun, in four processes over gloo: compile, train, evaluate, save, die, go on on
another mesh, export, load into what the model came from, and get the same tokens."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.user_story.models import SUBJECTS, held_out, loader
from tests.user_story.story import KILLED_AFTER, PROMPTS

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "story.py"
EPOCHS, SAVED = 3, 15  # the step of the last checkpoint before rank 3 is killed


def torchrun(subject: str, folder: Path, attempt: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(
        [*command, str(SCRIPT), subject, str(folder), str(attempt)],
        env=env | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def eager(model: nn.Module) -> list[dict[str, Any]]:
    """The same by plain torch in one process, which is not interrupted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.7)
    data, rows = loader(), list[dict[str, Any]]()
    for epoch in range(EPOCHS):
        data.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in data:
            optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"]
            loss = output(model(**batch), "loss")
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            row: dict[str, Any] = {"step": len(rows) + 1, "loss": loss.item(), "rate": rate}
            rows.append({**row, "evaluated": None, "accuracy": None})
            if len(rows) % 10 == 0:
                rows[-1] |= evaluation(model)
    return rows


def evaluation(model: nn.Module) -> dict[str, Any]:
    model.eval()
    with torch.no_grad():
        results = [model(**batch) for batch in held_out()]
    model.train()
    accuracies = [float(result["accuracy"]) for result in results if "accuracy" in result]
    loss = sum(float(output(result, "loss")) for result in results) / len(results)
    return {"evaluated": loss, "accuracy": sum(accuracies) / len(accuracies) if accuracies else None}


def output(result: Any, name: str) -> Tensor:
    return result[name]


def written(folder: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"losses.{attempt}").read_text().splitlines()]


def near(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for key in ("loss", "evaluated", "accuracy", "rate"):
        numbers, wanted = ({row["step"]: row[key] for row in r if row[key] is not None} for r in (rows, expected))
        assert numbers == pytest.approx(wanted, rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("own", marks=pytest.mark.long)])
def test_a_job_from_its_first_line_to_other_peoples_tools(name: str, tmp_path: Path) -> None:
    model = SUBJECTS[name].make()
    expected = eager(model)

    first = torchrun(name, tmp_path, 0)
    assert first.returncode != 0
    assert "error[SC502 dead-rank]: rank 3 died, without an error of its own" in first.stderr, first.stderr[-3000:]
    near(written(tmp_path, 0), expected[:KILLED_AFTER])

    second = torchrun(name, tmp_path, 1)
    assert second.returncode == 0, second.stderr[-5000:]
    near(written(tmp_path, 1), expected[SAVED:])

    generated = json.loads((tmp_path / "generated").read_text())
    if name == "llama":
        from transformers import AutoModelForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
        assert generated == [by_the_library(loaded, prompt) for prompt in PROMPTS]
    else:
        loaded = type(model)()
        loaded.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"), strict=True)
        with torch.no_grad():
            assert generated == loaded.eval()(held_out()[0]["input_ids"])["logits"].argmax(-1).tolist()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, rtol=1e-3, atol=1e-4)


def by_the_library(model: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        tokens = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0, len(prompt) :]
    return tokens.tolist()
