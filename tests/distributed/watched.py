"""`torchrun watched.py WORD FOLDER` runs examples/train_gpt2.py and watches its memory; `ranks.start` can fork it too.

The script's arguments are in `FOLDER/arguments.json`. Each rank writes `FOLDER/RANK.json`: its losses, and what it held
and read while it loaded its parameters.
"""

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardc.runtime.train import rank_session
from shardc.runtime.train.trainer import Trainer

SCRIPT = Path(__file__).parents[2] / "examples/train_gpt2.py"
blocks: list[int] = []  # bytes of every block that was read
anonymous: list[int] = []  # bytes of memory that no file backs, before the first tensor and after each
trainers: list[Trainer] = []


def anonymous_bytes() -> int:
    """Linux alone says it; 0 elsewhere. Pages of a mapped file do not count: the kernel drops them when it likes."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def watched(load: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def load_shard(read: Callable[[Any], torch.Tensor], *rest: Any) -> torch.Tensor:
        if not anonymous:
            anonymous.append(anonymous_bytes())

        def counted(slices: tuple[slice, ...]) -> torch.Tensor:
            block = read(slices)
            blocks.append(block.numel() * block.element_size())
            return block

        made = load(counted, *rest)
        anonymous.append(anonymous_bytes())
        return made

    return load_shard


def main() -> None:
    folder = Path(sys.argv[2])
    torch.set_num_threads(1)
    rank_session.load_shard = watched(rank_session.load_shard)
    step = Trainer.step
    losses: list[float] = []

    def recorded(self: Trainer, batch: Any) -> Any:
        result = step(self, batch)
        losses.append(float(result.loss))
        trainers[:] = [self]
        return result

    Trainer.step = recorded  # type: ignore[method-assign]
    sys.argv = [str(SCRIPT), *json.loads((folder / "arguments.json").read_text())]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    (trainer,) = trainers
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in trainer.state.values()}
    found = {
        "losses": losses,
        "device": str(next(iter(trainer.state.values())).device),
        "bytes": sum(storages.values()),
        "read": sum(blocks),
        "largest": max(blocks),
        "grown": max(anonymous) - anonymous[0],
    }
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


main()
