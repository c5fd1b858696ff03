"""What each call of a step took, measured in real processes: every call of the program has a time, and a difference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.cost.profile import Profile
from shardc.ir.graph import info
from shardc.ir.ops.linear import LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD
from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "profile_worker.py"
PRODUCTS = (LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x.square().mean()


def measured(name: str, mesh: shardc.Mesh, plan: dict[str, Any], folder: Path) -> tuple[shardc.Program, list[Profile]]:
    torch.manual_seed(0)
    model, batch = Mlp(), torch.randn(8, 64)
    program = shardc.compile(model, batch, mesh=mesh, plan=plan)
    program.save(folder / f"{name}.json")
    torch.save(model.state_dict(), folder / f"{name}.state")
    torch.save({"x": batch}, folder / f"{name}.batch")
    found = start(name, 2, folder, worker=WORKER)
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[0]["losses"][0] == found[0]["losses"][1]  # measuring changes nothing
    return program, [Profile.load(folder / f"{name}.{rank}.json") for rank in range(2)]


def test_every_call_is_measured_on_every_rank(tmp_path: Path) -> None:
    program, profiles = measured("tp", shardc.Mesh(tp=2), {"params": {"**.weight": "tp, -"}}, tmp_path)
    for rank, profile in enumerate(profiles):
        assert (profile.device, profile.rank) == ("cpu", rank)
        by_name = {call.call: call for call in profile.calls}
        assert {info(node).name for node in program.body.calls()} - by_name.keys() == set()
        assert all(call.ms >= 0 for call in profile.calls)
        assert sum(call.ms for call in profile.calls) == pytest.approx(profile.step_ms)
        diff = program.predict().diff(profile)
        assert all(row.kind is not None for row in diff.calls)  # the prediction knows all that was measured
        products = {info(node).name for node in program.body.calls() if node.target in PRODUCTS}
        assert len(products) == 4 + 3 + 4  # x needs no gradient
        assert diff.by_kind()["product"][1] == pytest.approx(sum(by_name[name].ms for name in products))
        assert "%layers.0.add (product)" in diff.text(10**6)  # with its bias


def test_a_pipelines_calls_are_measured_by_the_instruction_that_runs_them(tmp_path: Path) -> None:
    plan = {"pipeline": {"microbatches": 4, "schedule": "1f1b"}}
    program, profiles = measured("pp", shardc.Mesh(pp=2), plan, tmp_path)
    for stage, profile in enumerate(profiles):
        times = {(call.within, call.call): call.times for call in profile.calls}
        forward = program.staged.stages[stage].parts["forward"]
        for node in forward.calls():
            assert times[f"Forward {stage}", info(node).name] == 4
    # That of stage 1 is compared with the prediction of its own coordinate.
    predicted = program.predict()
    diff = predicted.diff(profiles[predicted.coordinate])
    works = ("Forward", "Backward")
    assert all(row.kind is not None for row in diff.calls if row.within.startswith(works) and row.call)
