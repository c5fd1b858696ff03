"""What one rank of `test_profile.py` does: `python profile_worker.py SCENARIO FOLDER`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.cost.profile import Profile
from shardc.runtime.execute.batch import Inputs

RANK, FOLDER = int(os.environ["RANK"]), Path(sys.argv[2])


def measured(name: str) -> dict[str, Any]:
    program = shardc.Program.load(FOLDER / f"{name}.json")
    batch = Inputs(torch.load(FOLDER / f"{name}.batch"))
    with program.launch(state=torch.load(FOLDER / f"{name}.state")) as trainer:
        before = float(trainer.step(batch).loss)
        profile = trainer.profile(batch)
        after = float(trainer.step(batch).loss)
    path = FOLDER / f"{name}.{RANK}.json"
    profile.save(path)
    assert Profile.load(path) == profile
    return {"losses": [before, after]}


if __name__ == "__main__":
    (FOLDER / f"{RANK}.json").write_text(json.dumps(measured(sys.argv[1])))
