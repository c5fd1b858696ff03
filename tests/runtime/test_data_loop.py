"""The loop over epochs: where a run that was stopped goes on, what a later call does, and what is said on the way."""

from __future__ import annotations

import json
import re
import shutil
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import shardc
from shardc import Parts
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.trainer import Trainer
from tests.runtime.looped import TokenModel

ROWS = TensorDataset(torch.randint(16, (28, 4), generator=torch.Generator().manual_seed(2)))


@pytest.fixture(scope="module")
def program() -> shardc.Program:
    torch.manual_seed(0)
    model = TokenModel()
    plan = {"inputs": {"ids": "dp, -"}, "data": "per_rank"}
    return shardc.compile(
        model, {"ids": ROWS[:8][0]}, mesh="dp=2", plan=plan, optimizer=torch.optim.SGD(model.parameters(), 0.1)
    )


def ids(samples: list[tuple[Tensor]]) -> dict[str, Tensor]:
    return {"ids": torch.stack([row for (row,) in samples])}


def shuffled() -> Any:
    return DataLoader(ROWS, 8, shuffle=True, generator=torch.Generator().manual_seed(1), drop_last=True, collate_fn=ids)


def stateful() -> Any:
    module = pytest.importorskip("torchdata.stateful_dataloader")
    return module.StatefulDataLoader(
        ROWS, 8, shuffle=True, generator=torch.Generator().manual_seed(1), drop_last=True, collate_fn=ids
    )


class OfRanks:
    """The loaders of two data ranks, side by side, as a simulation is given them."""

    def __init__(self) -> None:
        samplers = [DistributedSampler(ROWS, 2, rank, seed=5) for rank in range(2)]
        self.loaders: list[Any] = [
            DataLoader(ROWS, 4, sampler=s, drop_last=True, collate_fn=ids)  # type: ignore[arg-type]
            for s in samplers
        ]

    def set_epoch(self, epoch: int) -> None:
        for loader in self.loaders:
            loader.sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Parts]:
        return map(Parts, zip(*self.loaders, strict=True))


LOADERS: dict[str, Callable[[], Any]] = {"shuffled": shuffled, "stateful": stateful, "of ranks": OfRanks}


def trained(trainer: Trainer, loader: Any, stop: int = 0, **options: Any) -> list[float]:
    losses: list[float] = []
    for metrics in trainer.train(loader, progress=False, **options):
        assert metrics.items == 8 * 4
        losses.append(metrics.loss)
        if metrics.step == stop:
            break
    return losses


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_that_is_stopped_at_any_step_goes_on_within_its_epoch(
    program: shardc.Program, kind: str, tmp_path: Path
) -> None:
    loader = LOADERS[kind]
    with program.launch() as trainer:
        whole = trained(trainer, loader(), epochs=3, checkpoint=tmp_path / "whole")
    assert len(whole) == 9
    assert len({*whole}) == 9
    for stop in range(1, 9):
        with program.launch() as trainer:
            first = trained(trainer, loader(), stop, epochs=3, checkpoint=tmp_path / f"{stop}")
        with program.launch() as trainer:
            assert first + trained(trainer, loader(), epochs=3, checkpoint=tmp_path / f"{stop}") == whole, stop
    with program.launch() as trainer:
        assert trained(trainer, loader(), epochs=3, checkpoint=tmp_path / "whole") == []
        assert len(trained(trainer, loader(), epochs=1, checkpoint=tmp_path / "whole")) == 3  # a later call


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stop", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("kind", ["stateful", "of ranks"])
def test_a_later_call_is_resumed_by_that_call(program: shardc.Program, kind: str, stop: int, tmp_path: Path) -> None:
    """Each call is given a loader of its own, and the script is run again as it is."""

    def script(folder: Path, killed: Path | None = None) -> list[float]:
        losses: list[float] = []
        with program.launch() as trainer:
            for _ in range(3):  # three calls of one epoch
                for metrics in trainer.train(LOADERS[kind](), epochs=1, checkpoint=folder, every=1, progress=False):
                    losses.append(metrics.loss)
                    if killed is not None and metrics.step == stop + 1:  # the one before is saved
                        trainer.checkpoints.settle()
                        shutil.copytree(folder, killed)
        return losses

    whole = script(tmp_path / "run", tmp_path / "killed")
    assert len(whole) == 9
    assert script(tmp_path / "killed") == whole[stop:]


def test_checkpoints_of_earlier_versions_go_on(program: shardc.Program, tmp_path: Path) -> None:
    """They say at which step the batches began, and no more."""
    data = [ids([ROWS[i] for i in range(8 * k, 8 * k + 8)]) for k in range(3)]
    with program.launch() as trainer:
        whole = trained(trainer, data, steps=3)
    with program.launch() as trainer:
        trained(trainer, data, steps=2)
        trainer.save(tmp_path / "old", extra={"begun": 0})
    with program.launch() as trainer:
        assert trained(trainer, data, steps=3, checkpoint=tmp_path / "old") == whole[2:]


def test_positions_are_plain_and_small(program: shardc.Program, tmp_path: Path) -> None:
    for kind, make in LOADERS.items():
        with program.launch() as trainer:
            trained(trainer, make(), 4, epochs=2, checkpoint=tmp_path / kind)
        manifest = next((tmp_path / kind).rglob("shardc.json"))
        (position,) = json.loads(manifest.read_text())["body"]["extra"]["data"]["positions"]
        assert (position["epoch"], position["batch"]) == (1, 1)
        assert len(json.dumps(position)) < (50 if kind == "of ranks" else 30_000)


def test_a_loader_that_fails_is_seen_with_its_own_traceback(program: shardc.Program, tmp_path: Path) -> None:
    class Failing:
        def __iter__(self) -> Iterator[Any]:
            yield ids([ROWS[i] for i in range(8)])
            self.broken_disk()

        def broken_disk(self) -> None:
            raise OSError("no such block")

    before = {*threading.enumerate()}
    with program.launch() as trainer, pytest.raises(OSError, match="no such block") as caught:
        trained(trainer, Failing(), epochs=1, checkpoint=tmp_path / "run")
    assert "broken_disk" in "".join(traceback.format_exception(caught.value))
    left = {*threading.enumerate()} - before
    assert [thread.name for thread in left if "lock" not in thread.name] == []  # a checkpoint's lock is let go slowly
    with program.launch() as trainer:
        trainer.load(tmp_path / "run")
        assert trainer.steps == 1


def test_a_state_that_cannot_be_kept_is_refused_at_the_first_batch(program: shardc.Program, tmp_path: Path) -> None:
    class Odd(list[Any]):
        def state_dict(self) -> dict[str, object]:
            return {"rng": {"draw": object()}}

        def load_state_dict(self, state: object) -> None: ...

    data = Odd([ids([ROWS[i] for i in range(8)])])
    with program.launch() as trainer:
        with pytest.raises(ShardcError, match=r"SC557.*rng\.draw is a builtins\.object"):
            trained(trainer, data, epochs=1, checkpoint=tmp_path / "run")
        assert trainer.steps == 0
        assert len(trained(trainer, data, epochs=1)) == 1  # without a checkpoint nothing is kept


def test_a_state_that_no_checkpoint_could_be_read_with_is_refused(program: shardc.Program, tmp_path: Path) -> None:
    with program.launch() as trainer:
        with pytest.raises(ShardcError, match=r"SC408.*`extra` is 70 MiB of text, a checkpoint has at most 64 MiB"):
            trainer.save(tmp_path / "run", extra={"state": "x" * (70 << 20)})
        assert not (tmp_path / "run").exists()
        trainer.save(tmp_path / "run", extra={"state": "x" * (1 << 20)})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "train is given neither steps nor epochs"),
        ({"steps": 1, "epochs": 1}, "train is given both steps and epochs"),
        ({"epochs": -1}, "train is given epochs=-1"),
        ({"epochs": 1.5}, "train is given epochs=1.5"),
        ({"epochs": True}, "train is given epochs=True"),
    ],
)
def test_passes_are_counted_in_whole_numbers(program: shardc.Program, options: dict[str, Any], said: str) -> None:
    with program.launch() as trainer, pytest.raises(ShardcError, match="SC553") as caught:
        trained(trainer, [], **options)
    assert said in str(caught.value)


def test_no_passes_are_no_steps(program: shardc.Program) -> None:
    with program.launch() as trainer:
        assert trained(trainer, shuffled(), epochs=0) == []


def test_the_plain_line_has_the_time_left(program: shardc.Program, capsys: pytest.CaptureFixture[str]) -> None:
    with program.launch() as trainer:
        list(trainer.train(shuffled(), epochs=2))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 6
    assert all(re.match(r"step \d  loss .* left$", line) for line in lines[:-1])
    assert all(re.search(r"  \d+:\d\d:\d\d left$", line) for line in lines[:-1])
    assert "left" not in lines[-1]
    with program.launch() as trainer:
        list(trainer.train(OfRanks(), epochs=1))  # it has no length
    assert "left" not in capsys.readouterr().err


def test_evaluations_leave_the_order_of_training_as_it_is(program: shardc.Program, tmp_path: Path) -> None:
    """A loader without a generator of its own draws from torch's: so does one that is evaluated on."""
    held_out = DataLoader(ROWS, 8, drop_last=True, collate_fn=ids)  # type: ignore[arg-type]

    def losses(folder: str, stop: int = 0, **options: Any) -> list[float]:
        torch.manual_seed(7)
        data: Any = DataLoader(ROWS, 8, shuffle=True, drop_last=True, collate_fn=ids)  # type: ignore[arg-type]
        with program.launch() as trainer:
            return trained(trainer, data, stop, epochs=3, checkpoint=tmp_path / folder, **options)

    plain = losses("plain")
    options = {"evaluate": held_out, "evaluate_every": 1}
    assert losses("evaluated", **options) == plain
    assert losses("stopped", 2, **options) + losses("stopped", **options) == plain


def test_a_call_that_a_checkpoint_is_beyond_says_so(program: shardc.Program, tmp_path: Path) -> None:
    with program.launch() as trainer:
        for _ in range(2):
            trained(trainer, shuffled(), epochs=1, checkpoint=tmp_path / "run")
    with program.launch() as trainer:
        with pytest.warns(UserWarning, match=r"SC553.*number 1, makes no step.*of step 6, in call 2"):
            assert trained(trainer, shuffled(), epochs=4, checkpoint=tmp_path / "run") == []
        assert len(trained(trainer, shuffled(), epochs=4, checkpoint=tmp_path / "run")) == 9
