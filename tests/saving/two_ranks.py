"""A sharded saving of two ranks, one of which comes to harm at a call.

`python two_ranks.py FOLDER STRIDE RANK:FAULT...`, under `disk_faults.c`, as `worker.py`, whose report it writes. A
killed rank's survivor names it within its bound; a full disk of one rank is an error of both. The older checkpoint, or
the new one, is whole, and the next job goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # once, not in every rank
import torch.distributed.checkpoint

from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.partition.staged_program import one_stage
from shardc.runtime.train.trainer import Trainer, launch
from tests.handmade import mlp, mlp_inputs
from tests.ports import free_port
from tests.saving.disk_faults import Disk, Fault
from tests.saving.worker import copied, equal, names

LIMIT, SLACK = 8.0, 6.0  # seconds: of a collective, and of a busy machine
BODY = mlp(mesh=Mesh(dp=1, tp=2))


def launched(timeout: float = LIMIT) -> Trainer:
    return launch(SimpleNamespace(staged=one_stage(BODY), model=None, constants=mlp_inputs()), timeout=timeout)


def stepped(trainer: Trainer) -> None:
    trainer.step({"x": mlp_inputs()["x"]})
    trainer.sgd(1e-3)


def rank_of_job(folder: Path, rank: int, harmed: int, fault: Fault, number: int) -> dict[str, Any]:
    """Save step 0, then step 1 with the fault on one of the ranks."""
    disk, started, result = Disk(), 0.0, dict[str, Any]()
    try:
        with launched() as trainer:
            trainer.save(folder / "ck")
            stepped(trainer)
            disk.arm(folder, fault if rank == harmed else Fault.COUNT, number)
            started = time.monotonic()
            trainer.save(folder / "ck")
    except ShardcError as failure:
        result = {"code": failure.code, "message": str(failure)}
    return {**result, "seconds": time.monotonic() - started, "calls": disk.disarm()}


def job(folder: Path, harmed: int, fault: Fault, number: int) -> list[dict[str, Any] | None]:
    """What each of the two ranks says; None of one that was killed."""
    shutil.rmtree(folder, ignore_errors=True)
    work = folder / "work"
    work.mkdir(parents=True)
    port = free_port()
    ranks: list[int] = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1]:
            continue
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        os.environ.update({**place, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        try:
            said = rank_of_job(work, rank, harmed, fault, number)
        except BaseException:
            said = {"raised": traceback.format_exc()}
        (folder / f"{rank}.json").write_text(json.dumps(said))
        os._exit(0)
    for rank in ranks:
        os.waitpid(rank, 0)
    results = [folder / f"{rank}.json" for rank in range(2)]
    return [json.loads(path.read_text()) if path.exists() else None for path in results]


def check(
    folder: Path, reader: Trainer, states: list[dict[str, torch.Tensor]], harmed: int, fault: Fault, number: int
) -> None:
    """Raises AssertionError for what the ranks must not say, and for what must not be so afterwards."""
    said = job(folder, harmed, fault, number)
    other, own = said[1 - harmed], said[harmed]
    assert other is not None
    for one in filter(None, said):
        assert "raised" not in one, one["raised"]
        assert one["seconds"] < LIMIT + SLACK, one
    path = folder / "work/ck"
    if fault is Fault.KILL:
        assert own is None, own
        if "code" in other or harmed == 1:  # else rank 0 died when all was done
            assert other["code"] == "SC502", other
            assert f"rank {harmed} died" in other["message"], other
    else:
        assert own is not None
        assert own.get("code") == other.get("code"), said
        if "code" in own:
            assert own["code"] == "SC408", own
            assert f"on rank {harmed}, " in own["message"], own
            assert own["message"] == other["message"], said
            assert str(path) in own["message"], own
    reader.load(path)
    wrote = fault is not Fault.KILL and "code" not in other
    assert reader.steps in ({1} if wrote else {0, 1}), reader.steps
    assert equal(reader.state, states[reader.steps])
    with launched() as next_job:
        next_job.load(path)
        stepped(next_job)
        next_job.save(path)
    assert names(path.parent) == {"ck"}, names(path.parent)
    before = reader.steps
    reader.load(path)
    assert reader.steps == before + 1
    assert equal(reader.state, states[reader.steps])


def main() -> None:
    torch.set_num_threads(1)
    folder, stride = Path(sys.argv[1]), int(sys.argv[2])
    harms = [(int(rank), Fault[fault]) for rank, _, fault in (harm.partition(":") for harm in sys.argv[3:])]
    reader, trainer = launched(), launched()
    states = [copied(trainer)]
    for _ in range(2):
        stepped(trainer)
        states.append(copied(trainer))
    whole = job(folder / "job", 0, Fault.COUNT, 0)
    calls = [one["calls"] for one in whole if one is not None]
    report: dict[str, Any] = {"calls": dict(enumerate(calls)), "tried": 0, "wrong": []}
    for rank, fault in harms:
        for number, call in list(enumerate(calls[rank]))[(int(fault) + rank) % stride :: stride]:
            report["tried"] += 1
            try:
                check(folder / "job", reader, states, rank, fault, number)
            except Exception as wrong:
                what = "".join(traceback.format_exception(wrong)[-2:])[-1500:]
                report["wrong"].append(f"rank {rank}, {fault.name} at {number} ({call}): {what}")
    (folder / "report.json").write_text(json.dumps(report))
    os._exit(0)


if __name__ == "__main__":
    main()
