"""The loop around a trainer's steps: metrics, evaluations, checkpoints, and going on from the last one.

    for metrics in trainer.train(batches, steps=1000, checkpoint="run", every=100, scheduler=scheduler):
        ...                                      # step 17  loss 3.2104  norm 1.02  lr 0.001  8.1k tokens/s  512 MiB

Started again with the same arguments, it goes on where the last whole checkpoint stands, and makes the very steps that
it would have made: parameters, optimizer state, seed and step are the checkpoint's, with the schedule and the learning
rates, and what of the batches was trained on is passed over. Called once more (a second epoch), it trains on all that
it is given.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic, error
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.checkpoint.folder import place_of, present
from shardc.runtime.train.after_step import AfterStep
from shardc.runtime.train.callbacks import Callback
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.interruptions import Interruptions
from shardc.runtime.train.loop_state import LoopState, Stateful
from shardc.runtime.train.lr_schedule import Scheduler, rates_of
from shardc.runtime.train.metrics import Evaluated, Metrics, measure
from shardc.runtime.train.progress_line import ProgressLine


class Steps(Protocol):
    """The part of a trainer that the loop uses."""

    steps: int
    gradients_used: bool  # by the caller, since the launch

    @property
    def updates(self) -> bool: ...
    @property
    def leads(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer | None: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def consensus(self) -> Consensus: ...

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
    begun: int | None = None  # the step at which the batches began that a checkpoint was made among

    def take_up(self, trainer: Steps, folder: Path, state: LoopState) -> None:
        """Resume from a checkpoint, unless the trainer is already at it."""
        if present(folder) and (self.place, self.step) != (folder, trainer.steps):
            extra = trainer.load(folder)
            trainer.run = self
            state.load(extra)
            self.begun = int(extra.get("begun", 0))
            self.place, self.step = folder, trainer.steps


def train(
    trainer: Steps,
    batches: Iterable[Any],
    steps: int,
    *,
    checkpoint: str | Path | None = None,
    every: int = 0,
    scheduler: Scheduler | None = None,
    monitor: str | None = None,
    evaluate: Iterable[Any] | None = None,
    evaluate_every: int = 0,
    callbacks: Sequence[Callback] = (),
    stateful: Mapping[str, Stateful] | None = None,
    resume: bool = True,
    progress: bool = True,
) -> Iterator[Metrics]:
    """What `Trainer.train` does, and says of its arguments."""
    _check_numbers(batches, steps, every, evaluate_every, checkpoint)
    after = AfterStep(trainer, scheduler, monitor, callbacks, evaluate, evaluate_every, last=steps)
    after.check()
    state = LoopState.of(scheduler, stateful, callbacks, trainer.optimizer)
    folder = None if checkpoint is None else place_of(checkpoint)
    run = trainer.run
    if folder is not None:
        state.check()
        trainer.checkpoints.reserve(folder)
        if resume:
            run.take_up(trainer, folder, state)
    if trainer.steps > steps or after.stopped_before():  # it was saved in a later call, which will come
        return
    first_step = trainer.steps if run.begun is None else run.begun
    run.begun = None
    saved = trainer.steps
    line = ProgressLine(trainer.steps, steps) if progress and trainer.leads else None

    def save(asynchronous: bool) -> None:
        nonlocal saved
        if folder is not None and saved != trainer.steps:
            trainer.save(folder, extra={"begun": first_step, **state.save()}, asynchronous=asynchronous)
            saved = run.step = trainer.steps
            run.place = folder

    skipped = trainer.steps - first_step
    stop = trainer.interrupted = False
    trainer.consensus.await_decision()
    with line or nullcontext(), Interruptions(together=not trainer.consensus.alone) as interruptions:
        try:
            for batch in islice(batches, skipped, skipped + steps - trainer.steps):
                start = time.perf_counter()
                with interruptions.later():
                    result = trainer.step(batch)
                    metrics = measure(result, batch, trainer, start, rates_of(scheduler))
                    metrics, stop = after.finish(metrics, interruptions)
                if line is not None:
                    line.show(metrics)
                yield metrics
                if trainer.leads and trainer.steps == first_step + skipped + 1:
                    _warn_of_nothing(trainer, scheduler)
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
        if interruptions.came:
            interruptions.end(interruptions.came)
    if trainer.leads and not stop and trainer.steps < steps:
        _warn_of_too_few(trainer.steps, steps)


def _warn_of_too_few(made: int, steps: int) -> None:
    """Warn (SC553) where the batches ended before the steps."""
    message = f"train was to go to step {steps}; its batches ended after step {made}"
    hint = "give more batches, or call train again: it goes on from here"
    warn(str(Diagnostic("SC553", message, "warning", hint=hint)))


def _check_numbers(batches: object, steps: object, every: object, evaluate_every: object, checkpoint: object) -> None:
    """Raise ShardcError (SC553) for arguments of `train` that it cannot use, or would use for nothing."""
    for name, value in (("steps", steps), ("every", every), ("evaluate_every", evaluate_every)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise error("SC553", f"train is given {name}={value!r}", hint="give a whole number from 0")
    if every and checkpoint is None:
        message = f"train is to save every {every} steps, and nowhere"
        raise error("SC553", message, hint="give checkpoint=, the path of a folder, or leave every= out")
    if not isinstance(batches, Iterable):
        raise error("SC553", f"train is given a {type(batches).__name__} as batches", hint="give a list or a loader")


def _warn_of_nothing(trainer: Steps, scheduler: Scheduler | None) -> None:
    """Warn (SC553) after a first step that changed no parameter, and after which the caller has done nothing either."""
    hint = what = ""
    if not trainer.gradients_used and not trainer.updates:
        hint = "pass optimizer= to compile, or descend in the loop over train(...): trainer.sgd(lr)"
        what = "the program has no optimizer"
    elif scheduler is None and trainer.updates and (rates := trainer.rates()) and not any(rates.values()):
        hint = "set the optimizer's lr, or pass the scheduler that raises it: train(..., scheduler=...)"
        what = "every learning rate of the optimizer is 0"
    if hint:
        warning = Diagnostic("SC553", f"train makes steps that change no parameter: {what}", "warning", hint=hint)
        warn(str(warning))
