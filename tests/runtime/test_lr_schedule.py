"""Schedules in the loop: stepped by it, or by the caller; after a resumption the rates are those of a whole run."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import shardc
from shardc.ir.diagnostic import ShardcError
from shardc.runtime.train.loop_state import plain, restored
from shardc.runtime.train.metrics import Metrics
from shardc.runtime.train.trainer import Trainer
from tests.runtime.looped import HELD_OUT, RATE, Line, batch, batches, plateau, rates, started

STEPS = 8
Loop = Callable[[Trainer, torch.optim.Optimizer, Path, int], list[Metrics]]


def by_metric(monitor: str, **options: Any) -> Loop:
    """The loop steps a ReduceLROnPlateau."""

    def loop(trainer: Trainer, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> list[Metrics]:
        schedule = plateau(optimizer)
        arguments = {"checkpoint": folder, "every": 2, "scheduler": schedule, "monitor": monitor, "progress": False}
        return list(trainer.train(batches(), steps, **arguments, **options))

    return loop


def by_hand(trainer: Trainer, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> list[Metrics]:
    """The caller steps it, with an evaluation of its own, after every other step."""
    schedule, seen = plateau(optimizer), list[Metrics]()
    for metrics in trainer.train(
        batches(), steps, checkpoint=folder, every=2, stateful={"plateau": schedule}, progress=False
    ):
        seen.append(Metrics(metrics.step, metrics.loss, None, 0.0, 0, 0, (optimizer.param_groups[0]["lr"],)))
        if metrics.step % 2 == 0:
            schedule.step(trainer.evaluate(HELD_OUT).loss)
    return seen


def stepwise(make: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    """The loop steps a schedule that wants no metric."""

    def loop(trainer: Trainer, optimizer: torch.optim.Optimizer, folder: Path, steps: int) -> list[Metrics]:
        return list(
            trainer.train(batches(), steps, checkpoint=folder, every=2, scheduler=make(optimizer), progress=False)
        )

    return loop


LOOPS: dict[str, Loop] = {
    "the step's loss": by_metric("loss"),
    "evaluations": by_metric("evaluated.loss", evaluate=HELD_OUT, evaluate_every=2),
    "by hand": by_hand,
    "milestones by number": stepwise(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [3, 5, 7])),
    "one after another": stepwise(
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.MultiStepLR(optimizer, [2, 4])],
            milestones=[3],
        )
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", LOOPS)
def test_a_run_that_was_stopped_has_the_rates_of_a_whole_one(tmp_path: Path, kind: str) -> None:
    loop = LOOPS[kind]
    trainer, optimizer = started()
    with trainer:
        whole = loop(trainer, optimizer, tmp_path / "whole", STEPS)
    assert len(set(rates(whole))) >= 3, "the schedule does nothing that could be lost"
    trainer, optimizer = started()
    with trainer:
        first = loop(trainer, optimizer, tmp_path / "run", 4)
    trainer, optimizer = started()
    with trainer:
        rest = loop(trainer, optimizer, tmp_path / "run", STEPS)
    assert [m.step for m in rest] == [5, 6, 7, 8]
    assert rates(first) + rates(rest) == rates(whole)
    assert [m.loss for m in (*first, *rest)] == [m.loss for m in whole]


def test_a_checkpoint_holds_what_the_caller_did_after_its_step(tmp_path: Path) -> None:
    """It is saved when the caller is done with the step: here in the background, with nothing saved at the end."""
    trainer, optimizer = started()
    schedule = plateau(optimizer)
    folder, killed = tmp_path / "run", tmp_path / "killed"
    with trainer:
        stateful = {"plateau": schedule}
        for metrics in trainer.train(batches(), 5, checkpoint=folder, every=2, stateful=stateful, progress=False):
            if metrics.step == 5:
                trainer.checkpoints.settle()
                shutil.copytree(folder, killed)
                break
            schedule.step(metrics.step)  # a metric that grows: worse at each step
            reduced = optimizer.param_groups[0]["lr"]
    trainer, optimizer = started()
    fresh = plateau(optimizer)
    with trainer:
        next(trainer.train(batches(), 6, checkpoint=killed, stateful={"plateau": fresh}, progress=False))
    assert (fresh.last_epoch, fresh.best) == (4, 1.0)
    assert optimizer.param_groups[0]["lr"] == reduced == RATE * 0.5**3


@pytest.mark.parametrize("rate", [RATE, 0.4])
def test_a_rate_that_the_caller_sets_is_in_the_checkpoint(tmp_path: Path, rate: float) -> None:
    """It is taken up where the script begins as it did; one that begins with another rate means that one."""
    whole = _set_by_hand(tmp_path / "whole", RATE, 6)
    assert [used for _, used in whole] == [RATE] * 3 + [RATE / 4] * 3
    first = _set_by_hand(tmp_path / "run", RATE, 4)
    rest = _set_by_hand(tmp_path / "run", rate, 6)
    if rate == RATE:
        assert first + rest == whole
    else:
        assert [used for _, used in rest] == [rate] * 2


def _set_by_hand(folder: Path, rate: float, steps: int) -> list[tuple[float | None, float]]:
    """Each step's loss, and the rate by which it was made."""
    trainer, optimizer = started(rate)
    group, seen = optimizer.param_groups[0], list[tuple[float | None, float]]()
    with trainer:
        for metrics in trainer.train(batches(), steps, checkpoint=folder, every=2, progress=False):
            seen.append((metrics.loss, group["lr"]))
            if metrics.step == 3:
                group["lr"] = RATE / 4
    return seen


def test_plain_gradient_descent_in_the_loop_is_in_the_checkpoint(tmp_path: Path) -> None:
    trainer = _without_optimizer()
    folder, killed = tmp_path / "run", tmp_path / "killed"
    with trainer:
        for metrics in trainer.train(batches(), 3, checkpoint=folder, every=2, progress=False):
            if metrics.step == 3:
                trainer.checkpoints.settle()
                shutil.copytree(folder, killed)
                break
            trainer.sgd(0.1)
            expected = trainer.state_dict()
    other = _without_optimizer()
    with other:
        other.load(killed)
        assert other.steps == 2
        for name, value in other.state_dict().items():
            assert torch.equal(value, expected[name]), name


def _without_optimizer() -> Trainer:
    import shardc
    from tests.runtime.looped import Line, batch

    torch.manual_seed(0)
    return shardc.compile(Line(), batch(0), mesh="dp=2", plan={"inputs": {"x": "dp, -"}}).launch()


def test_the_metric_that_is_named_is_the_one_it_gets() -> None:
    class Recorder(lr_scheduler.ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            got.append(metrics)

    def run(monitor: str) -> list[Metrics]:
        got.clear()
        trainer, optimizer = started()
        with trainer:
            return list(
                trainer.train(
                    batches(), 5, scheduler=Recorder(optimizer), monitor=monitor,
                    evaluate=HELD_OUT, evaluate_every=2, progress=False,
                )
            )  # fmt: skip

    got: list[Any] = []
    seen = run("loss")
    assert got == [m.loss for m in seen]
    seen = run("near")
    assert got == [m.scalars["near"] for m in seen]
    for monitor, number in (("evaluated.loss", "loss"), ("evaluated.near", "near")):
        evaluations = [m.evaluated for m in run(monitor) if m.evaluated is not None]
        assert len(evaluations) == 3  # after steps 2, 4 and the last
        assert got == [one.loss if number == "loss" else one.scalars[number] for one in evaluations]


def test_a_metric_that_is_no_number_is_no_improvement() -> None:
    """As in eager PyTorch: the rate falls once the patience is over."""
    trainer, optimizer = started()
    schedule = plateau(optimizer, patience=2)
    data = [{"x": torch.full((4, 3), float("nan"))}] * 5
    with trainer:
        seen = list(trainer.train(data, 5, scheduler=schedule, monitor="loss", progress=False))
    assert rates(seen) == [RATE, RATE, RATE, RATE / 2, RATE / 2]


@pytest.mark.parametrize(
    ("code", "what", "arguments"),
    [
        ("SC552", "ReduceLROnPlateau wants a metric.*told none(.|\n)*monitor=(.|\n)*stateful=", {"scheduler": "own"}),
        ("SC552", "is of evaluations(.|\n)*evaluate_every", {"scheduler": "own", "monitor": "evaluated.loss"}),
        ("SC552", "no metric 'los'(.|\n)*did you mean 'loss'", {"scheduler": "own", "monitor": "los"}),
        ("SC552", "named by text", {"scheduler": "own", "monitor": 3}),
        ("SC553", "would change nothing", {"scheduler": "another's", "monitor": "loss"}),
        ("SC553", "no scheduler to step with it", {"monitor": "loss"}),
        ("SC553", "a StepLR to step with it", {"scheduler": "steps", "monitor": "loss"}),
        ("SC553", "a list as stateful", {"stateful": [1]}),
        ("SC553", "a int as 'step'.*no state_dict", {"stateful": {"step": 3}}),
    ],
)
def test_what_is_refused(code: str, what: str, arguments: dict[str, Any]) -> None:
    trainer, optimizer = started()
    another = torch.optim.SGD([torch.ones(1)], lr=0.1)
    kinds = {
        "own": plateau(optimizer),
        "another's": plateau(another),
        "steps": lr_scheduler.StepLR(optimizer, 1),
    }
    if "scheduler" in arguments:
        arguments = arguments | {"scheduler": kinds[arguments["scheduler"]]}
    with trainer, pytest.raises(ShardcError, match=what) as caught:
        next(trainer.train(batches(), 2, progress=False, **arguments))
    assert caught.value.code == code


GROUPED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 10, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=9.0, min_lr=[0.001]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_a_scheduler_does_not_know(name: str) -> None:
    """Torch itself fails there without a word of the group, or takes it; ours says what mends it."""
    model = Line()
    optimizer = torch.optim.SGD([model.a.weight], lr=RATE)
    trainer = shardc.compile(model, batch(0), mesh="dp=2", plan={"inputs": {"x": "dp"}}, optimizer=optimizer).launch()
    scheduler = GROUPED[name](optimizer)
    monitor = "loss" if name == "ReduceLROnPlateau" else None
    steps = trainer.train([batch(0)] * 5, 5, scheduler=scheduler, monitor=monitor, progress=False)
    with trainer:
        next(steps)
        optimizer.add_param_group({"params": [model.a.bias]})
        trainer.recompile()
        if name == "StepLR":
            assert [list(metrics.learning_rates) for metrics in steps][-1] == [RATE / 2**4, RATE / 2**3]
            return
        with pytest.raises(ShardcError, match=f"a {name} has values for 1 of the optimizer's 2 parameter") as caught:
            list(steps)
    assert caught.value.code == "SC553"
    if name == "LambdaLR":
        assert "scheduler.base_lrs.append(...), scheduler.lr_lambdas.append(...)" in str(caught.value)


def test_a_metric_that_only_an_evaluation_shows_to_be_missing() -> None:
    trainer, optimizer = started()
    arguments = {"scheduler": plateau(optimizer), "monitor": "evaluated.nears", "evaluate": HELD_OUT}
    with trainer, pytest.raises(ShardcError, match=r"did you mean 'evaluated\.near'") as caught:
        list(trainer.train(batches(), 2, progress=False, **arguments))
    assert caught.value.code == "SC552"


def test_states_are_what_they_were_after_json() -> None:
    state: dict[str, Any] = {
        "milestones": Counter({30: 1, 60: 2}),
        "by rank": {0: [1.5, {2: "x"}]},
        "plain": {"a": [1, None, True, float("inf")]},
        "rate": torch.tensor(0.5, dtype=torch.float64),
        "empty": {},
    }
    back = restored(json.loads(json.dumps(plain(state))))
    assert back == state | {"rate": 0.5}
    assert isinstance(back["milestones"], Counter)
    assert not isinstance(back["by rank"], Counter)


def test_a_state_that_json_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    class Holder:
        def state_dict(self) -> Mapping[str, Any]:
            return {"tensor": torch.ones(3)}

        def load_state_dict(self, state: Any) -> None:
            raise NotImplementedError

    trainer, _ = started()
    with trainer, pytest.raises(ShardcError, match="state of 'holder', a Holder, is not plain data") as caught:
        next(trainer.train(batches(), 2, checkpoint=tmp_path / "run", stateful={"holder": Holder()}))
    assert trainer.steps == 0
    assert caught.value.code == "SC408"


@pytest.mark.parametrize("order", [(1,), (1, 0)])
def test_a_schedule_is_resumed_by_that_of_the_same_optimizer(order: tuple[int, ...], tmp_path: Path) -> None:
    """Of others the rates and their bases would be those of another optimizer."""

    def trained(order: tuple[int, ...], steps: int) -> list[float]:
        torch.manual_seed(0)
        model = Line()
        optimizers = [torch.optim.SGD([model.a.weight], lr=0.1), torch.optim.SGD([model.a.bias], lr=0.01)]
        program = shardc.compile(model, batch(0), mesh="dp=2", plan={"inputs": {"x": "dp"}}, optimizer=optimizers)
        schedules = [torch.optim.lr_scheduler.LambdaLR(optimizers[i], lambda step: 1 / (1 + step)) for i in order]
        options: dict[str, Any] = {"scheduler": schedules, "checkpoint": tmp_path / "run", "progress": False}
        for _ in program.launch().train([batch(0)] * 4, steps, **options):
            pass
        return [float(each.param_groups[0]["lr"]) for each in optimizers]

    saved = order[::-1] if len(order) > 1 else (0,)
    trained(saved, 1)
    were, are = (", ".join(map(str, each)) for each in (saved, order))
    with pytest.raises(ShardcError, match=rf"SC553.*are of optimizers {were} of the program's, these are of {are}"):
        trained(order, 2)
    assert trained(saved, 2) == pytest.approx([0.1 / 3, 0.01 / 3 if len(order) > 1 else 0.01])
