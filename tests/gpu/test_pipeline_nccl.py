"""A pipeline of two GPUs over NCCL: GPT-2 trains as its simulation does, and the host never waits within a step."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from examples.gpt2 import gpt2

ROOT = Path(__file__).parents[2]
SIZE = {"layers": 4, "batch": 8, "seq": 64, "vocab": 512, "width": 128}
SCHEDULES = ("1f1b", "zb-h1")
STEPS = 5  # as in pipeline_nccl_worker.py
HOST = {"offload": {"activations": "all", "least": "4KiB"}}  # the same, with activations on the host meanwhile
PRECISION: dict[str, tuple[dict[str, Any], float]] = {
    "float32": ({}, 1e-4),
    "bf16": ({"precision": "bf16"}, 1e-2),
    "host": (HOST, 1e-4),
}

pytestmark = pytest.mark.gpu(2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[shardc.Program, list[dict[str, Any]]]]:
    """Every program, and what each of its two ranks found."""
    folder = tmp_path_factory.mktemp("pipeline")
    programs: dict[str, shardc.Program] = {}
    for precision, (plan, _) in PRECISION.items():
        for schedule in SCHEDULES:
            model, batch = gpt2(**SIZE)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-3, eps=1e-4)
            plan = {**plan, "clip_grad_norm": 0.5, "pipeline": {"schedule": schedule, "microbatches": 4}}
            program = shardc.compile(model, batch, mesh="pp=2", plan=plan, optimizer=optimizer)
            programs[f"{precision}-{schedule}"] = program
            program.save(folder / f"{precision}-{schedule}.json")
            torch.save(dict(model.state_dict()), folder / "state.pt")
            torch.save(dict(batch), folder / "batch.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/gpu/pipeline_nccl_worker.py"), str(folder), *programs]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=env, cwd=ROOT, timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: (program, [rank[name] for rank in ranks]) for name, program in programs.items()}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("precision", PRECISION)
def test_trains_as_the_simulation_does(
    precision: str, schedule: str, runs: dict[str, tuple[shardc.Program, list[dict[str, Any]]]]
) -> None:
    program, found = runs[f"{precision}-{schedule}"]
    tolerance = PRECISION[precision][1]
    with program.launch() as trainer:
        results = [trainer.step(program.sample) for _ in range(STEPS)]
    losses = [float(one.loss) for one in results]
    assert losses[-1] < losses[0]
    assert [one["device"] for one in found] == ["cuda:0", "cuda:1"]
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=tolerance)
        assert one["norms"] == pytest.approx([float(r.grad_norm) for r in results if r.grad_norm is not None], rel=0.05)
        assert one["losses"] == found[0]["losses"]
    assert max(one["bytes"] for one in found) < 0.8 * sum(one["bytes"] for one in found)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_activations_on_the_host_change_no_bit(
    schedule: str, runs: dict[str, tuple[shardc.Program, list[dict[str, Any]]]]
) -> None:
    (program, moved), (_, kept) = runs[f"host-{schedule}"], runs[f"float32-{schedule}"]
    assert program.memory().host.most > 0
    for one, other in zip(moved, kept, strict=True):
        assert (one["losses"], one["norms"]) == (other["losses"], other["norms"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_instruction_is_timed(
    schedule: str, runs: dict[str, tuple[shardc.Program, list[dict[str, Any]]]]
) -> None:
    program, found = runs[f"bf16-{schedule}"]
    assert program.pipelined is not None
    ranks = program.pipelined.lists.ranks
    for one in found:
        assert [(c, text) for c, text, *_ in one["spans"]] == [(c, str(i)) for c, row in enumerate(ranks) for i in row]
        assert all(begun <= ended for *_, begun, ended in one["spans"])
        assert one["text"] == found[0]["text"]
