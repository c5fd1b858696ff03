"""`launch(graphs="auto")`: steps are replayed where that is predicted to be shorter, and can be done at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc import ShardcError
from shardc.cli.summary import summary
from shardc.compiler import graphs_auto
from shardc.runtime.execute import step_graph
from shardc.runtime.execute.step_graph import WARM_UP
from tests.passes.test_dispatch import program as routed
from tests.ports import free_port
from tests.runtime.test_step_graph import STEPS, Normed, RecordedOps


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    RecordedOps.made = []
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    for key, value in {**variables, "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(key, value)


# Python that takes longer for a call than the GPU for its kernel, and one that takes next to nothing.
HOSTS = {True: {"like": "h200", "call_seconds": 1e-3}, False: {"like": "h200", "kernel_launch_seconds": 1e-9}}


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("slow", [True, False])
def test_auto_replays_where_a_step_is_predicted_to_wait_for_python(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    batch = torch.randn(8, 6)
    host = HOSTS[slow] if slow else {**HOSTS[slow], "call_seconds": 0}
    program = shardc.compile(Normed(), batch, mesh="dp=1", plan={"hardware": host, "fuse": False})
    issued, replayed = program.predict(), program.predict(graphs=True)
    choice = program.graphs_choice
    assert choice == (issued.step_ms, replayed.step_ms)
    assert choice.replayed == slow
    assert replayed.idle_ms < 1e-3 <= issued.idle_ms or not slow
    said = "\n".join(map(str, summary(program)))
    assert ('launch(graphs="auto")' in said) == slow
    with program.launch(device="cpu", timeout=30, graphs="auto") as trainer:
        for _ in range(STEPS):
            trainer.step(batch)
    assert [recorder.replays for recorder in RecordedOps.made] == [STEPS - WARM_UP] * slow


def test_auto_asks_no_prediction_in_simulation(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """In simulation steps run as ever, and nothing is said."""
    batch = torch.randn(8, 6)
    asked: list[object] = []
    monkeypatch.setattr(graphs_auto, "predict", lambda *_: asked.append(_))
    program = shardc.compile(Normed(), batch, mesh="dp=1")
    with program.launch(graphs="auto") as trainer:
        trainer.step(batch)
    assert not asked
    assert not [warning for warning in recwarn if "SC518" in str(warning.message)]
    with pytest.raises(ShardcError, match=r"SC518.*graphs='always'") as failed:
        program.launch(graphs="always")  # type: ignore[arg-type]
    assert '"auto"' in str(failed.value)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("plan", [{}, {"hardware": "cpu-gloo"}])
def test_auto_wants_a_gpu_to_predict_for(plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    program = shardc.compile(Normed(), torch.randn(8, 6), mesh="dp=1", plan=plan)
    with pytest.warns(UserWarning, match="SC518.*the plan names no hardware that is a GPU"):
        trainer = program.launch(device="cpu", timeout=30, graphs="auto")
    trainer.close()
    assert not RecordedOps.made


def test_a_replayed_step_issues_no_collectives() -> None:
    """By tables of H200s the host takes some 30 us to begin one."""
    plan = {"inputs": {"x": "dp, -"}, "hardware": "h200", "fuse": False}
    program = shardc.compile(Normed(), torch.randn(8, 6), mesh="dp=2", plan=plan)
    issued, replayed = program.predict(), program.predict(graphs=True)
    assert issued.host_ms > 0.02
    assert replayed.host_ms < 1e-3
    assert replayed.step_ms < issued.step_ms


def test_what_is_never_captured() -> None:
    """Pipelines, `nonfinite: raise`, and experts whose rows the host counts."""
    step = shardc.compile(Normed(), torch.randn(8, 6), mesh="dp=1").staged
    assert not step_graph.is_never_captured(step, None)
    assert step_graph.is_never_captured(step, "raise")
    assert step_graph.is_never_captured(routed("ep2").staged, None)
    assert not step_graph.is_never_captured(routed("ep2", dispatch="all_gather").staged, None)
    deep = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plan = {"mesh": "pp=2", "pipeline": {"microbatches": 2}}
    pipelined = shardc.compile(deep, torch.randn(8, 6), plan=plan, loss=lambda y, _: y.square().mean())
    assert step_graph.is_never_captured(pipelined.staged, None)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("plan", [{"nonfinite": "raise"}, {}])
def test_auto_says_nothing_of_what_is_not_captured(
    plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """With `nonfinite: raise`, and on a CPU."""
    if plan:
        monkeypatch.setitem(step_graph.RECORDERS, "cpu", RecordedOps)  # type: ignore[arg-type]
    batch = torch.randn(8, 6)
    slow = {"hardware": HOSTS[True], "fuse": False, **plan}
    program = shardc.compile(Normed(), batch, mesh="dp=1", plan=slow)
    assert program.graphs_choice.replayed
    with program.launch(device="cpu", timeout=30, graphs="auto") as trainer:
        trainer.step(batch)
    assert not [warning for warning in recwarn if "SC518" in str(warning.message)]
