"""What one rank of `test_bucket.py` does: train GPT-2 with buckets and without, and compare all that it then holds.

Programs come from the folder, compiled by the test: `prepare` leaves them there, with weights and a batch. Writes
`FOLDER/RANK.json`: for each case, the names of tensors that differ in some bit, the losses of both, and the number of
collectives of both.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shardc
from examples.gpt2 import gpt2
from tests.replanned import replanned

SMALL = 30_000  # bytes, so that there are several buckets
CASES: dict[str, dict[str, Any]] = {
    "gradients": {},
    "zero-1": {"optimizer": True, "storage": {"zero": 1, "axes": ["dp"]}},
    "zero-2 bf16": {"optimizer": True, "storage": {"zero": 2, "axes": ["dp"]}, "precision": "bf16"},
    "accumulate clip": {"optimizer": True, "accumulate": 2, "clip_grad_norm": 0.1},
    "zero-2 bf16 accumulate": {
        "optimizer": True,
        "storage": {"zero": 2, "axes": ["dp"]},
        "precision": "bf16",
        "accumulate": 2,
    },
    "zero-3 bf16 accumulate recompute": {
        "optimizer": True,
        "storage": {"zero": 3, "axes": ["dp"]},
        "precision": "bf16",
        "accumulate": 2,
        "recompute": "full",
    },
    "zero-3 fp16 accumulate": {
        "optimizer": True,
        "storage": {"zero": 3, "axes": ["dp"]},
        "precision": "fp16",
        "accumulate": 2,
    },
    "fuse": {"optimizer": True, "fuse": True, "clip_grad_norm": 0.1},
    "zero-3 bf16 fuse recompute": {
        "optimizer": True,
        "storage": {"zero": 3, "axes": ["dp"]},
        "precision": "bf16",
        "fuse": True,
        "recompute": "full",
    },
}


def program_of(case: str) -> tuple[shardc.Program, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = gpt2(batch=4, seq=8, layers=2, vocab=64, heads=4, width=32)
    plan = {"inputs": dict.fromkeys(batch, "dp, -"), "bucket": False, **CASES[case]}
    mine = torch.optim.AdamW(model.parameters(), lr=1e-3) if plan.pop("optimizer", False) else None
    return shardc.compile(model, batch, mesh="dp=2", plan=plan, optimizer=mine), batch


def prepare(folder: Path, cases: Sequence[str]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    for case in cases:
        program, batch = program_of(case)
        program.save(folder / f"{case} False.json")
        replanned(program, bucket=SMALL).save(folder / f"{case} True.json")
    assert program.model is not None
    torch.save((program.model.state_dict(), dict(batch)), folder / "given.pt")


def run(folder: Path, case: str, bucket: bool) -> tuple[dict[str, torch.Tensor], list[float], int]:
    program = shardc.Program.load(folder / f"{case} {bucket}.json")
    state, batch = torch.load(folder / "given.pt")
    with program.launch(state=state, timeout=60) as trainer:
        results = [trainer.step(batch) for _ in range(2)]
        held = {name: x.clone() for name, x in trainer.state.items()}
        held |= {f"d.{name}": x for name, x in results[-1].grads.items()}
        losses = [float(result.loss) for result in results]
    return held, losses, len(program.collectives())


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    folder = Path(sys.argv[2])
    for case in json.loads((folder / "cases.json").read_text()):
        plain, losses, count = run(folder, case, False)
        held, bucketed, fewer = run(folder, case, True)
        assert plain.keys() == held.keys()
        assert plain
        found[case] = {
            "differ": [name for name, x in plain.items() if not torch.equal(x, held[name])],
            "losses": [losses, bucketed],
            "collectives": [count, fewer],
        }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
