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

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError
from shardc.plan import Plan
from shardc.runtime.checkpoint_planners import Writer
from shardc.runtime.launch import Trainer, launch
from tests.handmade import Mesh, mlp, mlp_inputs

RANK = int(os.environ.get("RANK", "0"))
PARAMS = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
PLANS = {"zero3": ("dp=2,tp=2", {"zero": 3, "axes": ["dp"]}), "tp4": ("tp=4", {})}


def trainer_of(plan: str) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """GPT-2 with a vocabulary that does not divide, and AdamW."""
    mesh, storage = PLANS[plan]
    network, batch = gpt2(layers=1, batch=4, vocab=255, seq=8)
    made = Plan.of(mesh=mesh, params=PARAMS, storage=storage)
    program = shardc.compile(network, batch, plan=made, optimizer=torch.optim.AdamW(network.parameters(), 1e-3))
    return program.launch(), batch


def refused(trainer: Trainer, path: Path) -> str:
    before = {name: tensor.clone() for name, tensor in trainer.state.items()}
    try:
        trainer.load(path)
    except ShardcError as failure:
        assert all(torch.equal(before[name], tensor) for name, tensor in trainer.state.items())
        return str(failure)
    return "loaded"


def move(folder: Path) -> dict[str, Any]:
    """Load what the simulation saved, train, save in the background, and load that under another plan."""
    dist.init_process_group("gloo")
    first, batch = trainer_of("zero3")
    first.load(folder / "simulated")
    started = first.state_dict()
    first.step(batch)
    held = {name: tensor.clone() for name, tensor in first.state.items()}
    saving = first.save(folder / "job", extra={"last_epoch": 1}, asynchronous=True)
    first.step(batch)
    saving.wait()
    losses = [float(first.step(batch).loss)]
    first.load(folder / "job")
    assert all(torch.equal(held[name], tensor) for name, tensor in first.state.items())
    state = first.state_dict()
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
    second, _ = trainer_of("tp4")
    extra = second.load(folder / "job")
    other = second.state_dict()
    assert other.keys() == state.keys()
    assert all(torch.equal(state[name], other[name]) for name in state)
    second.step(batch)
    losses.append(float(second.step(batch).loss))
    return {**found, "extra": extra, "steps": second.steps, "losses": losses}


def dies(folder: Path) -> dict[str, Any]:
    """The last rank is killed while it writes its second checkpoint; the others say so."""
    body = mlp(mesh=Mesh(dp=1, tp=2))
    trainer = launch(SimpleNamespace(body=body, mesh=body.mesh, constants=mlp_inputs()), timeout=8.0)
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
