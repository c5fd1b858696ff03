"""One rank of `test_cached.py`: of two, one takes its program from the disk, and the other compiles."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardc

RANK = int(os.environ["RANK"])
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("dp=2", {"inputs": {"*": "dp"}, "storage": {"zero": 3, "axes": ["dp"]}}),
    "tensor": ("tp=2", {"params": {"up.weight": "tp, -"}, "precision": "bf16"}),
    "pipeline": ("pp=2", {"pipeline": {"stages": 2, "microbatches": 2}}),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(8, 16), nn.Linear(16, 4), nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.dropout(self.up(x).relu()))
        self.seen = self.seen + y.detach().mean(0)
        return y.square().mean()


def job(name: str, cache: Path | None) -> dict[str, Any]:
    """What became of the cache, and the losses of some steps and an evaluation."""
    os.environ["SHARDC_CACHE"] = "off" if cache is None else str(cache)
    torch.manual_seed(0)
    model, (mesh, plan) = Model(), PLANS[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    program = shardc.compile(
        model, torch.randn(4, 8), mesh=mesh, plan={"clip_grad_norm": 1.0, **plan}, optimizer=optimizer
    )
    trainer = program.launch(seed=0, timeout=30)
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    losses = [float(trainer.step(batch).loss) for batch in batches]
    return {"cached": program.cached, "losses": [*losses, float(trainer.evaluate(batches[:1]).loss)]}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[2])
    first, second = folder / "first", folder / "second"
    turns: dict[str, Callable[[], Path | None]] = {
        "compiled": lambda: None,
        "stored": lambda: first if RANK == 0 else None,
        "one has it": lambda: first if RANK == 0 else second,  # as of a home that is another on each host
        "one is off": lambda: second if RANK == 1 else None,
        "both have it": lambda: first,
    }
    results = {name: {turn: job(name, cache()) for turn, cache in turns.items()} for name in PLANS}
    (folder / f"{RANK}.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


main()
