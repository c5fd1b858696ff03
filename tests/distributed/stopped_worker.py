"""A rank that dies or is stopped at a point of a job: `python stopped_worker.py dead|stuck FOLDER`.

`FOLDER/point` names the point; the other ranks write what they are told, and how long it took.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import shardc
from shardc.runtime.train.replicas import Item, Peers

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
LIMIT = 10.0  # seconds


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    point, reached = (folder / "point").read_text(), 0

    def arrive(at: str) -> None:
        if RANK == WORLD - 1 and at == point:
            os.kill(os.getpid(), signal.SIGKILL if sys.argv[1] == "dead" else signal.SIGSTOP)

    compare = Peers.check

    def check(peers: Peers, items: list[Item], when: str, *, launching: bool = False) -> None:
        nonlocal reached
        arrive(f"comparison {reached}")
        reached += 1
        compare(peers, items, when, launching=launching)

    Peers.check = check  # type: ignore[method-assign]
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    program = shardc.compile(Model(), x, mesh=f"dp={WORLD}", plan={"inputs": {"x": "dp"}})
    arrive("compiled")
    started = time.monotonic()
    found: dict[str, object] = {"error": None}
    try:
        trainer = program.launch(timeout=LIMIT)
        for step in range(6):
            arrive(f"step {step}")
            started = time.monotonic()
            trainer.step(x)
            trainer.sgd(0.1)
        arrive("gathered")
        started = time.monotonic()
        trainer.save(folder / "saved")
    except shardc.ShardcError as failure:
        found = {"error": str(failure), "code": failure.code}
    found["seconds"] = time.monotonic() - started
    (folder / f"{RANK}.json").write_text(json.dumps(found))
    os._exit(0)


main()
