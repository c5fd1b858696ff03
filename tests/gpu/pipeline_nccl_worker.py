"""What one rank of `test_pipeline_nccl.py` does, under torchrun: `pipeline_nccl_worker.py FOLDER PROGRAM...`."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardc
from shardc.runtime.execute.batch import Inputs

STEPS = 5


def train(folder: Path, name: str) -> dict[str, Any]:
    state: dict[str, torch.Tensor] = torch.load(folder / "state.pt", mmap=True)
    batch = Inputs(torch.load(folder / "batch.pt"))
    with shardc.Program.load(folder / f"{name}.json").launch(state=state, timeout=60) as trainer:
        executor: Any = trainer.engine.executor  # type: ignore[attr-defined]
        run = executor.run

        def unsynchronised(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return run(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        results = [trainer.step(batch)]  # the first may load kernels
        executor.run = unsynchronised
        results += [trainer.step(batch) for _ in range(STEPS - 1)]
        executor.run = run
        timeline = trainer.timeline(batch)
        timeline.to_svg(folder / f"{name}.{trainer.engine.rank}.svg")
        return {
            "losses": [float(one.loss) for one in results],
            "norms": [float(one.grad_norm) for one in results if one.grad_norm is not None],
            "device": str(trainer.device),
            "spans": [(one.rank, str(one.instruction), one.start, one.end) for one in timeline.events],
            "text": timeline.text(),
            "bytes": trainer.parameter_bytes,
        }


def main() -> None:
    folder = Path(sys.argv[1])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    found = {name: train(folder, name) for name in sys.argv[2:]}
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


main()
