"""What one rank of `test_decompose.py` does: train under sequence parallelism, with decomposed products and with whole
ones, and compare all that it then holds.

Programs come from the folder, compiled by the test: `prepare` leaves them there, with weights and a batch. Writes
`FOLDER/RANK.json`: for each case, the names of tensors that differ in some bit, and the losses of both.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import shardc
from tests.passes.test_late_gradients import SEQUENCE, SMALL, small
from tests.replanned import replanned

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "fuse": {"fuse": True},
}


def prepare(folder: Path, cases: Sequence[str]) -> None:
    (folder / "cases.json").write_text(json.dumps(cases))
    for case in cases:
        program = small(SMALL, {"mesh": "tp=2", **SEQUENCE, **CASES[case]})
        program.save(folder / f"{case} False.json")
        replanned(program, overlap={"decompose": True}).save(folder / f"{case} True.json")
        assert program.model is not None
        torch.save(program.model.state_dict(), folder / "state.pt")


def run(folder: Path, case: str, decompose: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    program = shardc.Program.load(folder / f"{case} {decompose}.json")
    tokens = torch.randint(0, SMALL.vocabulary, (4, SMALL.sequence), generator=torch.Generator().manual_seed(1))
    with program.launch(state=torch.load(folder / "state.pt"), timeout=60) as trainer:
        losses = [float(trainer.step({"tokens": tokens, "targets": tokens.roll(-1, 1)}).loss) for _ in range(2)]
        return {name: x.clone() for name, x in trainer.state.items()}, losses


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    found: dict[str, dict[str, Any]] = {}
    folder = Path(sys.argv[2])
    for case in json.loads((folder / "cases.json").read_text()):
        (whole, before), (held, losses) = (run(folder, case, decompose) for decompose in (False, True))
        assert whole.keys() == held.keys()
        found[case] = {
            "differ": [name for name, x in whole.items() if not torch.equal(x, held[name])],
            "tensors": len(whole),
            "losses": [before, losses],
        }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
