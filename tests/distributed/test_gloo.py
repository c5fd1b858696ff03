"""Real processes over gloo: collectives equal the simulation's, training does, and a dead rank is named in time."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from shardc.ir.diagnostic import ShardcError
from shardc.partition.staged_program import one_stage
from shardc.runtime.train.trainer import launch
from tests.distributed.ranks import start
from tests.handmade import mlp, mlp_inputs

LIMIT = 8.0  # as in worker.py


def test_collectives_equal_the_simulation(tmp_path: Path) -> None:
    found = start("collectives", 4, tmp_path)
    assert found == [{"checked": 72, "prepared": 20}] * 4


def test_training_equals_the_simulation(tmp_path: Path) -> None:
    inputs = mlp_inputs(batch=3, width=13)
    save_file({"w1": inputs["w1"]}, tmp_path / "weights.safetensors")
    found = start("train", 4, tmp_path)
    body = mlp(batch=3, width=13)
    losses = []
    with launch(SimpleNamespace(staged=one_stage(body)), state=inputs) as trainer:
        for _ in range(4):
            losses.append(float(trainer.step({"x": inputs["x"]}).loss))
            trainer.sgd(1e-3)
        grads = {name: float(grad.double().sum()) for name, grad in trainer.gather_grads().items()}
        state = trainer.state_dict()
    assert losses[-1] < losses[0]
    assert int(state["steps"]) == 4
    for one in found:
        assert one is not None
        assert one["losses"] == pytest.approx(losses, rel=1e-6)
        assert one["grads"] == pytest.approx(grads, rel=1e-5)
        # A rank holds 7 of 13 columns and rows, and never made more than it was asked for: w1 came from the file.
        assert one["held"] == {"w1": [8, 7], "w2": [7, 8], "steps": []}
        assert one["bytes"] == 2 * 8 * 7 * 4
        assert one["made"] == ["w2"]
    gathered = torch.load(tmp_path / "state.pt")
    for name, value in state.items():
        torch.testing.assert_close(gathered[name], value, rtol=1e-6, atol=1e-6)


def test_a_process_launches_again(tmp_path: Path) -> None:
    """Also when one rank is early: it must not find the other where that was at an earlier launch."""
    first, second = start("again", 2, tmp_path)
    assert first is not None
    assert first == second
    assert len(first["losses"]) == 6
    assert len(set(first["losses"])) == 1


def test_a_launch_that_a_rank_missed_is_no_launch(tmp_path: Path) -> None:
    first, second = start("missed", 2, tmp_path)
    assert first is not None
    assert second is not None
    assert first["codes"] == ["SC543"]
    assert second["codes"] == []
    assert first["trained"] == second["trained"] == 3


def test_a_dead_rank_is_named(tmp_path: Path) -> None:
    *survivors, dead = start("dead", 4, tmp_path)
    assert dead is None
    for one in survivors:
        assert one is not None
        assert one["code"] == "SC502", one
        assert "rank 3 died" in one["error"]
        assert "in instruction %" in one["error"]
        assert "rank 3 last said that it was at instruction %fc.mm (mlp.py:5) of step 1" in one["error"]
        assert one["seconds"] < LIMIT


def test_a_rank_that_fails_of_itself_is_named(tmp_path: Path) -> None:
    survivor, failed = start("own", 2, tmp_path)
    assert failed is not None
    assert survivor is not None
    assert failed["own"] == "no memory for relu"
    assert failed["notes"] == ["in instruction %act (mlp.py:6), on rank 1"]
    assert survivor["code"] == "SC502"
    assert "rank 1 died, of an error of its own: MemoryError: no memory for relu" in survivor["error"]
    assert survivor["seconds"] < LIMIT


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    survivor, _ = start("stuck", 2, tmp_path)
    assert survivor is not None
    assert survivor["code"] == "SC503", survivor
    assert "rank 1 did not come to instruction %proj.all_reduce" in survivor["error"]
    assert "rank 1 is alive, at instruction %act (mlp.py:6) of step 1" in survivor["error"]
    assert survivor["seconds"] < LIMIT


def test_another_number_of_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    body = mlp()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShardcError, match="the job has 2 ranks, the program's mesh") as caught:
        launch(SimpleNamespace(staged=one_stage(body)), state=mlp_inputs())
    assert caught.value.code == "SC506"
