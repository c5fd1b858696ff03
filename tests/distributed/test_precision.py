"""Real processes in half precision: an overflow on one rank skips the step on all, and training is the simulation's."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from examples.mlp import mlp, reconstruction
from shardc.ir.graph import type_of
from shardc.plan.schema import Plan
from shardc.runtime.train.trainer import Trainer
from tests.distributed.ranks import start

PLAN = Path(__file__).parents[2] / "configs/plans/mlp.yaml"
WORKER = Path(__file__).parent / "precision_worker.py"


def compiled(scenario: str) -> tuple[shardc.Program, list[Any]]:
    """A program, and batches of which one has, in the part of the last rank alone, what is no number or makes one."""
    model, batch, _ = mlp()
    bad = {"x": batch["x"].clone()}
    bad["x"][-1, 3] = 1e6 if scenario == "overflow" else float("nan")
    precision: object = {"compute": "fp16", "loss_scale": 1024} if scenario == "overflow" else "bf16"
    if eight := scenario.startswith("fp8"):
        precision, bad = {"linear": {"history": 2} if scenario == "fp8_history" else "fp8"}, {"x": 64 * batch["x"]}
    plan: dict[str, Any] = {"precision": precision, "storage": {"zero": 3 if eight else 1, "axes": ["dp"]}}
    plan |= {} if scenario == "overflow" else {"nonfinite": "skip" if eight else "raise"}
    if scenario == "accumulate":
        plan, bad = plan | {"accumulate": 4, "bucket": False}, {"x": 2 * batch["x"]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    asked = Plan.load(PLAN).merge(Plan.of(mesh="dp=2, tp=1", **plan))
    program = shardc.compile(model, batch, plan=asked, loss=reconstruction, optimizer=optimizer)
    return program, [batch, bad, batch, batch]


def steps(trainer: Trainer, batches: list[Any]) -> dict[str, object]:
    """What each step reports, and what the state is afterwards, the parts of all ranks together."""
    found: dict[str, list[float]] = {"loss": [], "scale": [], "skipped": [], "norm": []}
    for batch in batches:
        result = trainer.step(batch)
        assert result.skipped is not None
        assert result.grad_norm is not None
        found["loss"].append(float(result.loss.nan_to_num(0, 0)))
        found["scale"].append(float(result.loss_scale if result.loss_scale is not None else 0))
        found["skipped"].append(float(result.skipped))
        found["norm"].append(float(result.grad_norm.nan_to_num(0, 0)))
    state = trainer.state_dict(("param", "state"))
    return {**found, "state": {name: float(value.double().abs().sum()) for name, value in state.items()}}


def test_an_overflow_on_one_rank_skips_the_step_on_all(tmp_path: Path) -> None:
    found = start("overflow", 2, tmp_path, worker=WORKER)
    program, batches = compiled("overflow")
    want: Any = steps(program.launch(), batches)
    assert want["skipped"] == [0, 1, 0, 0]
    assert want["scale"] == [1024, 512, 512, 512]
    for rank in found:
        assert rank is not None
        assert rank["finite"]
        assert (rank["skipped"], rank["scale"]) == (want["skipped"], want["scale"])
        for key in ("loss", "norm"):
            assert rank[key] == pytest.approx(want[key], rel=2e-3)
        assert rank["state"] == pytest.approx(want["state"], rel=2e-3)
    assert found[0] == found[1]  # to the bit


@pytest.mark.long  # `api/test_nonfinite.py` raises in a simulation; in ranks, an overflow of one skips the step on all
def test_all_ranks_raise_alike(tmp_path: Path) -> None:
    found = start("raise", 2, tmp_path, worker=WORKER)
    for rank in found:
        assert rank is not None
        assert (rank["code"], rank["steps"], rank["finite"]) == ("SC509", 1, True)
        assert "step 1: the gradients of up.weight, up.bias, down.weight, down.bias are not finite" in rank["error"]


def test_microbatches_find_what_the_first_has_gathered(tmp_path: Path) -> None:
    """Weights of ZeRO-1, over steps that change them, where later microbatches begin no gather and wait for none."""
    program, batches = compiled("accumulate")
    gathers = [one for one in program.collectives() if one.kind == "all_gather"]
    assert len(gathers) == 4
    assert {one.times for one in gathers} == {1}
    found = start("accumulate", 2, tmp_path, worker=WORKER)
    want: Any = steps(program.launch(), batches)
    for rank in found:
        assert rank is not None
        assert rank["finite"]
        assert rank["loss"] == pytest.approx(want["loss"], rel=2e-3)
        assert rank["state"] == pytest.approx(want["state"], rel=2e-3)
    assert found[0] == found[1]


@pytest.mark.parametrize("scenario", ["fp8", "fp8_history"])
def test_8_bit_weights_are_gathered_by_gloo(scenario: str, tmp_path: Path) -> None:
    """As bytes: gloo has no 8-bit floats. Histories are of all ranks' elements."""
    program, batches = compiled(scenario)
    sent = {type_of(program.body.by_name(c.value)).dtype for c in program.collectives() if c.kind == "all_gather"}
    assert torch.float8_e4m3fn in sent
    found = start(scenario, 2, tmp_path, worker=WORKER)
    want: Any = steps(program.launch(), batches)
    for rank in found:
        assert rank is not None
        assert rank["loss"] == want["loss"]
        assert rank["state"] == want["state"]
