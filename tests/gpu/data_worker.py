"""What one rank of `tests/gpu/test_data.py` does: `python data_worker.py FOLDER`, under torchrun."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.device_copy import Copied
from shardc.runtime.train.trainer import Trainer

RANK, WORLD, FOLDER = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
STEPS, ROWS = 8, 512


class Model(nn.Module):
    """Some 30 ms of products on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 4096)
        self.layers = nn.ModuleList(nn.Linear(4096, 4096) for _ in range(4))
        self.head = nn.Linear(4096, 64)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Loader:
    """Batches of this data rank. `busy` says of each but an epoch's first whether a step was being computed when it was
    fetched."""

    def __init__(self, trainer: Trainer, bad: int = -1) -> None:
        self.rank, self.ranks, self.bad = trainer.data_rank, trainer.data_ranks, bad
        self.busy: list[bool] = []

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for step in range(STEPS):
            if step:
                self.busy.append(not torch.cuda.current_stream().query())
            generator = torch.Generator().manual_seed(10 * step + self.rank)
            ids = torch.randint(64, (ROWS // self.ranks, 32), generator=generator)
            labels = ids.roll(1, 1).masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
            if step == self.bad:
                ids[3, 5] = 64
            yield {"ids": ids, "labels": labels}


def main() -> None:
    mesh = f"dp={WORLD}"
    model = Model()
    sample = {name: torch.zeros(ROWS, 32, dtype=torch.long) for name in ("ids", "labels")}
    plan = {"inputs": {"ids": "dp, -"}, "data": "per_rank", "accumulate": 2, "loss": {"tokens": "labels"}}
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    found: dict[str, Any] = {}
    program = shardc.compile(model, sample, mesh=mesh, plan=plan, optimizer=optimizer)
    for prefetch in (False, True):
        with program.launch(timeout=60, device="cuda") as trainer:
            fed: list[str] = []
            step = trainer.step
            trainer.step = lambda batch, step=step, fed=fed: (fed.append(type(batch).__name__), step(batch))[1]  # type: ignore[method-assign]
            loader = Loader(trainer)
            run = trainer.train(loader, epochs=2, progress=False, prefetch=prefetch)
            losses = [metrics.loss for metrics in run]
            state = {name: float(x.double().abs().sum()) for name, x in trainer.state_dict().items()}
            found[str(prefetch)] = {"losses": losses, "busy": loader.busy, "fed": sorted({*fed}), "state": state}
    assert Copied.__name__ == "Copied"
    try:
        with program.launch(timeout=60, device="cuda") as trainer:
            for _ in trainer.train(Loader(trainer, bad=2), epochs=1, progress=False):
                pass
    except ShardcError as wrong:
        found["bad"] = [wrong.code, str(wrong)]
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


main()
