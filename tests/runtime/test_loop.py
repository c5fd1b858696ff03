"""The training loop: what it measures, shows and keeps; and a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.train.metrics import Metrics, count_items
from tests.runtime.looped import TokenModel


def batches() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    while True:
        yield {"ids": torch.randint(16, (8, 4), generator=generator)}


def started(seed: int = 3) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = TokenModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    plan = {"inputs": {"ids": "dp, -"}, "accumulate": 2, "clip_grad_norm": 1.0, "seed": seed}
    program = shardc.compile(model, next(batches()), mesh="dp=2", plan=plan, optimizer=optimizer)
    return program.launch(), scheduler


def run(steps: int, folder: Path | None, **options: Any) -> list[Metrics]:
    trainer, scheduler = started()
    with trainer, warnings.catch_warnings():
        warnings.simplefilter("error")
        return list(trainer.train(batches(), steps, checkpoint=folder, scheduler=scheduler, **options))


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = run(12, None)
    first = run(7, tmp_path / "run", every=3)
    rest = run(12, tmp_path / "run", every=3)
    assert [m.step for m in rest] == [8, 9, 10, 11, 12]
    assert [m.loss for m in (*first, *rest)] == [m.loss for m in whole]
    assert [m.learning_rates for m in (*first, *rest)] == [m.learning_rates for m in whole]
    assert run(12, tmp_path / "run", every=3) == []  # all done
    assert [m.step for m in run(2, tmp_path / "run", resume=False)] == [1, 2]


def test_stopped_between_checkpoints_goes_back_to_the_last(tmp_path: Path) -> None:
    """A process that is killed says nothing; one whose caller ends the loop leaves a checkpoint of its last step."""
    whole = run(6, None)
    trainer, scheduler = started()
    with trainer:
        for metrics in trainer.train(batches(), 6, checkpoint=tmp_path / "run", every=2, scheduler=scheduler):
            if metrics.step == 5:
                trainer.checkpoints.settle()
                shutil.copytree(tmp_path / "run", tmp_path / "killed")
                break
    for folder, steps in (("killed", [5, 6]), ("run", [6])):
        rest = run(6, tmp_path / folder)
        assert [m.step for m in rest] == steps
        assert [m.loss for m in rest] == [m.loss for m in whole[steps[0] - 1 :]]


def test_the_last_checkpoint_is_there_when_the_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if it was begun in the background, and the disk is slow."""
    write = Checkpoints._write

    def slowly(*given: Any) -> Any:
        time.sleep(0.3)
        return write(*given)

    monkeypatch.setattr(Checkpoints, "_write", slowly)
    trainer, _ = started()
    with trainer:
        assert len(list(trainer.train(batches(), 2, checkpoint=tmp_path / "run", every=1, progress=False))) == 2
        shutil.copytree(tmp_path / "run", tmp_path / "copied")
    assert [m.step for m in run(3, tmp_path / "copied")] == [3]


def epochs(folder: Path, count: int, stop: int = 0) -> list[float]:
    """The losses of several calls of `train` on one list of four batches; killed with the checkpoint of step `stop`,
    which is made when the caller is done with that step."""
    data = list(islice(batches(), 4))
    trainer, scheduler = started()
    losses: list[float] = []
    with trainer:
        for epoch in range(count):
            options = {"checkpoint": folder, "every": 1, "scheduler": scheduler, "progress": False}
            for metrics in trainer.train(data, 4 * (epoch + 1), **options):
                losses.append(metrics.loss)
                if metrics.step == stop + 1:
                    trainer.checkpoints.settle()
                    shutil.copytree(folder, folder.with_name(f"killed-{stop}"))
    return losses


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stop", [3, 4, 5, 7, 8, 11])
def test_a_second_epoch_trains_on_the_same_batches_and_is_resumed_where_it_was(tmp_path: Path, stop: int) -> None:
    whole = epochs(tmp_path / "run", 3, stop)
    assert len(whole) == 12
    assert epochs(tmp_path / f"killed-{stop}", 3) == whole[stop:]


class Lost(Exception):
    pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("how", ["loader", "exhausted", "caller", "signal"])
def test_whatever_ends_training_leaves_a_checkpoint(tmp_path: Path, how: str) -> None:
    whole = run(6, None)
    trainer, scheduler = started()

    def loader() -> Iterator[Any]:
        yield from islice(batches(), 4)
        if how == "loader":
            raise Lost
        if how == "signal":
            step = trainer.engine.run

            def interrupted(*args: Any) -> Any:
                os.kill(os.getpid(), signal.SIGINT)
                return step(*args)

            trainer.engine.run = interrupted
            yield from islice(batches(), 4, None)

    ended = {"loader": Lost, "exhausted": None, "caller": Lost, "signal": KeyboardInterrupt}[how]
    with trainer, pytest.raises(ended) if ended else nullcontext():
        for metrics in trainer.train(loader(), 6, checkpoint=tmp_path / "run", scheduler=scheduler):
            if how == "caller" and metrics.step == 4:
                raise Lost
    rest = run(6, tmp_path / "run")
    done = 5 if how == "signal" else 4  # a step that was begun is finished
    assert [m.step for m in rest] == list(range(done + 1, 7))
    assert [m.loss for m in rest] == [m.loss for m in whole[done:]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_step_that_fails_halfway_is_not_saved(tmp_path: Path) -> None:
    trainer, scheduler = started()
    step = trainer.engine.run

    def fails(held: Any, fed: Any, steps: int) -> Any:
        if steps == 3:
            next(iter(held.values())).zero_()
            raise Lost
        return step(held, fed, steps)

    trainer.engine.run = fails
    with trainer, pytest.raises(Lost):
        list(trainer.train(batches(), 6, checkpoint=tmp_path / "run", every=2, scheduler=scheduler))
    assert [m.step for m in run(6, tmp_path / "run")] == [3, 4, 5, 6]


def test_a_scheduler_that_wants_a_metric_is_refused() -> None:
    trainer, _ = started()
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD([torch.ones(1)]))
    with trainer, pytest.raises(ShardcError, match="ReduceLROnPlateau wants a metric") as caught:
        next(trainer.train(batches(), 2, scheduler=plateau))
    assert caught.value.code == "SC552"


@pytest.mark.parametrize("tokens", [True, False])
def test_what_is_counted_is_named(tokens: bool) -> None:
    """Images and regressions have no tokens."""
    model = nn.Embedding(8, 4) if tokens else nn.Linear(6, 4)
    given = torch.zeros(4, 6, dtype=torch.int64) if tokens else torch.zeros(4, 6)
    program = shardc.compile(model, given, mesh="dp=2", plan={}, loss=lambda y, _: y.square().mean())
    metrics = next(program.launch().train([given], 1, progress=False))
    assert metrics.items == (24 if tokens else 4)
    assert f"{'tokens' if tokens else 'samples'}/s  " in str(replace(metrics, seconds=100.0))
    assert ("0.24 tokens/s" if tokens else "0.04 samples/s") in str(replace(metrics, seconds=100.0))


def test_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    seen = run(3, None)
    last = seen[-1]
    assert last.items == 8 * 4
    assert last.grad_norm is not None
    assert last.grad_norm > 0
    assert last.memory > 1 << 20
    assert last.items_per_second == last.items / last.seconds
    assert seen[0].learning_rates == (0.01,)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1", "2", "3"]
    assert f"loss {last.loss:.4f}" in lines[-1]
    assert "tokens/s" in lines[-1]
    run(3, None, progress=False)
    assert capsys.readouterr().err == ""


def test_the_plan_s_seed_is_the_run_s() -> None:
    losses = [float(started(seed)[0].step(next(batches())).loss) for seed in (3, 3, 4)]
    assert losses[0] == losses[1] != losses[2]


def test_items() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    assert count_items({"x": torch.zeros(3, 4), "ids": ids}) == 10
    assert count_items((torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))) == 3
    assert count_items(torch.zeros(7, 2)) == 7
