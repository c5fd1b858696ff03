"""A rank that is killed or stopped, at every point of a job: the others end within their bound, and say who it was."""

from pathlib import Path

import pytest

from tests.distributed.ranks import start

WORKER = Path(__file__).parent / "stopped_worker.py"
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
