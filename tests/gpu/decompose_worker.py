"""What one rank of `test_decompose.py` does, under torchrun: train a small GPT under sequence parallelism, with
decomposed products and with whole ones.

Writes `FOLDER/RANK.json`: by case, the losses of both, and how often each called torch's decomposed products.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import shardc
from benchmarks.measured_models import Decoder, Sizes
from shardc.runtime.execute import decomposed_products
from tests.passes.test_late_gradients import COLUMNS, SEQUENCE

SIZES = Sizes(2, 256, 4, 4, 512, 64, 256)
STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one sequence": {"rows": 1},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "fuse": {"fuse": True},
    "graphs": {"graphs": True},
}


def train(case: str, decompose: bool) -> tuple[list[float], int]:
    plan = dict(CASES[case])
    rows, graphs = plan.pop("rows", 4), plan.pop("graphs", False)
    torch.manual_seed(0)
    model = Decoder(SIZES).to(torch.bfloat16)
    tokens = torch.randint(0, SIZES.vocabulary, (rows, SIZES.sequence))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    plan |= {"params": COLUMNS, "overlap": {"decompose": decompose}, **SEQUENCE}
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    program = shardc.compile(model, batch, mesh="tp=2", plan=plan, optimizer=optimizer)
    gathers = patch.object(decomposed_products, "gathered_products", wraps=decomposed_products.gathered_products)
    scatters = patch.object(decomposed_products, "scattered_product", wraps=decomposed_products.scattered_product)
    with (
        gathers as gathered,
        scatters as scattered,
        program.launch(device="cuda", timeout=60, graphs=graphs) as trainer,
    ):
        losses = [float(trainer.step(batch).loss) for _ in range(STEPS)]
        return losses, min(gathered.call_count, scattered.call_count)


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    found: dict[str, dict[str, Any]] = {}
    for case in CASES:
        (whole, unused), (losses, calls) = train(case, False), train(case, True)
        found[case] = {"whole": whole, "unused": unused, "losses": losses, "calls": calls}
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
