"""Evaluations and callbacks in the loop: when they come, what they end, and what a checkpoint then holds."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardc
from shardc import EarlyStopping, Metrics
from shardc.ir.diagnostic import ShardcError
from tests.runtime.looped import HELD_OUT, batches, measured, started

NAN = float("nan")


class Lost(Exception):
    pass


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(steps: int, folder: Path | None = None, *, data: Any = None, **options: Any) -> list[Metrics]:
    trainer, _ = started()
    with trainer:
        return list(trainer.train(data or batches(), steps, checkpoint=folder, progress=False, **options))


def test_evaluations_come_every_so_many_steps_and_after_the_last() -> None:
    seen = run(7, evaluate=HELD_OUT, evaluate_every=3)
    assert [m.step for m in seen if m.evaluated is not None] == [3, 6, 7]
    assert [m.loss for m in seen] == [m.loss for m in run(7)]
    trainer, _ = started()
    with trainer:
        for metrics in trainer.train(batches(), 3, progress=False):
            by_hand = trainer.evaluate(HELD_OUT)
            if metrics.step == 3:
                assert seen[2].evaluated is not None
                assert (by_hand.loss, by_hand.scalars) == (seen[2].evaluated.loss, seen[2].evaluated.scalars)
    assert [m.step for m in run(4, evaluate=HELD_OUT) if m.evaluated is not None] == [4]


def test_an_evaluation_is_in_the_progress_line(capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = started()
    with trainer:
        seen = list(trainer.train(batches(), 60, evaluate=HELD_OUT, evaluate_every=50))
    lines = capsys.readouterr().err.splitlines()
    assert seen[49].evaluated is not None
    (evaluated,) = [line for line in lines if line.split()[1] == "50"]
    assert f"evaluated: loss {seen[49].evaluated.loss:.4f}  near" in evaluated


def test_a_callback_gets_each_step_with_its_evaluation() -> None:
    called: list[tuple[Metrics, Any]] = []
    seen = run(3, evaluate=HELD_OUT, callbacks=[lambda metrics, trainer: called.append((metrics, trainer.steps))])
    assert called == [(m, m.step) for m in seen]
    assert seen[-1].evaluated is not None


@pytest.mark.parametrize(
    ("answer", "steps"),
    [
        *((answer, 2) for answer in (True, np.bool_(True), torch.tensor(True))),
        *((answer, 4) for answer in (False, None, "run-17", 1, np.bool_(False))),
    ],
)
def test_a_callback_that_returns_true_ends_the_training(answer: object, steps: int) -> None:
    """What a logger's call returns may count as true in Python, and ends nothing."""
    assert len(run(4, callbacks=[lambda metrics, _: answer if metrics.step == 2 else None])) == steps


def test_all_callbacks_are_called_where_one_stops() -> None:
    last: list[int] = []
    run(4, callbacks=[lambda metrics, _: metrics.step == 2, lambda metrics, _: last.append(metrics.step)])
    assert last == [1, 2]


# ---------------------------------------------------------------------- early stopping
@pytest.mark.parametrize(
    ("settings", "values", "stops"),
    [
        ({"patience": 2}, [3, 2, 2, 1, 1, 1], 6),
        ({"patience": 2}, [3, 2, 1, 0.5], None),
        ({"patience": 1}, [3, 3], 2),
        ({"patience": 2, "mode": "max"}, [1, 2, 2, 1], 4),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.5], 2),
        ({"patience": 2}, [NAN, NAN], 2),
        ({"patience": 2}, [NAN, 3, NAN, 2, NAN, 2], 6),
        ({"patience": 2, "mode": "max"}, [1, NAN, NAN], 3),
        ({"patience": 1}, [float("inf"), float("inf")], 2),
        ({"patience": 1, "mode": "max"}, [float("-inf"), 1, 2, 2], 4),
    ],
)
def test_early_stopping_counts_values_without_improvement(
    settings: dict[str, Any], values: list[float], stops: int | None
) -> None:
    stopping = EarlyStopping("loss", **settings)
    answers = [stopping(measured(value)) for value in values]
    assert answers == [index + 1 == stops for index in range(len(values))]


def test_early_stopping_counts_evaluations_alone() -> None:
    stopping = EarlyStopping(patience=1)
    values = [None, 2.0, None, None, 2.0]
    assert [stopping(measured(9.0, evaluated=value)) for value in values] == [False, False, False, False, True]


def stopping(patience: int = 3) -> EarlyStopping:
    return EarlyStopping("loss", patience=patience, min_delta=100.0)  # only the first loss is an improvement


def test_a_run_that_was_ended_early_stays_ended(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it has not run out of batches
        first = run(20, folder, every=2, callbacks=[stopping()])
    assert [m.step for m in first] == [1, 2, 3, 4]
    assert run(20, folder, callbacks=[stopping()]) == []
    assert [m.step for m in run(20, folder, callbacks=[stopping(5)])] == [5, 6]  # two more without improvement
    assert [m.step for m in run(8, folder)] == [7, 8]  # without it, training goes on


def test_early_stopping_counts_on_after_a_resumption(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert len(run(3, folder, callbacks=[stopping()])) == 3
    logs: list[int] = []

    def log(metrics: Metrics, trainer: Any) -> None:  # one without a state, put before
        logs.append(metrics.step)

    assert [m.step for m in run(20, folder, callbacks=[log, stopping()])] == [4]
    assert logs == [4]


def test_two_of_a_kind_are_told_apart_and_another_metric_starts_afresh(tmp_path: Path) -> None:
    folder, patient = tmp_path / "run", EarlyStopping("near", patience=50, mode="max")
    run(3, folder, callbacks=[stopping(), patient])
    first, second = stopping(7), EarlyStopping("near", patience=50, mode="max")
    run(3, folder, callbacks=[first, second])
    assert (first.best, first.without_improvement) != (second.best, second.without_improvement)
    assert second.state_dict() == patient.state_dict()
    other = EarlyStopping("near", patience=2, mode="max")
    run(3, folder, callbacks=[other])
    assert (other.best, other.without_improvement) == (None, 0)


def test_a_second_call_of_train_does_not_go_on_after_a_stop() -> None:
    trainer, _ = started()
    data, early = list(islice(batches(), 4)), stopping(2)
    with trainer:
        seen = [
            m.step for epoch in (1, 2, 3) for m in trainer.train(data, 4 * epoch, callbacks=[early], progress=False)
        ]
    assert seen == [1, 2, 3]


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("patience=0", {"patience": 0}),
        ("patience=True", {"patience": True}),
        ("patience=1.5", {"patience": 1.5}),
        ("mode='least'", {"mode": "least"}),
        ("min_delta=-1", {"min_delta": -1}),
        ("min_delta=nan", {"min_delta": NAN}),
    ],
)
def test_settings_of_early_stopping_that_are_refused(what: str, settings: dict[str, Any]) -> None:
    with pytest.raises(ShardcError, match=what) as caught:
        EarlyStopping(**settings)
    assert caught.value.code == "SC553"


# ---------------------------------------------------------------------- what ends training
@pytest.mark.sampled(2)
@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("where", ["callback", "evaluation", "evaluation's batches"])
@pytest.mark.parametrize("how", ["error", "signal"])
def test_what_ends_a_callback_or_an_evaluation_leaves_a_checkpoint(tmp_path: Path, where: str, how: str) -> None:
    whole = run(6)
    trainer, _ = started()

    def end(*_: object) -> None:
        if trainer.steps == 4:
            if how == "error":
                raise Lost
            os.kill(os.getpid(), signal.SIGINT)

    class Loader:
        def __iter__(self) -> Iterator[Any]:
            if where == "evaluation's batches":
                end()
            yield from HELD_OUT

    evaluate = trainer.evaluate

    def evaluated(*arguments: Any) -> Any:
        end()
        return evaluate(*arguments)

    if where == "evaluation":
        trainer.evaluate = evaluated
    options = {"callbacks": [end]} if where == "callback" else {"evaluate": Loader(), "evaluate_every": 2}
    with trainer:
        training = trainer.train(batches(), 6, checkpoint=tmp_path / "run", progress=False, **options)
        assert [m.step for m in islice(training, 3)] == [1, 2, 3]
        with pytest.raises(Lost if how == "error" else KeyboardInterrupt):
            next(training)
    rest = run(6, tmp_path / "run")
    assert [m.step for m in rest] == [5, 6]
    assert [m.loss for m in rest] == [m.loss for m in whole[4:]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_batches_that_end_before_the_steps_are_said_once(tmp_path: Path) -> None:
    trainer, _ = started()
    with trainer, pytest.warns(UserWarning, match="to step 9; its batches ended after step 3") as caught:
        list(trainer.train(islice(batches(), 3), 9, checkpoint=tmp_path / "run", progress=False))
    assert len(caught) == 1
    assert Path(caught[0].filename).name == Path(__file__).name
    assert [m.step for m in run(4, tmp_path / "run")] == [4]


@pytest.mark.parametrize(
    ("code", "what", "arguments"),
    [
        ("SC553", "evaluate every 3 steps, and on no batches", {"evaluate_every": 3}),
        ("SC553", "evaluate_every=-1", {"evaluate": HELD_OUT, "evaluate_every": -1}),
        ("SC553", "evaluate_every=2.5", {"evaluate": HELD_OUT, "evaluate_every": 2.5}),
        ("SC553", "a dict as batches", {"evaluate": HELD_OUT[0]}),
        ("SC553", "an iterator, which is used up", {"evaluate": iter(HELD_OUT)}),
        ("SC553", "a function as callbacks(.|\n)*a list", {"callbacks": lambda *_: None}),
        ("SC553", "cannot be called: a int", {"callbacks": [3]}),
        ("SC552", "is of evaluations", {"callbacks": [EarlyStopping()]}),
        ("SC552", "no metric 'accuracy'", {"callbacks": [EarlyStopping("accuracy")]}),
    ],
)
def test_what_is_refused(code: str, what: str, arguments: dict[str, Any]) -> None:
    trainer, _ = started()
    with trainer, pytest.raises(ShardcError, match=what) as caught:
        next(trainer.train(batches(), 2, progress=False, **arguments))
    assert caught.value.code == code


def test_an_evaluation_of_a_program_from_a_file_says_so(tmp_path: Path) -> None:
    import torch.nn as nn

    model = nn.Linear(3, 3)
    program = shardc.compile(model, torch.ones(4, 3), mesh="dp=2", loss=lambda y, _: y.square().mean())
    trainer = type(program).from_json(program.to_json()).launch(state=dict(model.state_dict()))
    with trainer, pytest.raises(ShardcError, match="without its model") as caught:
        list(trainer.train([torch.ones(4, 3)], 1, evaluate=[torch.ones(4, 3)], progress=False))
    assert caught.value.code == "SC546"
