"""What one rank of `test_optimizers.py` does: `python optimizer_worker.py CASE FOLDER`.

It trains by Muon beside AdamW, unfreezes a layer in the middle, keeps a moving average, saves, and goes on in a second
trainer from the checkpoint; then it says what it has.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc

CASE, FOLDER = (sys.argv[1], Path(sys.argv[2])) if len(sys.argv) > 2 else ("", Path())
BATCH: dict[str, Any] = {"inputs": {"x": "dp, -"}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2tp2": (
        "dp=2, tp=2",
        BATCH | {"params": {"layers.*.weight": "tp, -"}, "storage": {"zero": 1, "axes": ["dp"]}, "clip_grad_norm": 0.1},
    ),
    "zero3": ("dp=2", BATCH | {"storage": {"zero": 3, "axes": ["dp"]}, "bucket": True}),
    "pp2": ("pp=2", {"pipeline": {"microbatches": 2, "split": ["layers.2"]}, "clip_grad_norm": 0.1}),
}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def built() -> tuple[Layers, list[torch.optim.Optimizer], list[Tensor]]:
    torch.manual_seed(0)
    model = Layers()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim == 1]
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 8, generator=draw) for _ in range(4)]
    return model, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-2, eps=1e-3)], batches


def launched(model: Layers, optimizers: Any, batch: Tensor) -> shardc.Trainer:
    mesh, plan = CASES[CASE]
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizers).launch(timeout=60.0)


def run() -> dict[str, Any]:
    model, optimizers, batches = built()
    with launched(model, optimizers, batches[0]) as trainer:
        shardc.EMA(trainer, 0.7)
        losses = [float(trainer.step(batches[0]).loss)]
        model.layers[0].requires_grad_(True)
        trainer.recompile()
        losses.append(float(trainer.step(batches[1]).loss))
        trainer.save(FOLDER / "run")
    with launched(model, optimizers, batches[0]) as trainer:
        ema = shardc.EMA(trainer, 0.7)
        trainer.load(FOLDER / "run")
        losses += [float(trainer.step(batch).loss) for batch in batches[2:]]
        averages = {name: t.tolist() for name, t in ema.state_dict().items()}
        weights = {name: t.tolist() for name, t in trainer.state_dict().items()}
        momenta = [n for n in trainer.state if n.endswith("momentum_buffer")]
        held = sum(trainer.state[name].numel() for name in momenta)
    return {"losses": losses, "averages": averages, "weights": weights, "held": held}


if __name__ == "__main__":
    (FOLDER / f"{os.environ['RANK']}.json").write_text(json.dumps(run()))
