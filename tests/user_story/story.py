"""The script of the story: torchrun --nproc-per-node 4 story.py "SUBJECT ATTEMPT" FOLDER

It compiles, trains with a loader, evaluates every ten steps and saves every five. In its first attempt rank 3 is killed
in the middle, when the checkpoint of step 15 is whole; the second goes on from the folder, on another mesh, exports,
and generates.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.runtime.checkpoint.folder import find
from shardc.runtime.checkpoint.manifest import Manifest
from tests.user_story.models import SUBJECTS, held_out, loader

KILLED_AFTER, SAVED = 17, 15  # the steps of rank 3's last moment, and of the last checkpoint before
PROMPTS = [[5, 6, 7], [9, 11, 13, 15], [20], [30, 33]]


def main(name: str, folder: Path, attempt: int) -> None:
    subject = SUBJECTS[name]
    model = subject.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.7)
    plan = subject.plan | (subject.then if attempt else {})
    sample = held_out()[0]
    program = shardc.compile(model, sample, mesh=subject.meshes[attempt], plan=plan, optimizer=optimizer)
    with program.launch(timeout=60.0) as trainer:
        data = loader(trainer.data_ranks, trainer.data_rank)
        evaluated = [{k: v[trainer.data_rank :: trainer.data_ranks] for k, v in batch.items()} for batch in held_out()]
        for metrics in trainer.train(
            data, epochs=3, checkpoint=folder / "run", every=5, scheduler=schedule, evaluate=evaluated,
            evaluate_every=10, progress=False,
        ):  # fmt: skip
            if trainer.leads:
                row: dict[str, Any] = {"step": metrics.step, "loss": metrics.loss, "rate": metrics.learning_rates[0]}
                row["evaluated"] = None if metrics.evaluated is None else metrics.evaluated.loss
                row["accuracy"] = None if metrics.evaluated is None else metrics.evaluated.scalars.get("accuracy")
                with (folder / f"losses.{attempt}").open("a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file)
            if not attempt and metrics.step == KILLED_AFTER and os.environ["RANK"] == "3":
                await_checkpoint(folder / "run")
                os.kill(os.getpid(), signal.SIGKILL)
        trainer.export_safetensors(folder / "weights")
        if name == "llama":
            trainer.export_hf(folder / "hf", max_shard_size="20KB")
            generated = trainer.generate(PROMPTS, max_new_tokens=8).tokens
        else:
            batch = {"input_ids": held_out()[0]["input_ids"]}
            generated = trainer.predict(batch).outputs["logits"].full().argmax(-1).tolist()
        if trainer.leads:
            (folder / "generated").write_text(json.dumps(generated))
    (folder / f"{os.environ['RANK']}.json").write_text("{}")


def await_checkpoint(path: Path) -> None:
    """It is written in the background: a job that dies before it is whole goes on from the one before."""
    deadline = time.monotonic() + 45
    while time.monotonic() < deadline:
        with suppress(shardc.ShardcError, OSError):  # one is moved to its place as this looks
            if Manifest.read(find(path)).step == SAVED:
                return
        time.sleep(0.02)
    raise TimeoutError(f"no checkpoint of step {SAVED} in {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    which, number = sys.argv[1].split()
    main(which, Path(sys.argv[2]), int(number))
