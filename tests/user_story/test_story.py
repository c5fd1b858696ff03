"""The whole story of a job, in four processes over gloo, as torchrun starts them or forked: compile, train, evaluate,
save, die, go on on another mesh, export, load into what the model came from, and get the same tokens."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.distributed.ranks import start
from tests.user_story.models import SUBJECTS, held_out, loader
from tests.user_story.story import KILLED_AFTER, PROMPTS, SAVED

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "story.py"
Run = Callable[[str, Path], tuple[bool, str]]
EPOCHS = 3


def torchrun(scenario: str, folder: Path) -> tuple[bool, str]:
    """Whether the job ended well, and what it said."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    job = subprocess.run(
        [*command, str(SCRIPT), scenario, str(folder)],
        env=env | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return job.returncode == 0, job.stderr


def forked(scenario: str, folder: Path) -> tuple[bool, str]:
    """The same in ranks that need not import torch first."""
    results = start(scenario, 4, folder, limit=240, worker=SCRIPT, all_end=False)
    return None not in results, "".join((folder / f"{rank}.log").read_text() for rank in range(4))


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
@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(forked, "llama", id="forked-llama"),
        pytest.param(torchrun, "llama", id="torchrun-llama", marks=pytest.mark.long),
        pytest.param(torchrun, "own", id="torchrun-own", marks=pytest.mark.long),
    ],
)
def test_a_job_from_its_first_line_to_other_peoples_tools(run: Run, name: str, tmp_path: Path) -> None:
    model = SUBJECTS[name].make()
    expected = eager(model)

    well, said = run(f"{name} 0", tmp_path)
    assert not well
    assert "error[SC502 dead-rank]: rank 3 died, without an error of its own" in said, said[-3000:]
    near(written(tmp_path, 0), expected[:KILLED_AFTER])

    well, said = run(f"{name} 1", tmp_path)
    assert well, said[-5000:]
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
