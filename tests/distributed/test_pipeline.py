"""Pipelines as real processes over gloo: they train as one device does, their state moves, and who dies is named."""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardc
from examples.gpt2 import gpt2
from shardc.runtime.checkpoint.checkpoint import load_state_dict
from shardc.schedule.instructions import Instruction
from tests.distributed.ranks import start
from tests.partition.whole import SCHEDULES

WORKER = Path(__file__).parent / "pipeline_worker.py"
LIMIT, STEPS = 8.0, 5  # as in pipeline_worker.py
TP = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
SIZE = {"layers": 4, "batch": 8, "vocab": 63, "seq": 8, "width": 32}


def pipeline(schedule: str, microbatches: int = 4, **more: Any) -> dict[str, Any]:
    return {"pipeline": {"schedule": schedule, "microbatches": microbatches, **more}}


def prepare(folder: Path, name: str, mesh: str, optimizer: bool = True, **plan: Any) -> shardc.Program:
    """Compile GPT-2, and leave in a folder what its ranks need."""
    model, batch = gpt2(**SIZE)
    made = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4) if optimizer else None
    clip = {"clip_grad_norm": 0.5} if optimizer else {}
    return leave(folder, name, shardc.compile(model, batch, mesh=mesh, plan={**clip, **plan}, optimizer=made), model)


def mlp(folder: Path, name: str, ranks: int, **plan: Any) -> shardc.Program:
    """A layer with a batch norm in each stage."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())]
    model, rows = nn.Sequential(*layers), {"input": torch.randn(12, 6)}
    made = torch.optim.AdamW(model.parameters(), 1e-3)
    plan |= pipeline("1f1b", 3, split=["3", "6", "9"][4 - ranks :: 4 // ranks])
    program = shardc.compile(
        model, rows, loss=lambda y, _: y.square().mean(), mesh=f"pp={ranks}", plan=plan, optimizer=made
    )
    return leave(folder, name, program, model)


def by_schedule(folder: Path, name: str, virtual: int) -> shardc.Program:
    """Eight layers with a skip connection, on four ranks: more microbatches than sends may be under way."""
    torch.manual_seed(0)
    model, rows = Skipping(), {"x": torch.randn(24, 6)}
    plan = pipeline(name, 12, stages=4 * virtual)
    program = shardc.compile(model, rows, loss=lambda y, _: y.square().mean(), mesh="pp=4", plan=plan)
    return leave(folder, f"by {name}", program, model)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = x
        for k, layer in enumerate(self.layers):
            x = layer(x).tanh()
            early = x if k == 1 else early
        return x + early.transpose(0, 1).reshape(x.shape)


def leave(folder: Path, name: str, program: shardc.Program, model: nn.Module) -> shardc.Program:
    program.save(folder / f"{name}.json")
    torch.save({key: value.clone() for key, value in model.state_dict().items()}, folder / f"{name}.state")
    torch.save([dict(batch) for batch in batches(program)], folder / f"{name}.batches")
    return program


def batches(program: shardc.Program) -> list[dict[str, torch.Tensor]]:
    """Two, so that no step sees what the one before saw."""
    first = program.sample
    return [first, {name: x.flip(0, 1) if x.ndim > 1 else x for name, x in first.items()}]


@cache
def eager() -> list[float]:
    """The losses of plain torch on one device, which sees whole batches."""
    model, batch = gpt2(**SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**{name: x.flip(0, 1) if step % 2 else x for name, x in batch.items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def simulated(program: shardc.Program) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses and norms in one process, and all state after one step more."""
    given = batches(program)
    with program.launch() as trainer:
        results = [trainer.step(given[k % 2]) for k in range(STEPS)]
        trainer.step(given[0])
        state = trainer.state_dict(("param", "buffer", "state"))
    norms = [float(one.grad_norm) for one in results if one.grad_norm is not None]
    return [float(one.loss) for one in results], norms, state


def check_training(program: shardc.Program, folder: Path, name: str, found: list[dict[str, Any]]) -> None:
    """Every rank had the losses of one device, its own parameters and no others, and a time for each instruction."""
    assert program.pipelined is not None
    losses, norms, state = simulated(program)
    assert losses == pytest.approx(eager(), rel=1e-5)
    assert losses[-1] < losses[0]
    lists = program.pipelined.lists
    everything: list[tuple[int, Instruction]] = [(c, i) for c, listed in enumerate(lists.ranks) for i in listed]
    for rank, one in enumerate(found):
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert one["norms"] == pytest.approx(norms, rel=1e-4)
        c, _ = program.pipelined.coordinates(rank)
        params = {port.name for port in program.body.inputs if port.role == "param"}
        assert {held for held in one["held"] if held in params} == program.pipelined.held(c) & params
        assert all(held.rpartition(":")[0] in (*one["held"], "") for held in one["held"] if ":" in held)
        assert one["bytes"] == one["counted"]
        assert one["sum"] == found[0]["sum"]
        assert [tuple(event) for event in one["instructions"]] == [(c, str(i)) for c, i in everything]
        assert one["spans"] == found[0]["spans"]
        assert all(0 <= begun <= ended <= one["makespan"] + 1 for begun, ended in one["spans"])
        assert (folder / f"{name}.{rank}.svg").read_text().startswith("<svg")
        assert len(json.loads((folder / f"{name}.{rank}.trace").read_text())["traceEvents"]) > len(everything)
    whole = torch.load(folder / f"{name}.trained")
    assert whole.keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(whole[key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("schedules", [("zb-v",), tuple(SCHEDULES)], ids=["one", "every"])
@pytest.mark.long  # in processes too, `test_data.py` and `test_evaluation.py` train pipelines
def test_four_ranks_train_as_one_device(schedules: tuple[str, ...], tmp_path: Path) -> None:
    programs = {
        "pp4": prepare(tmp_path, "pp4", "pp=4", **pipeline("zb-h1")),
        "pp2tp2": prepare(tmp_path, "pp2tp2", "pp=2,tp=2", params=TP, **pipeline("interleaved", virtual=2)),
    }
    zero = {"storage": {"zero": 1, "axes": ["dp"]}, "inputs": dict.fromkeys(("input_ids", "labels"), "dp, -")}
    plain = prepare(tmp_path, "dp2tp2", "dp=2,tp=2", params=TP, **zero)
    grads = prepare(tmp_path, "grads", "tp=2,pp=2", optimizer=False, params=TP, **pipeline("1f1b"))
    normed = mlp(tmp_path, "norms", 4, nonfinite="raise")

    every = {name: by_schedule(tmp_path, name, virtual) for name, virtual in SCHEDULES.items() if name in schedules}

    ranks = [one for one in start("four", 4, tmp_path, limit=300, worker=WORKER) if one is not None]
    for name, program in programs.items():
        check_training(program, tmp_path, name, [one[name] for one in ranks])
    assert ranks[0]["pp4"]["bytes"] < 0.6 * sum(one["pp4"]["bytes"] for one in ranks)

    # The tied weight is in the checkpoint once, and everything else too.
    stored, moved = (
        load_state_dict(tmp_path / "checkpoint", ("param", "buffer", "state")),
        torch.load(tmp_path / "moved"),
    )
    assert stored.keys() == moved.keys()
    assert all(torch.equal(stored[name], value) for name, value in moved.items())
    exported = load_file(tmp_path / "hf/model.safetensors")
    assert exported.keys() == {name for name, _ in gpt2(**SIZE)[0].named_parameters()} | (
        exported.keys() & moved.keys()
    )
    assert all(torch.equal(moved[name], value) for name, value in exported.items())
    trainer = plain.launch()
    trainer.load(tmp_path / "checkpoint")
    expected = float(trainer.step(batches(plain)[0]).loss)
    for one in ranks:
        assert one["moves"]["next"] == pytest.approx([expected] * 4, rel=1e-5)
        assert one["moves"]["extra"] == {"by": "pp4"}
        assert one["moves"]["steps"] == 2
        assert one["resumed"] == pytest.approx(one["pp4"]["losses"][:4], rel=1e-6)

    check_gradients(grads, tmp_path, [one["grads"] for one in ranks])
    check_norms(normed, tmp_path, [one["norms"] for one in ranks])
    check_schedules(every, [one["schedules"] for one in ranks])


def check_gradients(program: shardc.Program, folder: Path, found: list[dict[str, Any]]) -> None:
    with program.launch() as trainer:
        losses = [float(trainer.step(program.sample).loss)]
        grads = trainer.gather_grads()
        trainer.sgd(0.1)
        losses.append(float(trainer.step(program.sample).loss))
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-5)
        assert (one["count"], one["sum"]) == (len(grads), found[0]["sum"])
    gathered = torch.load(folder / "grads.found")
    assert gathered.keys() == grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(gathered[name], grad, rtol=1e-4, atol=1e-6)


def check_norms(program: shardc.Program, folder: Path, found: list[dict[str, Any]]) -> None:
    with program.launch() as trainer:
        losses = [float(trainer.step(program.sample).loss) for _ in range(2)]
        state = trainer.state_dict()
        with pytest.raises(shardc.ShardcError) as raised:
            trainer.step({name: x / 0 for name, x in program.sample.items()})
    gathered = torch.load(folder / "norms.found")
    assert int(gathered["10.num_batches_tracked"]) == 6
    for name, value in state.items():
        torch.testing.assert_close(gathered[name], value, rtol=1e-5, atol=1e-6)
    for one in found:
        assert one["losses"] == pytest.approx(losses, rel=1e-6)
        assert one["raised"] == str(raised.value)


def check_schedules(programs: dict[str, shardc.Program], found: list[dict[str, Any]]) -> None:
    for name, program in programs.items():
        with program.launch() as trainer:
            losses = [float(trainer.step(batch).loss) for batch in batches(program)]
            total = sum(float(grad.double().abs().sum()) for grad in trainer.gather_grads().values())
        for one in found:
            assert one[f"by {name}"]["losses"] == pytest.approx(losses, rel=1e-6), name
            assert one[f"by {name}"]["sum"] == pytest.approx(total, rel=1e-6), name


@pytest.mark.slow
@pytest.mark.long
def test_eight_ranks_train_as_one_device(tmp_path: Path) -> None:
    inputs = dict.fromkeys(("input_ids", "labels"), "dp, -")
    program = prepare(tmp_path, "pp2dp2tp2", "dp=2,pp=2,tp=2", params=TP, inputs=inputs, **pipeline("zb-v"))
    ranks = [one for one in start("eight", 8, tmp_path, limit=150, worker=WORKER) if one is not None]
    check_training(program, tmp_path, "pp2dp2tp2", [one["pp2dp2tp2"] for one in ranks])


@pytest.mark.slow
@pytest.mark.long
def test_stored_parameters_are_gathered_for_stages(tmp_path: Path) -> None:
    """ZeRO-3 within the stages of a pipeline: gathers of the instruction lists, in processes and in the simulation."""
    zero: dict[str, Any] = {"storage": {"zero": 3, "axes": ["dp"]}}
    zero["inputs"] = dict.fromkeys(("input_ids", "labels"), "dp, -")
    programs = {
        "zero3-bfs": prepare(tmp_path, "zero3-bfs", "pp=2,dp=2", **zero, **pipeline("bfs", virtual=2)),
        "zero3-zb-h1": prepare(tmp_path, "zero3-zb-h1", "dp=2,pp=2", **zero, **pipeline("zb-h1")),
    }
    ranks = [one for one in start("gathered", 4, tmp_path, limit=150, worker=WORKER) if one is not None]
    for name, program in programs.items():
        found = [one[name] for one in ranks]
        check_training(program, tmp_path, name, found)
        gathers = [i for _, i in found[0]["instructions"] if i.startswith("Gather")]
        assert len(gathers) == (6 if name == "zero3-bfs" else 2)
        assert sum(one["bytes"] for one in found) < 1.2 * program.parameter_bytes().whole


def test_a_rank_that_dies_in_a_step_is_named(tmp_path: Path) -> None:
    mlp(tmp_path, "mlp4", 4)
    *survivors, dead = start("dead", 4, tmp_path, worker=WORKER)
    assert dead is None
    for rank, one in enumerate(survivors):
        assert one is not None
        assert one["code"] == "SC502", one
        assert (
            f"rank 3 died, without an error of its own; rank {rank} was waiting for it in instruction" in one["error"]
        )
        assert "rank 3 last said that it was at instruction" in one["error"]
        assert one["seconds"] < LIMIT
    (neighbour,) = (one for one in survivors[2:] if one is not None)
    # What was sent just before it died may not have left.
    assert re.search(r"in instruction Recv d\.\S+#[01] <- 3 \(rank 3\) of step 1", neighbour["error"])


@pytest.mark.long  # without a pipeline, `test_gloo.py` shows it
def test_a_rank_that_fails_of_itself_is_named(tmp_path: Path) -> None:
    mlp(tmp_path, "mlp2", 2)
    survivor, failed = start("own", 2, tmp_path, worker=WORKER)
    assert failed is not None
    assert survivor is not None
    (note,) = failed["notes"]
    assert note.startswith("in instruction %")
    assert note.endswith(" of Forward 1 #1, on rank 1")
    assert ".py:" in note
    assert survivor["code"] == "SC502"
    assert "rank 1 died, of an error of its own: MemoryError: no memory for this in instruction" in survivor["error"]
    assert survivor["seconds"] < LIMIT


@pytest.mark.long  # without a pipeline, `test_gloo.py` shows it
def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    mlp(tmp_path, "mlp2", 2)
    survivor, _ = start("stuck", 2, tmp_path, worker=WORKER)
    assert survivor is not None
    assert survivor["code"] == "SC503", survivor
    assert "rank 1 did not come to instruction Recv" in survivor["error"]
    assert "of Forward 1 #1 of step 1" in survivor["error"]
    assert survivor["seconds"] < LIMIT
