"""torchrun ends the survivors of a dead rank itself: they still say who died, and where, before they go."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).parent / "worker.py"
LIMIT = 8.0  # as in worker.py
ENDING = 12.0  # what torchrun itself takes to notice and to report, on a busy machine; it kills after 30


def torchrun(scenario: str, ranks: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [*command, str(WORKER), scenario, str(folder)],
        env=env | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def end_of(job: subprocess.Popen[str], folder: Path) -> tuple[str, float]:
    """What a job said, and how many seconds after its last rank broke it was over."""
    try:
        _, said = job.communicate(timeout=90)
    finally:
        job.kill()
    return said, time.time() - float((folder / "broke_at").read_text())


@pytest.mark.long  # in forked ranks, `test_gloo.py` shows it
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    """How ranks that were not waiting for it learn of it, `test_gloo.py` shows on four."""
    job = torchrun("dead", 2, tmp_path)
    said, seconds = end_of(job, tmp_path)
    assert job.returncode != 0
    assert said.count("error[SC502 dead-rank]: rank 1 died, without an error of its own") == 1, said
    assert "rank 0 was waiting for it in instruction %proj.all_reduce" in said
    assert "rank 1 last said that it was at instruction %fc.mm (mlp.py:5) of step 1" in said
    assert seconds < LIMIT + ENDING, said


@pytest.mark.long  # in forked ranks, `test_gloo.py` shows it
def test_a_rank_that_fails_of_itself_is_named(tmp_path: Path) -> None:
    job = torchrun("own", 2, tmp_path)
    said, seconds = end_of(job, tmp_path)
    assert job.returncode != 0
    assert "[rank1]: MemoryError: no memory for relu" in said
    assert "in instruction %act (mlp.py:6), on rank 1" in said
    assert "error[SC502 dead-rank]: rank 1 died, of an error of its own: MemoryError: no memory for relu" in said
    assert seconds < LIMIT + ENDING, said


@pytest.mark.long  # in forked ranks, `test_gloo.py` shows it
def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    job = torchrun("stuck", 2, tmp_path)
    said, seconds = end_of(job, tmp_path)
    assert job.returncode != 0
    assert "error[SC503 timeout]: rank 1 did not come to instruction %proj.all_reduce" in said
    assert "SC502" not in said
    # Rank 1 sleeps in the main thread; that does not keep SIGTERM from ending it.
    assert seconds < LIMIT + ENDING, said


def test_a_job_that_is_ended_blames_nobody(tmp_path: Path) -> None:
    job = torchrun("stuck", 2, tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "broke_at").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    told = time.time()
    job.send_signal(signal.SIGTERM)
    said, _ = end_of(job, tmp_path)
    assert "SC50" not in said
    assert time.time() - told < ENDING, said
