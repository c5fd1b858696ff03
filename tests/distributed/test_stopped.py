"""A rank that is killed or stopped, at every point of a job: the others end within their bound, and say who it was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, start
from tests.ports import free_port

WORKER = Path(__file__).parent / "stopped_worker.py"
ENDING = Path(__file__).parent / "ending_worker.py"
LIMIT = 10.0  # as in the worker
SLACK = 6.0  # of a busy machine
POINTS = ["comparison 0", "comparison 1", "step 0", "step 1", "step 5", "gathered"]


@pytest.mark.parametrize("how", ["dead", pytest.param("stuck", marks=pytest.mark.long)])
@pytest.mark.parametrize("point", [pytest.param(p, marks=[] if p == "step 1" else [pytest.mark.long]) for p in POINTS])
def test_the_others_name_the_rank(point: str, how: str, tmp_path: Path) -> None:
    (tmp_path / "point").write_text(point)
    first, last = start(how, 2, tmp_path, worker=WORKER)
    assert last is None
    assert first is not None
    assert first["error"] is not None
    assert first["code"] == "SC502"
    assert "rank 1 died" in first["error"]
    assert first["seconds"] < LIMIT + SLACK


@pytest.mark.long
def test_a_rank_that_does_not_come_is_an_error_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "point").write_text("compiled")
    first, last = start("dead", 2, tmp_path, worker=WORKER)
    assert last is None
    assert first is not None
    assert first["code"] == "SC543"
    assert "did not come to the launch" in first["error"]
    assert first["seconds"] < LIMIT + SLACK


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["raised", "open"])
def test_a_process_that_fails_exits_as_python_does(how: str) -> None:
    """Not by SIGABRT: no thread of ours is in the store's C++ when Python finalizes."""
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    environment = os.environ | job | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ENDING), how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == (1 if how == "raised" else 0), ended.stderr
    assert "terminate called" not in ended.stderr
    assert ("ValueError: the batch is bad" in ended.stderr) == (how == "raised")
