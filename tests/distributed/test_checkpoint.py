"""Checkpoints of real jobs: between simulation and processes, between meshes, and when a rank dies while it writes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

import shardc
from examples.gpt2 import gpt2
from shardc.ir.mesh import Mesh
from shardc.partition.staged_program import one_stage
from shardc.plan.schema import Plan
from shardc.runtime.checkpoint.checkpoint import load_state_dict
from shardc.runtime.checkpoint.manifest import Manifest
from shardc.runtime.train.trainer import launch
from tests.distributed.ranks import start
from tests.handmade import mlp, mlp_inputs

PARAMS = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
PLANS = {"zero3": ("dp=2,tp=2", {"zero": 3, "axes": ["dp"]}), "tp4": ("tp=4", {})}
WORKER = Path(__file__).parent / "checkpoint_worker.py"


@pytest.mark.slow
def test_checkpoints_move_between_simulation_and_jobs(tmp_path: Path) -> None:
    for name, (mesh, storage) in PLANS.items():
        network, batch = gpt2(layers=1, batch=4, vocab=255, seq=8)  # a vocabulary that does not divide
        plan = Plan.of(mesh=mesh, params=PARAMS, storage=storage)
        program = shardc.compile(network, batch, plan=plan, optimizer=torch.optim.AdamW(network.parameters(), 1e-3))
        program.save(tmp_path / f"{name}.json")
    torch.save(batch, tmp_path / "batch.pt")
    simulated = program.launch()
    simulated.step(batch)
    simulated.save(tmp_path / "simulated")
    # Shards as they lie would go through either way; whole tensors, as simulation writes them, must be cut.
    assert len(list((tmp_path / "simulated").iterdir())) == 3
    found = start("move", 4, tmp_path, limit=150, worker=WORKER)
    gathered = torch.load(tmp_path / "state.pt")
    for name, value in simulated.state.items():
        assert torch.equal(gathered["started"][name], value), name
    for one in found:
        assert one is not None
        assert "error[SC405 checkpoint-damaged]" in one["altered"]
        assert "__3_0.distcp is altered, in 'transformer." in one["altered"]
        assert "error[SC407 no-checkpoint]" in one["none"]
        assert one["extra"] == {"last_epoch": 1}
        assert one["steps"] == 4
        assert one["losses"][1] == pytest.approx(one["losses"][0], rel=1e-6)

    # The job's checkpoint in one process: by the simulation, by plain torch, as safetensors.
    simulated.load(tmp_path / "job")
    assert simulated.steps == 2
    plain = load_state_dict(tmp_path / "job")
    exported = load_file(tmp_path / "hf/model.safetensors")
    stock = {name: torch.zeros_like(value) for name, value in plain.items()}
    dcp.load(stock, checkpoint_id=tmp_path / "job", no_dist=True)
    assert "lm_head.weight" in stock
    for name, value in gathered["state"].items():
        assert torch.equal(simulated.state.get(name, value), value), name
        for other in (plain, stock, exported):
            assert torch.equal(other.get(name, value), value), name
    assert plain.keys() <= gathered["state"].keys()
    assert exported.keys() == plain.keys() - {"lm_head.weight"}

    # Each element was written once, by ranks that hold about the same.
    metadata = dcp.FileSystemReader(tmp_path / "job").read_metadata().state_dict_metadata
    assert len(metadata["transformer.h.0.attn.c_attn.weight"].chunks) == 2 * 3 * 2  # dp x blocks x tp
    sizes = [size for name, size in Manifest.read(tmp_path / "job").files.items() if name.endswith(".distcp")]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


def test_a_rank_that_dies_while_it_writes_is_named(tmp_path: Path) -> None:
    survivor, dead = start("dead", 2, tmp_path, worker=WORKER)
    assert dead is None
    assert survivor is not None
    assert survivor["code"] == "SC502", survivor
    assert "rank 1 died" in survivor["error"]
    assert survivor["seconds"] < 8.0
    body = mlp(mesh=Mesh(dp=1, tp=2))
    with launch(SimpleNamespace(staged=one_stage(body), constants=mlp_inputs())) as trainer:
        trainer.load(tmp_path / "ck")
        assert trainer.steps == 0
        assert torch.equal(trainer.state["w1"], mlp_inputs()["w1"])
        trainer.step({"x": mlp_inputs()["x"]})
        trainer.save(tmp_path / "ck")
    assert json.loads((tmp_path / "ck/shardc.json").read_text())["body"]["step"] == 1
    assert [name for name in os.listdir(tmp_path) if name.startswith("ck")] == ["ck"]
