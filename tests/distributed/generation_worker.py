"""What one rank of `test_generation.py` does: `python generation_worker.py CASE FOLDER`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardc
from examples.gpt2 import gpt2
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.generate.row_cache import RowCache
from shardc.runtime.generate.steps import empty_cache
from tests.runtime.generating import DP, GPT2, LIMITS, MORE, PROMPTS, SAMPLED, spread

CASE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2tp2": ("dp=2, tp=2", {"params": GPT2, "inputs": DP}),
    "pp2tp2": ("pp=2, tp=2", {"params": GPT2, "pipeline": {"microbatches": 2}}),
    "zero3": ("dp=2", {"inputs": DP, "storage": {"zero": 3, "axes": ["dp"]}}),
}
CONTINUOUS: dict[str, Any] = {"mesh": "dp=2, tp=2", "plan": {"params": GPT2, "inputs": DP}, "mode": "eval"}
SENDS = ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce_scatter_tensor", "isend")


def differs() -> dict[str, Any]:
    """One rank is given other prompts, and then another seed: an error on all, which says so."""
    model, batch = gpt2(batch=4, seq=8, vocab=96, width=32)
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": DP}, mode="eval")
    said: dict[str, Any] = {}
    for what in ("prompts", "settings"):
        with program.launch(timeout=60.0) as trainer:
            prompts = [[1, 2], [3 if what == "prompts" and RANK else 4]]
            try:
                trainer.generate(prompts, 2, seed=RANK if what == "settings" else 0)
            except ShardcError as wrong:
                said[what] = [wrong.code, wrong.diagnostics[0].tensor or wrong.diagnostics[0].message]
    return said


def streams() -> dict[str, Any]:
    """Prompts join while others go on. Ranks that are given another prompt on the way are named."""
    model, batch = gpt2(batch=4, seq=8, vocab=96, width=32)
    program = shardc.compile(spread(model), batch, **CONTINUOUS)
    communicated: list[str] = []
    sends = {name: getattr(dist, name) for name in SENDS}
    join = RowCache.join

    def joined(cache: RowCache, *arguments: Any) -> None:
        for name, send in sends.items():
            setattr(dist, name, lambda *a, name=name, send=send, **k: (communicated.append(name), send(*a, **k))[1])
        join(cache, *arguments)
        for name, send in sends.items():
            setattr(dist, name, send)

    RowCache.join = joined  # type: ignore[method-assign]
    said: list[str] = []
    with program.launch(timeout=60.0) as trainer:
        found = trainer.generate(MORE, LIMITS, rows=3, eos_token_id=[], pad_token_id=0)
        stream = trainer.generate_stream(iter(MORE), 9, rows=4, **SAMPLED)
        sampled = {finished.prompt: list(finished.tokens) for finished in stream}
        wrong = ([1, 2], [5 if RANK == 1 else 4])
        try:
            list(trainer.generate_stream(iter(wrong), 4, rows=1, eos_token_id=[]))
        except ShardcError as differs:
            said = [differs.code, differs.diagnostics[0].message]
        caches = [programs.decode for programs in trainer._generator.programs._by_row.values()]
        held = [sum(t.numel() for t in empty_cache(decode).values()) for decode in caches]
        forms = [(form.rows, form.length) for form in trainer._generator.programs._by_row]
    return {
        "tokens": [list(row) for row in found.tokens],
        "sampled": [sampled[number] for number in range(len(MORE))],
        "said": said,
        "communicated": communicated,
        "held": held,
        "forms": forms,
    }


def run() -> dict[str, Any]:
    mesh, plan = CASES[CASE]
    model, batch = gpt2(layers=1 if CASE == "dp2tp2" else 2, batch=4, seq=8, vocab=96, width=32)
    spread(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-4)
    program = shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer)
    with program.launch(timeout=60.0) as trainer:
        before = trainer.generate(PROMPTS, 12, eos_token_id=[], pad_token_id=0)
        ready = next(iter(trainer._generator.programs._pairs.values()))
        cache = ready.cache()
        kept = {name: tensor.data_ptr() for name, tensor in cache.items()}
        ready.decode.run(ready.decode.state(trainer.engine, trainer._inputs, trainer.state), cache, _token(), 0)
        sampled = trainer.generate(PROMPTS, 12, **SAMPLED)
        losses = [float(trainer.step(batch).loss) for _ in range(2)]
        after = trainer.generate(PROMPTS, 12, eos_token_id=[], pad_token_id=0)
        whole = trainer.state_dict()
    torch.save(whole, FOLDER / f"weights.{RANK}.pt")
    return {
        "before": before.sequences.tolist(),
        "sampled": sampled.sequences.tolist(),
        "after": after.sequences.tolist(),
        "losses": losses,
        "held": sum(tensor.numel() for tensor in cache.values()),
        "moved": [name for name, tensor in cache.items() if tensor.data_ptr() != kept[name]],
    }


def _token() -> dict[str, torch.Tensor]:
    rows = len(PROMPTS)
    column = torch.zeros(rows, 1, dtype=torch.int64)
    mask = torch.ones(rows, 32, dtype=torch.int64)
    return {"tokens": column, "positions": column, "length": torch.tensor(3), "mask": mask}


ACTS = {"differs": differs, "streams": streams}
(FOLDER / f"{RANK}.json").write_text(json.dumps(ACTS.get(CASE, run)()))
