"""One rank of a job over machines: trains over all ranks that there are, from the newest checkpoint on.

torchrun ... machines_worker.py FOLDER          writes FOLDER/losses: step, ranks, loss, as it goes
"""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import shardc

STEPS = 10


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.relu(self.up(x)), 0.2)).square().mean()


def batches() -> Iterator[dict[str, Tensor]]:
    for step in range(STEPS):
        yield {"x": torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))}


def program(ranks: int) -> shardc.Program:
    torch.manual_seed(0)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    plan = {"inputs": {"x": "dp"}, "clip_grad_norm": 1.0, "seed": 7}
    return shardc.compile(model, next(batches()), mesh=f"dp={ranks}", plan=plan, optimizer=optimizer)


def main() -> None:
    torch.set_num_threads(1)
    folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (folder / f"pid.{os.environ['GROUP_RANK']}").write_text(str(os.getpid()))
    with program(ranks).launch(timeout=20) as trainer:
        for metrics in trainer.train(batches(), STEPS, checkpoint=folder / "run", every=1, progress=False):
            if rank == 0:
                with (folder / "losses").open("a") as file:
                    file.write(f"{metrics.step} {ranks} {metrics.loss!r}\n")
            time.sleep(0.3)  # long enough to be killed in between


if __name__ == "__main__":
    main()
