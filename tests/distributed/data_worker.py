"""What one rank of `test_data.py` does: `python data_worker.py CASE FOLDER`."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.trainer import Trainer

CASE, FOLDER, RANK = sys.argv[1], Path(sys.argv[2]), int(os.environ["RANK"])
ROWS, BATCH, EPOCHS, STOP = 26, 8, 3, 4  # three batches an epoch; stopped after the first of the second
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dp2 tp2": ("dp=2, tp=2", {"params": {"head.weight": "tp, -"}, "accumulate": 2}),
    "pp2 dp2": ("pp=2, dp=2", {"pipeline": {"microbatches": 2}}),
    "dp4": ("dp=4", {"storage": {"zero": 3, "axes": ["dp"]}, "accumulate": 2}),
}


class Texts(Dataset[dict[str, Tensor]]):
    """Rows with unequal numbers of labels, some without any."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(16, (ROWS, 6), generator=generator)
        lengths = torch.randint(0, 7, (ROWS, 1), generator=generator)
        self.labels = self.ids.roll(-1, 1).masked_fill(torch.arange(6) >= lengths, -100)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"ids": self.ids[row], "labels": self.labels[row]}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mid, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.mid(self.embed(ids))))
        right = (logits.argmax(-1) == labels).double().mean()
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "right": right}


@cache
def compiled(layout: str) -> shardc.Program:
    mesh, plan = LAYOUTS[layout]
    model, texts = Model(), Texts()
    sample = {"ids": texts.ids[:BATCH], "labels": texts.labels[:BATCH]}
    plan = {"inputs": {"ids": "dp, -"}, "loss": {"tokens": "labels"}, "data": "per_rank", **plan}
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return shardc.compile(model, sample, mesh=mesh, plan=plan, optimizer=optimizer)


def launched(layout: str = "dp2 tp2") -> Trainer:
    return compiled(layout).launch(timeout=60)


def loader(trainer: Trainer, stateful: bool = False, rank: int | None = None) -> Any:
    rank, count = trainer.data_rank if rank is None else rank, trainer.data_ranks
    kind: Any = DataLoader
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    sampler: Any = DistributedSampler(Texts(), count, rank, seed=7)
    return kind(Texts(), BATCH // count, sampler=sampler, drop_last=True)


def trained(layout: str, stateful: bool, folder: Path | None, stop: int = 0) -> list[float]:
    losses: list[float] = []
    with launched(layout) as trainer:
        options: dict[str, Any] = {"epochs": EPOCHS, "checkpoint": folder, "progress": False}
        for metrics in trainer.train(loader(trainer, stateful), **options):
            assert metrics.items == BATCH * 6
            losses.append(metrics.loss)
            if metrics.step == stop:
                break
    return losses


def epochs(layout: str, stateful: bool) -> dict[str, Any]:
    """A run, the same one stopped within an epoch, and what goes on from there: with new loaders, on this mesh."""
    folder = FOLDER / "run"
    whole, first = trained(layout, stateful, None), trained(layout, stateful, folder, STOP)
    return {"whole": whole, "first": first, "rest": trained(layout, stateful, folder)}


def other_mesh() -> dict[str, Any]:
    """Stopped with two data ranks, and gone on with four: with a sampler that deals the rows anew, not with a state."""
    first = trained("dp2 tp2", False, FOLDER / "run", STOP)
    rest = trained("dp4", False, FOLDER / "run")
    trained("dp2 tp2", True, FOLDER / "stateful", STOP)
    try:
        trained("dp4", True, FOLDER / "stateful")
        said = ""
    except ShardcError as wrong:
        said = str(wrong)
    return {"first": first, "rest": rest, "said": said}


def batches(trainer: Trainer, rank: int | None = None) -> list[dict[str, Tensor]]:
    return list(loader(trainer, rank=rank))


def other_rows(trainer: Trainer) -> object:
    """The last rank has another data coordinate's sampler: as with torch's rank and number of ranks."""
    given = batches(trainer, 0 if RANK == 3 else None)
    return [m.loss for m in trainer.train(given, epochs=1, progress=False)]


def other_rows_by_step(trainer: Trainer) -> object:
    return float(trainer.step(batches(trainer, 0 if RANK == 3 else None)[0]).loss)


def other_shape(trainer: Trainer) -> object:
    given = batches(trainer)
    if RANK == 2:
        given[0] = {name: rows[:2] for name, rows in given[0].items()}
    return [m.loss for m in trainer.train(given, epochs=1, progress=False)]


def other_shape_by_step(trainer: Trainer) -> object:
    rows = batches(trainer)[0]
    return float(trainer.step({name: x[:2] for name, x in rows.items()} if RANK == 2 else rows).loss)


def same_rows(trainer: Trainer) -> object:
    """No rank's sampler is told of the ranks."""
    return [m.loss for m in trainer.train(batches(trainer, 0), epochs=1, progress=False)]


def ends_early(trainer: Trainer) -> object:
    """Ranks 2 and 3 have a batch fewer: all end with them, in each epoch."""
    given = batches(trainer)[: 2 if RANK >= 2 else 3]
    return [m.step for m in trainer.train(given, epochs=2, progress=False)]


def evaluated_early(trainer: Trainer) -> object:
    given = batches(trainer)[: 2 if RANK >= 2 else 3]
    assert trainer.evaluate(given, steps=2).batches == 2
    return trainer.evaluate(given).loss


def evaluated_other_rows(trainer: Trainer) -> object:
    return trainer.evaluate(batches(trainer, 0 if RANK == 3 else None)).loss


def evaluated_other_shape(trainer: Trainer) -> object:
    rows = batches(trainer)[0]
    return trainer.predict({name: x[:2] for name, x in rows.items()} if RANK == 2 else rows).loss.item()


def in_parts(trainer: Trainer) -> object:
    """Each rank is given all parts, and takes its own."""
    given = [shardc.Parts(rows) for rows in zip(*(batches(trainer, rank) for rank in range(2)), strict=True)]
    return [m.loss for m in trainer.train(given, epochs=1, progress=False)]


def mean(trainer: Trainer) -> object:
    """An evaluation of unequal parts, and of batches that are shorter than the sample."""
    short = [{name: x[2:] for name, x in rows.items()} for rows in batches(trainer)]
    both = [trainer.evaluate(given) for given in (batches(trainer), short)]
    return [[e.loss, e.scalars["right"], e.items] for e in both]


FAULTS: Mapping[str, Callable[[Trainer], object]] = {
    f.__name__: f
    for f in (
        other_rows, other_rows_by_step, other_shape, other_shape_by_step, same_rows, ends_early, evaluated_early,
        evaluated_other_rows, evaluated_other_shape, in_parts, mean,
    )
}  # fmt: skip


def faults(layout: str) -> dict[str, Any]:
    """Each in turn: where it is an error, it is the same on all ranks, which then launch again."""
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    for name, run in FAULTS.items():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            trainer = launched(layout)
            try:
                found[name] = {"result": run(trainer)}
            except ShardcError as failure:
                found[name] = {"error": str(failure)}
            trainer.close()
        found[name]["warnings"] = [str(w.message) for w in said if "SC" in str(w.message)]
    return found


def bad_token() -> dict[str, Any]:
    """A token of one rank is in no table: that rank says so, and the others that it is gone."""
    try:
        with launched() as trainer:
            given = batches(trainer)
            if RANK >= 2:
                given[1]["ids"][1, 3] = 16

            def one_by_one() -> Iterator[Any]:
                yield from given

            losses = [m.loss for m in trainer.train(one_by_one(), 3, progress=False)]
            return {"losses": losses}
    except ShardcError as failure:
        return {"code": failure.code, "error": str(failure)}


def main() -> None:
    torch.set_num_threads(1)
    layout, _, kind = CASE.partition(", ")
    cases: dict[str, Callable[[], dict[str, Any]]] = {"other mesh": other_mesh, "bad token": bad_token}
    run = cases.get(CASE) or (lambda: faults(layout) if kind == "faults" else epochs(layout, kind == "stateful"))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(run()))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
