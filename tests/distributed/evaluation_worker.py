"""What one rank of `test_evaluation.py` does: `python evaluation_worker.py CASE FOLDER`.

It compiles its own program, trains a step, evaluates between two steps, and compares what it gets with the eager model
on the weights that the trainer has then.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError

CASE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
TP = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
DP = {"input_ids": "dp, -", "labels": "dp, -"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2tp2": ("dp=2, tp=2", {"params": TP, "inputs": DP}),
    "zero3": ("dp=2", {"inputs": DP, "storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2tp2": ("pp=2, tp=2", {"params": TP, "pipeline": {"microbatches": 4}}),
    "interleaved": ("pp=2", {"pipeline": {"microbatches": 4, "schedule": "interleaved"}}),
}
LAYERS = {"interleaved": 4}  # others have 2


class Scored(nn.Module):
    """GPT-2 that also says how often it is right: a scalar that no loss needs."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output = self.inner(input_ids=input_ids, labels=labels)
        right = (output.logits[:, :-1].argmax(-1) == labels[:, 1:]).float().mean()
        return {"loss": output.loss, "logits": output.logits, "accuracy": right}


def differs() -> dict[str, Any]:
    """One rank evaluates another batch, and then one of another shape: an error on all, which says so."""
    model, batch = gpt2(layers=1, batch=8, vocab=64, seq=8, width=32)
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": DP})
    said: dict[str, Any] = {}
    for what, others in (("values", batch["input_ids"].flip(0)), ("shape", batch["input_ids"][:4])):
        trainer = program.launch(timeout=60.0)
        tokens = others if RANK else batch["input_ids"]
        try:
            trainer.evaluate([{"input_ids": tokens, "labels": tokens}])
        except ShardcError as wrong:
            said[what] = [wrong.code, wrong.diagnostics[0].message]
        trainer.close()
    return said


def run() -> dict[str, Any]:
    mesh, plan = CASES[CASE]
    inner, batch = gpt2(layers=LAYERS.get(CASE, 2), batch=8, vocab=64, seq=8, width=32)
    model = Scored(inner)
    short = {name: tokens[:4].flip(1) for name, tokens in batch.items()}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    program = shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer)
    with program.launch(timeout=60.0) as trainer:
        losses = [float(trainer.step(batch).loss)]
        evaluated = trainer.evaluate([batch, short])
        output = trainer.predict(batch).outputs["logits"]
        logits = output.full()
        held = 0 if output.local is None else output.local.numel()
        whole = trainer.state_dict()
        losses.append(float(trainer.step(batch).loss))
        again = trainer.evaluate([batch]).loss
    model.load_state_dict(whole)
    model.eval()
    with torch.no_grad():
        exact = [model(**given) for given in (batch, short)]
    weights = torch.tensor([2 / 3, 1 / 3])
    mean = {key: float((torch.stack([one[key] for one in exact]) * weights).sum()) for key in ("loss", "accuracy")}
    return {
        "losses": losses,
        "again": again,
        "loss": [evaluated.loss, mean["loss"]],
        "accuracy": [evaluated.scalars["accuracy"], mean["accuracy"]],
        "logits": float((logits - exact[0]["logits"]).abs().max() / exact[0]["logits"].abs().max()),
        "shape": list(logits.shape),
        "held": held,
    }


(FOLDER / f"{RANK}.json").write_text(json.dumps(differs() if CASE == "differs" else run()))
