"""Imported by the server of `ranks.py` before it forks: what a first compile and a first step import and build, ranks
then have. Forked without it, each of four ranks spends two seconds on that.
"""

import atexit
import gc

import torch
from torch import Tensor, nn
from tqdm import tqdm

import shardc

tqdm.monitor_interval = 0  # its thread would not outlive a fork


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(8, 4), nn.LayerNorm(4), nn.Linear(4, 8)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.norm(self.embed(ids))))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def warm() -> None:
    model, ids = Model(), torch.zeros(4, 4, dtype=torch.int64)
    plans: dict[str, dict[str, object]] = {
        "dp=2, tp=2": {"params": {"head.weight": "tp, -"}, "inputs": {"ids": "dp, -", "labels": "dp, -"}},
        "pp=2, dp=2": {"pipeline": {"microbatches": 2}},
    }
    for mesh, plan in plans.items():
        optimizer = torch.optim.AdamW(model.parameters())
        program = shardc.compile(model, {"ids": ids, "labels": ids}, mesh=mesh, plan=plan, optimizer=optimizer)
        with program.launch() as trainer:
            trainer.step({"ids": ids, "labels": ids})
            trainer.evaluate([{"ids": ids, "labels": ids}])


if not torch.backends.cuda.is_built():  # there autograd starts threads, which do not outlive a fork
    with torch.random.fork_rng():
        warm()
gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # what is kept at the end, some libraries take for a leak
