"""The loop around a trainer's steps: metrics, evaluations, checkpoints, and going on from the last one.

    for metrics in trainer.train(batches, steps=1000, checkpoint="run", every=100, scheduler=scheduler):
        ...                                      # step 17  loss 3.2104  norm 1.02  lr 0.001  8.1k tokens/s  512 MiB

Started again with the same arguments, it goes on where the last whole checkpoint stands, and makes the very steps that
it would have made: parameters, optimizer state, seed and step are the checkpoint's, with the schedule and the learning
rates, and the batches go on where they stood (`loading`). Called once more, it trains on all that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic, error
from shardc.runtime.checkpoint.folder import place_of, present
from shardc.runtime.train.after_step import AfterStep
from shardc.runtime.train.callbacks import Callback
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.device_copy import Copier
from shardc.runtime.train.expert_load import Layer
from shardc.runtime.train.interruptions import Interruptions
from shardc.runtime.train.loading import Loading, kept, resumed
from shardc.runtime.train.loop_state import LoopState, Rates, Stateful, rates_by_optimizer
from shardc.runtime.train.lr_schedule import Scheduler, Schedulers, rates_of, schedulers_of
from shardc.runtime.train.metrics import Evaluated, Metrics, measure
from shardc.runtime.train.progress_line import ProgressLine
from shardc.runtime.train.rank_part import RankPart

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints


class Steps(Protocol):
    """The part of a trainer that the loop uses."""

    steps: int
    gradients_used: bool  # by the caller, since the launch

    @property
    def updates(self) -> bool: ...
    @property
    def expert_layers(self) -> Sequence[Layer]: ...
    @property
    def leads(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def consensus(self) -> Consensus: ...
    @property
    def own_part(self) -> RankPart | None: ...
    @property
    def data_rank(self) -> int: ...
    @property
    def data_ranks(self) -> int: ...
    @property
    def copier(self) -> Copier | None: ...

    run: Run
    intact: bool  # no step was left halfway
    interrupted: bool  # all ranks, after the same step

    def step(self, batch: Any) -> Any: ...
    def evaluate(self, batches: Iterable[Any], steps: int | None = None) -> Evaluated: ...
    def rates(self) -> Mapping[str, torch.Tensor]: ...
    def save(self, path: str | Path, *, extra: Mapping[str, Any] | None, asynchronous: bool) -> Any: ...
    def load(self, path: str | Path) -> dict[str, Any]: ...


@dataclass
class Run:
    """Where a trainer stands in its calls of `train`."""

    place: Path | None = None  # the checkpoint that holds the trainer's state,
    step: int = -1  # at this step
    begun: int | None = None  # the step at which the batches began that a checkpoint was made among,
    data: object = None  # and where among them, by `loading.kept`;
    call: int = 1  # of `train`, in which it was
    calls: int = 0  # of `train`, so far
    rates: Rates = ()  # of the optimizers' groups, at the first call

    def take_up(self, trainer: Steps, folder: Path, state: LoopState) -> None:
        """Resume from a checkpoint, unless the trainer is already at it."""
        if present(folder) and (self.place, self.step) != (folder, trainer.steps):
            extra = trainer.load(folder)
            trainer.run = self
            state.load(extra)
            self.begun, self.call, self.data = int(extra.get("begun", 0)), int(extra.get("call", 1)), extra.get("data")
            self.place, self.step = folder, trainer.steps


def train(
    trainer: Steps,
    batches: Iterable[Any],
    steps: int | None = None,
    *,
    epochs: int | None = None,
    checkpoint: str | Path | None = None,
    every: int = 0,
    scheduler: Schedulers = None,
    monitor: str | None = None,
    evaluate: Iterable[Any] | None = None,
    evaluate_every: int = 0,
    callbacks: Sequence[Callback] = (),
    stateful: Mapping[str, Stateful] | None = None,
    resume: bool = True,
    progress: bool = True,
    prefetch: bool = True,
) -> Iterator[Metrics]:
    """What `Trainer.train` does, and says of its arguments."""
    _check_numbers(batches, steps, epochs, every, evaluate_every, checkpoint)
    schedulers = schedulers_of(scheduler)
    after = AfterStep(trainer, schedulers, monitor, callbacks, evaluate, evaluate_every)
    after.check(batches)
    run = trainer.run
    run.rates = run.rates or rates_by_optimizer(trainer.optimizers)
    state = LoopState.of(schedulers, stateful, callbacks, trainer.optimizers, run.rates)
    folder = None if checkpoint is None else place_of(checkpoint)
    if folder is not None:
        state.check()
        trainer.checkpoints.reserve(folder)
        if resume:
            run.take_up(trainer, folder, state)
    run.calls += 1
    later = run.begun is not None and run.call > run.calls if steps is None else trainer.steps > steps
    if later and trainer.leads:
        _note_of_later_call(trainer.steps, steps, run)
    if later or after.stopped_before():  # it was saved in a later call, which will come
        return
    first_step = trainer.steps if run.begun is None else run.begun
    position = trainer.steps - first_step
    if run.data is not None:
        position = resumed(run.data, trainer.data_rank, trainer.data_ranks, batches)
    run.begun = run.data = None
    saved = resumed_step = trainer.steps
    own, copier = trainer.own_part, trainer.copier if prefetch else None
    ahead = prefetch and trainer.device.type == "cuda"
    loading = Loading(batches, epochs, position, keeps=folder is not None, own=own, ahead=ahead, copy=copier)
    last = steps if steps is not None else None if loading.total is None else first_step + loading.total
    line = ProgressLine(trainer.steps, last) if progress and trainer.leads else None

    def save(asynchronous: bool) -> None:
        nonlocal saved
        if folder is not None and saved != trainer.steps:
            data = kept(loading.position)
            if own is not None:
                positions = trainer.checkpoints.gathered(loading.position)
                data = kept(loading.position, [positions[own.coordinates.index(i)] for i in range(own.parts.count)])
            extra = {"begun": first_step, "call": run.calls, "data": data, **state.save()}
            trainer.save(folder, extra=extra, asynchronous=asynchronous)
            saved = run.step = trainer.steps
            run.place = folder

    stop = trainer.interrupted = False
    trainer.consensus.await_decision()
    with line or nullcontext(), Interruptions(together=not trainer.consensus.alone) as interruptions:
        try:
            for fetched in loading.take(None if steps is None else steps - trainer.steps):
                start = time.perf_counter()
                with interruptions.later():
                    result = trainer.step(fetched.for_step)
                    loading.look_ahead()
                    metrics = measure(result, fetched.batch, trainer, start, rates_of(schedulers))
                    metrics, stop = after.finish(metrics, interruptions, is_last=metrics.step == last)
                if line is not None:
                    line.show(metrics)
                yield metrics
                if trainer.leads and trainer.steps == resumed_step + 1:
                    _warn_of_nothing(trainer, schedulers)
                if every and trainer.steps % every == 0:
                    save(asynchronous=True)  # with what the caller did after the step
                if stop:
                    break
        except BaseException:
            with suppress(Exception), interruptions.later():  # what ended the loop is what there is to say
                complete = trainer.intact and not trainer.consensus.lost
                if folder is not None and complete and trainer.consensus.together(trainer.steps):
                    save(asynchronous=False)
            raise
        save(asynchronous=False)
        trainer.checkpoints.settle()  # the last of those in the background is there when the loop ends
        if interruptions.came:
            interruptions.end(interruptions.came)
    if trainer.leads and not stop and steps is not None and trainer.steps < steps:
        _warn_of_too_few(trainer.steps, steps)


def _note_of_later_call(reached: int, steps: int | None, run: Run) -> None:
    """Say (SC553) that a call makes no step, since the checkpoint was made in a later one."""
    what = f"up to step {steps}" if steps is not None else f"number {run.calls}"
    call = "" if steps is not None else f", in call {run.call}"
    message = f"this call of train, {what}, makes no step: the checkpoint is of step {reached}{call}"
    hint = "it goes on in that call; or call train with resume=False, or with another folder"
    warn(str(Diagnostic("SC553", message, "note", hint=hint)))


def _warn_of_too_few(made: int, steps: int) -> None:
    """Warn (SC553) where the batches ended before the steps."""
    message = f"train was to go to step {steps}; its batches ended after step {made}"
    hint = "give more batches, or call train again: it goes on from here"
    warn(str(Diagnostic("SC553", message, "warning", hint=hint)))


def _check_numbers(
    batches: object, steps: object, epochs: object, every: object, evaluate_every: object, checkpoint: object
) -> None:
    """Raise ShardcError (SC553) for arguments of `train` that it cannot use, or would use for nothing."""
    if (steps is None) == (epochs is None):
        what = "neither steps nor epochs" if steps is None else "both steps and epochs"
        raise error(
            "SC553", f"train is given {what}", hint="give steps=1000, the step to end at, or epochs=3, of passes"
        )
    wholes = {"steps": 0 if steps is None else steps, "epochs": 0 if epochs is None else epochs, "every": every}
    for name, value in {**wholes, "evaluate_every": evaluate_every}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise error("SC553", f"train is given {name}={value!r}", hint="give a whole number from 0")
    if every and checkpoint is None:
        message = f"train is to save every {every} steps, and nowhere"
        raise error("SC553", message, hint="give checkpoint=, the path of a folder, or leave every= out")
    if not isinstance(batches, Iterable):
        raise error("SC553", f"train is given a {type(batches).__name__} as batches", hint="give a list or a loader")


def _warn_of_nothing(trainer: Steps, schedulers: Sequence[Scheduler]) -> None:
    """Warn (SC553) after a first step that changed no parameter, and after which the caller has done nothing either."""
    hint = what = ""
    if not trainer.gradients_used and not trainer.updates:
        hint = "pass optimizer= to compile, or descend in the loop over train(...): trainer.sgd(lr)"
        what = "the program has no optimizer"
    elif not schedulers and trainer.updates and (rates := trainer.rates()) and not any(rates.values()):
        hint = "set the optimizer's lr, or pass the scheduler that raises it: train(..., scheduler=...)"
        what = "every learning rate of the optimizer is 0"
    if hint:
        warning = Diagnostic("SC553", f"train makes steps that change no parameter: {what}", "warning", hint=hint)
        warn(str(warning))
