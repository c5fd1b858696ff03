"""What one rank of `test_shapes.py` does: `python shapes_worker.py CASE FOLDER`.

It trains on batches of several shapes; or one rank is given another shape than the others, at several points of a run.
"""

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError

CASE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
TP = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
DP = {"input_ids": "dp, -", "labels": "dp, -"}
ZERO = {"zero": 3, "axes": ["dp"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {"inputs": DP, "storage": ZERO}),
    "dp2tp2": ("dp=2, tp=2", {"params": TP, "inputs": DP, "storage": ZERO}),
    "pp2tp2": ("pp=2, tp=2", {"params": TP, "pipeline": {"microbatches": 4}}),
}
SHAPES = [(8, 8), (5, 12), (8, 8), (5, 12)]  # rows, and tokens of each
LIMIT = 60.0


def model_and_batches() -> tuple[torch.nn.Module, list[dict[str, torch.Tensor]]]:
    model, _ = gpt2(layers=2, batch=8, vocab=64, seq=12, width=32)
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, shape, generator=generator) for shape in SHAPES]
    return model, [{"input_ids": t, "labels": t} for t in tokens]


def trains() -> dict[str, Any]:
    mesh, plan = CASES[CASE]
    model, batches = model_and_batches()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    program = shardc.compile(model, batches[0], mesh=mesh, plan=plan, optimizer=optimizer)
    with program.launch(timeout=LIMIT) as trainer:
        losses = [float(trainer.step(batch).loss) for batch in batches]
        evaluated = trainer.evaluate(batches[1:2]).loss
        norms = {name: float(value.double().norm()) for name, value in trainer.state_dict().items()}
    return {"losses": losses, "evaluated": evaluated, "norms": norms}


def differs() -> dict[str, Any]:
    """Rank 1 brings 4 rows, and rank 0 all 8: in the first step, later without checks, and where both are known."""
    _, batch = gpt2(layers=1, batch=8, vocab=64, seq=8, width=32)
    model, _ = gpt2(layers=1, batch=8, vocab=64, seq=8, width=32)
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": DP})
    short = {name: tokens[:4] for name, tokens in batch.items()}
    said: dict[str, Any] = {}
    for what, before, check_every in (("first", [], 100), ("known", [batch, short], 0), ("new", [batch], 0)):
        trainer = program.launch(timeout=LIMIT, check_every=check_every)
        for given in before:
            trainer.step(given)
        start = time.monotonic()
        try:
            trainer.step(short if RANK else batch)
        except ShardcError as wrong:
            said[what] = [
                wrong.code,
                wrong.diagnostics[0].message,
                wrong.diagnostics[0].cause,
                time.monotonic() - start,
            ]
            trainer.close(wrong if what == "new" else None)
    return said


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    (FOLDER / f"{RANK}.json").write_text(json.dumps(differs() if CASE == "differs" else trains()))
