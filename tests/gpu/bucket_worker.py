"""What one rank of `test_bucket.py` does, under torchrun: train a small GPT with buckets and without.

Writes `FOLDER/RANK.json`: by case and bucket, the losses, and how many collectives a step has.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardc
from benchmarks.gpt import Shape

SHAPE = Shape("small", layers=2, width=256, heads=4, seq=64, vocab=256, batch=4)
STEPS = 5
BUCKETS = {"none": False, "small": "1 MiB", "large": True}
ZERO3 = {"storage": {"zero": 3, "axes": ["dp"]}}
CASES: dict[str, dict[str, Any]] = {
    "dp": {},
    "dp fused": {"fuse": True, "clip_grad_norm": 1.0},
    "dp accumulate": {"accumulate": 2},
    "zero-1": {"storage": {"zero": 1, "axes": ["dp"]}},
    "zero-3": ZERO3,
    "zero-3 fused": {**ZERO3, "fuse": True, "recompute": "selective"},
    "zero-3 mixed": {**ZERO3, "fuse": True, "precision": {"compute": "bf16", "master": "fp32", "reduce": "fp32"}},
}


def train(case: str, bucket: object) -> dict[str, Any]:
    torch.manual_seed(0)
    master = "precision" in CASES[case]
    model = SHAPE.model(torch.float32 if master else torch.bfloat16)
    batches = SHAPE.batches(STEPS, 2 * SHAPE.batch, torch.device("cpu"))
    plan = {"inputs": dict.fromkeys(batches[0], "dp, -"), "bucket": bucket, **CASES[case]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    program = shardc.compile(model, batches[0], mesh="dp=2", plan=plan, optimizer=optimizer)
    with program.launch(device="cuda", timeout=60) as trainer:
        losses = [float(trainer.step(batch).loss) for batch in batches]
    return {"losses": losses, "collectives": len(program.collectives())}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found = {case: {name: train(case, bucket) for name, bucket in BUCKETS.items()} for case in CASES}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
