"""What one rank of `tests/gpu/test_experts.py` does: `python experts_worker.py CASE FOLDER`, under torchrun."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.ir.ops import exchange
from tests.distributed.experts_worker import STEPS, batches, mixtral, optimizer_of
from tests.models.test_values_of_batches import llava, tokens

RANK, DEVICE = int(os.environ.get("RANK", "0")), os.environ.get("DEVICE", "cuda")
TOGETHER = {"params": {"**.experts.*": "ep"}, "inputs": {"input_ids": "-, -", "labels": "-, -"}}
SENT = {
    "params": {"**.experts.*": "ep"},
    "inputs": {"input_ids": "ep, -", "labels": "ep, -"},
    "experts": "all_to_all",
}
CASES: dict[str, dict[str, Any]] = {
    "together": TOGETHER,
    "all-to-all": SENT,
    "all-to-all fused": SENT | {"fuse": True},
    "all-to-all bf16": SENT | {"precision": "bf16"},
    "all-to-all accumulate recompute": SENT | {"accumulate": 2, "recompute": "full"},
}


def trained(plan: dict[str, Any]) -> dict[str, Any]:
    model, text = mixtral(), batches()
    batch = {"input_ids": text[0], "labels": text[0]}
    program = shardc.compile(model, batch, mesh="ep=2", plan=plan, optimizer=optimizer_of(model))
    reads: list[int] = []
    read = exchange.read

    def counted(*given: Any) -> Any:
        reads.append(1)
        return read(*given)

    exchange.read = counted
    with program.launch(timeout=120.0, device=DEVICE) as trainer:
        losses = [float(trainer.step({"input_ids": ids, "labels": ids}).loss) for ids in text]
        assert len(losses) == STEPS
        device = str(next(iter(trainer.state.values())).device)
    return {"losses": losses, "reads": len(reads), "device": device}


def answered() -> dict[str, Any]:
    """Batches that answer the model's questions as the sample did, one that does not, and one that does again."""
    torch.manual_seed(0)
    model, batch = llava()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    program = shardc.compile(model, batch, mesh="dp=2", plan={"inputs": {"*": "dp"}}, optimizer=optimizer)
    other = tokens()
    other[3, 2] = 5
    found: list[Any] = []
    with program.launch(timeout=120.0, device=DEVICE) as trainer:
        for ids in (batch["input_ids"], other, batch["input_ids"]):
            try:
                found.append(float(trainer.step(batch | {"input_ids": ids}).loss))
            except ShardcError as refused:
                found.append(refused.code)
    return {"found": found}


def main() -> None:
    case = sys.argv[1]
    found = answered() if case == "answers" else trained(CASES[case])
    Path(sys.argv[2], f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
