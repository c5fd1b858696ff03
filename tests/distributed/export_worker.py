"""A rank of the tests in `test_export.py`: a meta-device Llama from a folder, in real processes, and back into one."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaForCausalLM

import shardc
from shardc.ir.diagnostic import ShardcError

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[2])
PARAMS = {
    "**.embed_tokens.weight": "tp, -",
    **{f"**.{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")},
    "lm_head.weight": "tp, -",
}
BATCH = {"input_ids": "dp, -", "labels": "dp, -"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("dp=2, tp=2", {"params": PARAMS, "inputs": BATCH, "storage": {"zero": 3, "axes": ["dp"]}}),
    "pipeline": ("pp=2, tp=2", {"params": PARAMS, "pipeline": {"axis": "pp", "microbatches": 2}}),
}


def story(layout: str) -> dict[str, Any]:
    mesh, plan = LAYOUTS[layout]
    with torch.device("meta"):
        model = LlamaForCausalLM(AutoConfig.from_pretrained(FOLDER / "in"))
    batch = torch.load(FOLDER / "batch.pt")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    program = shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer)
    out = FOLDER / f"out-{layout}"
    with program.launch(state=FOLDER / "in", timeout=60.0) as trainer:
        trainer.export_hf(out / "started", FOLDER / "in", max_shard_size="20KB")
        losses = [float(trainer.step(batch).loss) for _ in range(2)]
        state = trainer.state_dict()
        trainer.export_hf(out / "trained", max_shard_size="20KB")
        refusals: list[str] = []
        # On one rank only: each fails there, and so on every rank.
        other = LlamaForCausalLM(AutoConfig.from_pretrained(FOLDER / "in")) if RANK else torch.nn.Linear(2, 2)
        for act in (
            lambda: trainer.sync_to(other),
            lambda: trainer.export_hf(FOLDER / "batch.pt"),
        ):
            try:
                act()
            except ShardcError as refusal:
                refusals.append(refusal.code)
        trainer.sync_to(model)
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        own = model.state_dict()
        assert list(own) == list(state)
        assert all(torch.equal(own[key], state[key]) for key in own)
        model.load_state_dict(state, strict=True)
        losses.append(float(trainer.step(batch).loss))
        eager = float(model(**batch).loss.detach())
    if RANK == 0:
        torch.save(state, out / "state.pt")
    return {"losses": losses, "eager": eager, "refusals": refusals}


def main() -> None:
    torch.set_num_threads(1)
    found = story(sys.argv[1])
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
