"""What one rank of `test_combined.py` does: `python combined_worker.py CASE FOLDER`.

Each data rank brings its part of batches of several shapes, padded or not, with dropout, microbatches and averages; a
layer is frozen after the first step, or not; the run is given up within an epoch, and gone on with.
"""

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

import shardc
from tests.hostile.combined import Batch, Tokens

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2": ("dp=2", {"accumulate": 2, "storage": {"zero": 3, "axes": ["dp"]}}),
    "dp2 halves": ("dp=2", {"accumulate": 2, "overlap": {"split": 2}, "storage": {"zero": 3, "axes": ["dp"]}}),
    "pp2 dp2": ("pp=2, dp=2", {"pipeline": {"microbatches": 2}}),
    "dp2 host": ("dp=2", {"accumulate": 2, "offload": {"activations": "all", "optimizer": "all", "least": 1}}),
    "pp2 dp2 host": (
        "pp=2, dp=2",
        {"pipeline": {"microbatches": 2}, "offload": {"activations": "all", "optimizer": "all", "least": 1}},
    ),
}
SHAPES = [(8, 5), (6, 5), (2, 3), (8, 5)]  # rows of the whole batch, and tokens of each
STOP = 2
FROZEN = "frozen" in CASE  # a layer is from the first step on, whose average goes on


def batch(number: int) -> Batch:
    """Of every other batch the last part has no token that counts."""
    rows, length = SHAPES[number]
    draw = torch.Generator().manual_seed(number)
    ids, labels = (torch.randint(7, (rows, length), generator=draw) for _ in range(2))
    labels[:, 0] = -100
    if number % 2:
        labels[rows // 2 :] = -100
    return {"ids": ids, "labels": labels}


def parts(number: int) -> list[Batch]:
    whole = batch(number)
    return [{name: t.chunk(2)[part] for name, t in whole.items()} for part in range(2)]


def made() -> Tokens:
    torch.manual_seed(3)
    return Tokens(0.3, 0).double()


def launched(model: Tokens, layout: str, pad: bool) -> shardc.Trainer:
    mesh, plan = LAYOUTS[layout]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3)
    plan = {"inputs": {"*": "dp, -"}, "loss": {"tokens": "labels"}, "data": "per_rank", "pad": pad, **plan}
    return shardc.compile(model, batch(0), mesh=mesh, plan=plan, optimizer=optimizer).launch(timeout=60)


def trained(layout: str, pad: bool, given: list[Any], folder: Path, stop: int, resumes: bool) -> dict[str, Any]:
    """Losses, evaluations, and the norms of parameters and averages after the last step."""
    losses, model = list[float](), made()
    model.b.requires_grad_(not (FROZEN and resumes))  # as it was at the step from which it goes on
    with launched(model, layout, pad) as trainer:
        ema = shardc.EMA(trainer, 0.6)
        mine = [one[trainer.data_rank] for one in given] if trainer.data_ranks > 1 else given
        options: dict[str, Any] = {"evaluate": mine[:2], "evaluate_every": 2, "checkpoint": folder}
        for metrics in trainer.train(mine, epochs=1, progress=False, **options):
            losses += [metrics.loss, *([] if metrics.evaluated is None else [metrics.evaluated.loss])]
            if FROZEN and metrics.step == 1:
                model.b.requires_grad_(False)
                trainer.recompile()
            if metrics.step == stop:
                break
        held = {"parameters": trainer.state_dict(), "averages": ema.state_dict()}
    return {"losses": losses} | {k: {n: float(t.norm()) for n, t in v.items()} for k, v in held.items()}


def both(layout: str, pad: bool, given: list[Any], folder: Path) -> dict[str, Any]:
    """A run that is stopped, and gone on with."""
    first = trained(layout, pad, given, folder, STOP, resumes=False)
    rest = trained(layout, pad, given, folder, 0, resumes=True)
    return {**rest, "losses": first["losses"] + rest["losses"]}


def main() -> None:
    torch.set_num_threads(1)
    layout = CASE.partition(", ")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = [parts(number) for number in range(len(SHAPES))]
        found = both(layout, "padded" in CASE, given, FOLDER / "run")
    (FOLDER / f"{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
