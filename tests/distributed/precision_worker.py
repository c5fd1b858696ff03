"""What one rank of `test_precision.py` does: `precision_worker.py SCENARIO FOLDER`, with torchrun's environment."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError
from tests.distributed.test_precision import compiled, steps


def main() -> None:
    torch.set_num_threads(1)
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    program, batches = compiled(scenario)
    with program.launch(timeout=60) as trainer:
        try:
            found: dict[str, object] = steps(trainer, batches)
        except ShardcError as failure:
            found = {"code": failure.code, "error": str(failure), "steps": trainer.steps}
        whole = trainer.state_dict(("param", "state"))
        found["finite"] = all(bool(value.isfinite().all()) for value in whole.values())
        dist.barrier()
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
