"""What one rank of `test_real_bytes.py` does: train GPT-2 under each ZeRO stage, and count what it really holds.

Programs come from the folder, compiled by the test: `prepare` leaves them there, with weights and a batch. Writes
`FOLDER/RANK.json`: for each case, bytes of the storages that the trainer's tensors lie in, by role, before the
first step and after each.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

import shardc
from examples.gpt2 import gpt2
from shardc.runtime.train.trainer import Trainer

# mesh, storage, and the tensor parallel plan or none
CASES: dict[str, tuple[str, dict[str, object], bool]] = {
    **{f"dp4 zero-{n}": ("dp=4", {"zero": n, "axes": ["dp"]} if n else {}, False) for n in range(4)},
    "dp2 tp2 zero-3": ("dp=2,tp=2", {"zero": 3, "axes": ["dp"]}, True),
}
TP = {"**.wte.weight": "tp, -", "**.attn.c_attn.weight": "-, 3*tp", "**.mlp.c_fc.weight": "-, tp"}
STEPS = 2


@cache
def program_of(case: str) -> tuple[shardc.Program, Mapping[str, Any]]:
    mesh, storage, tensor_parallel = CASES[case]
    model, batch = gpt2(batch=4, seq=8, layers=1, vocab=64, heads=4, width=32)
    plan = {"inputs": dict.fromkeys(batch, "dp, -"), "storage": storage, "params": TP if tensor_parallel else {}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return shardc.compile(model, batch, mesh=mesh, plan=plan, optimizer=optimizer), batch


def prepare(folder: Path, cases: Sequence[str]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    for case in cases:
        program, batch = program_of(case)
        program.save(folder / f"{case}.json")
    assert program.model is not None
    torch.save((program.model.state_dict(), dict(batch)), folder / "given.pt")


def held(trainer: Trainer) -> dict[str, int]:
    """Each storage once, by the role of the tensors in it."""
    roles = {port.name: port.role for port in trainer.body.inputs}
    storages = {
        tensor.untyped_storage().data_ptr(): (roles[name], tensor.untyped_storage().nbytes())
        for name, tensor in trainer.state.items()
    }
    found = Counter[str]()
    for role, size in storages.values():
        found[role] += size
    return dict(found)


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, list[dict[str, int]]] = {}
    folder = Path(sys.argv[2])
    state, batch = torch.load(folder / "given.pt", mmap=True)
    for case in json.loads((folder / "cases.json").read_text()):
        program = shardc.Program.load(folder / f"{case}.json")
        with program.launch(state=state, timeout=60) as trainer:
            found[case] = [held(trainer)]
            for _ in range(STEPS):
                trainer.step(batch)
                found[case].append(held(trainer))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
