"""Four processes train GPT-2 on real text: as one device does, on half the memory for parameters.

The script is the example itself, with the weights in a file; `watched.py` runs it and reports what each rank held.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardc
from examples import train_gpt2
from tests.distributed.ranks import start

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "watched.py"
RANKS = 4
SLACK = 4 << 20  # bytes of memory that loading may take for other things than tensors


@dataclass(frozen=True)
class Trained:
    """What the three ways of running the same steps have found."""

    options: argparse.Namespace
    eager: list[float]
    simulated: list[float]
    ranks: list[dict[str, Any]]


def eager(model: torch.nn.Module, options: argparse.Namespace) -> list[float]:
    """What anyone would write for one device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    losses: list[float] = []
    for batch in train_gpt2.batches(options):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(folder: Path, steps: int, under: str) -> Trained:
    weights = folder / "model.safetensors"
    # Wide enough that 14 MiB of parameters stand out against what else a process allocates.
    arguments = ["--weights", str(weights), "--steps", str(steps), "--width", "384"]
    arguments += ["--optimizer", "sgd", "--lr", "0.02"]
    options = train_gpt2.options(arguments)
    torch.manual_seed(0)
    model = train_gpt2.gpt2(options)
    save_file(dict(model.named_parameters()), weights)
    (folder / "arguments.json").write_text(json.dumps([*arguments, "--device", "cpu"]))
    if under == "torchrun":
        torchrun(folder)
    else:
        start("watched", RANKS, folder, limit=150, worker=WORKER)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return Trained(options, eager(model, options), train_gpt2.main(options), ranks)


def torchrun(folder: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    with (folder / "log").open("w") as log:
        ended = subprocess.run(
            [*command, str(WORKER), "watched", str(folder)],
            env=env | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=log, stderr=log, timeout=150, check=False,
        )  # fmt: skip
    assert ended.returncode == 0, (folder / "log").read_text()[-5000:]


@pytest.mark.long  # `test_combined.py` and the user story train in ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("under", "steps", "falls_to"), [("forked", 6, 0.95), pytest.param("torchrun", 20, 0.8, marks=pytest.mark.long)]
)
def test_four_processes_train_as_one_device_does(under: str, steps: int, falls_to: float, tmp_path: Path) -> None:
    trained = train(tmp_path, steps, under)
    assert len(trained.eager) == steps
    assert trained.eager[-1] < falls_to * trained.eager[0]
    for rank in trained.ranks:
        assert rank["losses"] == pytest.approx(trained.eager, rel=1e-5)
        assert rank["losses"] == pytest.approx(trained.simulated, rel=1e-6)
    assert len({tuple(rank["losses"]) for rank in trained.ranks}) == 1  # to the bit, on all ranks
    check_memory(trained)


def check_memory(trained: Trained) -> None:
    """Bytes of the real tensors, of what was read of the file, and of the process, are those of a rank's shards."""
    with torch.device("meta"):
        model = train_gpt2.gpt2(trained.options)
    program = shardc.compile(model, next(train_gpt2.batches(trained.options)), plan=trained.options.plan)
    mine, whole = program.parameter_bytes()
    assert whole == sum(p.numel() * p.element_size() for p in model.parameters())
    replicated = 4 * (trained.options.seq + 40) * trained.options.width  # positions, and some 40 biases and norms
    assert whole / 2 < mine < whole / 2 + replicated
    for rank in trained.ranks:
        assert rank["bytes"] == rank["read"] == mine
        # Never more than a slice of one tensor beside what it holds already: the whole model was never there.
        assert rank["largest"] <= max(p.numel() * p.element_size() for p in model.parameters()) / 2
        assert rank["grown"] < mine + rank["largest"] + SLACK < whole
        if sys.platform == "linux":
            assert rank["grown"] > mine / 2  # else it measures nothing
