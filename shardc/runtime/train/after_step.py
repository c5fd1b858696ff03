"""What the loop does after a step, before the caller gets its metrics: evaluate, step the schedule, call back, decide.

All ranks do it alike, and decide together whether training goes on (`consensus`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from shardc.ir.diagnostic import error
from shardc.runtime.train.callbacks import Callback, call_back, check_callbacks
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.evaluate import check_batches
from shardc.runtime.train.interruptions import Interruptions
from shardc.runtime.train.loading import draws_taken_back, has_state
from shardc.runtime.train.lr_schedule import Scheduler, check_schedulers, step_schedules
from shardc.runtime.train.metrics import Evaluated, Metrics


class Evaluates(Protocol):
    """The part of a trainer that is used after a step."""

    interrupted: bool

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]: ...
    @property
    def consensus(self) -> Consensus: ...
    def evaluate(self, batches: Iterable[Any], steps: int | None = None) -> Evaluated: ...


@dataclass(frozen=True)
class AfterStep:
    """The arguments of `train` that say what follows a step."""

    trainer: Evaluates
    schedulers: Sequence[Scheduler]
    monitor: str | None
    callbacks: Sequence[Callback]
    evaluate: Iterable[Any] | None
    evaluate_every: int

    def check(self, batches: object = None) -> None:
        """Raise ShardcError (SC552, SC553) for what cannot be used, or would be used for nothing."""
        evaluates = self.evaluate is not None
        check_schedulers(self.schedulers, self.monitor, self.trainer.optimizers, evaluates)
        check_callbacks(self.callbacks, evaluates)
        if self.evaluate is None:
            if self.evaluate_every:
                message = f"train is to evaluate every {self.evaluate_every} steps, and on no batches"
                raise error("SC553", message, hint="give evaluate=, a list of batches or a loader")
            return
        check_batches(self.evaluate)
        if isinstance(self.evaluate, Iterator):
            message = "train is to evaluate on an iterator, which is used up after one evaluation"
            raise error("SC553", message, hint="give a list of batches, or a loader, which begins anew")
        if self.evaluate is batches and has_state(batches):
            message = f"train is to evaluate on the very {type(batches).__name__} that it trains on"
            hint = "an evaluation would move its state, by which training goes on: make another loader of the same data"
            raise error("SC553", message, hint=hint)

    def stopped_before(self) -> bool:
        """Whether a callback had ended the training that is resumed; all ranks must call it."""
        stopped = any(getattr(callback, "stopped", False) is True for callback in self.callbacks)
        return self.trainer.consensus.decide(stop=stopped)[0]

    def finish(self, metrics: Metrics, interruptions: Interruptions, is_last: bool) -> tuple[Metrics, bool]:
        """The metrics with the evaluation, and whether the training ends; raises what interrupts it."""
        every = self.evaluate_every
        if self.evaluate is not None and (is_last or (every and metrics.step % every == 0)):
            with draws_taken_back(self.evaluate):
                metrics = replace(metrics, evaluated=self.trainer.evaluate(self.evaluate))
        stop, failure = False, None
        try:
            step_schedules(self.schedulers, self.monitor, metrics)
            stop = call_back(self.callbacks, metrics, self.trainer)
        except Exception as raised:
            failure = raised
        stop, signal = self.trainer.consensus.decide(stop, interruptions.came, failure)
        if signal and not self.trainer.consensus.alone:
            self.trainer.interrupted = True
            interruptions.end(signal)
        return metrics, stop
