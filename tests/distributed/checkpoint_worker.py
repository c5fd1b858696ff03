"""What one rank of the tests in `test_checkpoint.py` does: `python checkpoint_worker.py SCENARIO FOLDER`."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from shardc.ir.program import Program
from shardc.partition.staged_program import one_stage
from shardc.runtime.checkpoint.planners import Writer, chunks_of
from shardc.runtime.train.trainer import Trainer, launch
from tests.handmade import Mesh, mlp, mlp_inputs

RANK = int(os.environ["RANK"])


def trainer_of(folder: Path, plan: str) -> Trainer:
    """A trainer of a program that the test has compiled; what it begins with does not matter, a checkpoint does."""
    program = Program.load(folder / f"{plan}.json")
    rates = {"lr.0": torch.tensor(1e-3, dtype=torch.float64)}
    made = SimpleNamespace(staged=one_stage(program.body), learning_rates=lambda: rates)
    return launch(made, init=lambda _, shape, dtype: torch.zeros(shape, dtype=dtype), timeout=60.0)


def real(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of what a rank holds, without the padding."""
    rank, mesh = RANK, trainer.body.mesh
    found: dict[str, torch.Tensor] = {}
    for name, held in trainer._held().items():
        for at, (_, local) in chunks_of(held.type, mesh, rank).items():
            found[f"{name} {list(at)}"] = held.tensor[local].clone()
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(trainer: Trainer, path: Path) -> str:
    before = real(trainer)
    try:
        trainer.load(path)
    except ShardcError as failure:
        assert same(before, real(trainer))
        return str(failure)
    return "loaded"


def move(folder: Path) -> dict[str, Any]:
    """Load what the simulation saved, train, save in the background, and load that under another plan."""
    dist.init_process_group("gloo")
    batch = torch.load(folder / "batch.pt")
    first = trainer_of(folder, "zero3")
    first.load(folder / "simulated")
    started = first.state_dict(("param", "buffer", "state"))
    first.step(batch)
    held = real(first)
    saving = first.save(folder / "job", extra={"last_epoch": 1}, asynchronous=True)
    first.step(batch)
    saving.wait()
    losses = [float(first.step(batch).loss)]
    first.load(folder / "job")
    assert same(held, real(first))
    state = first.state_dict(("param", "buffer", "state"))
    first.export_safetensors(folder / "hf")
    if RANK == 0:
        torch.save({"started": started, "state": state}, folder / "state.pt")
        shutil.copytree(folder / "job", folder / "altered")
        # The end of what rank 3 wrote: on this plan only some ranks read it, on all of them it is refused.
        file = folder / "altered/__3_0.distcp"
        data = bytearray(file.read_bytes())
        data[-len(data) // 3] ^= 1
        file.write_bytes(data)
    dist.barrier()
    found = {"altered": refused(first, folder / "altered"), "none": refused(first, folder / "nothing")}
    second = trainer_of(folder, "tp4")
    extra = second.load(folder / "job")
    other = second.state_dict(("param", "buffer", "state"))
    assert same(state, other)
    second.step(batch)
    losses.append(float(second.step(batch).loss))
    return {**found, "extra": extra, "steps": second.steps, "losses": losses}


def dies(folder: Path) -> dict[str, Any]:
    """The last rank is killed while it writes its second checkpoint; the others say so."""
    body = mlp(mesh=Mesh(dp=1, tp=2))
    trainer = launch(SimpleNamespace(staged=one_stage(body), constants=mlp_inputs()), timeout=8.0)
    trainer.save(folder / "ck")
    trainer.step({"x": mlp_inputs()["x"]})
    trainer.sgd(1e-3)
    if RANK == 1:
        write: Callable[..., Any] = Writer._checked
        Writer._checked = lambda *args: os._exit(1) if write(*args) else None  # type: ignore[method-assign]
    started = time.monotonic()
    try:
        trainer.save(folder / "ck")
    except ShardcError as failure:
        return {"error": str(failure), "code": failure.code, "seconds": time.monotonic() - started}
    return {}


def main() -> None:
    torch.set_num_threads(1)
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    found = {"move": move, "dead": dies}[scenario](folder)
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
