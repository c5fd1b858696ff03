"""Callbacks of the loop: functions that get each step's metrics, and may end the training.

    def log(metrics, trainer):
        if trainer.leads:
            writer.add_scalar("loss", metrics.loss, metrics.step)

    trainer.train(batches, 1000, evaluate=held_out, evaluate_every=100, callbacks=[log, EarlyStopping(patience=3)])

Each rank calls them after each step, and the evaluation if there is one; what they do to the schedule or ask of the
trainer must be the same on all. One that returns True on any rank ends the training on all, after this step. One with a
`state_dict` and a `load_state_dict` is saved with the checkpoint, and restored from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shardc.ir.diagnostic import error
from shardc.runtime.train.lr_schedule import check_metric
from shardc.runtime.train.metrics import Metrics

Callback = Callable[[Metrics, Any], object]  # the metrics and the trainer


@dataclass
class EarlyStopping:
    """A callback that ends training when a metric has not improved for `patience` of its values in a row.

    `monitor` names a number of the metrics: "loss" of each step, or of evaluations "evaluated.loss",
    "evaluated.accuracy". It improves when it is better than the best so far by more than `min_delta`; a NaN is no
    improvement. A run that it has ended and that is resumed from its checkpoint stays ended, unless the patience is
    raised.
    """

    monitor: str = "evaluated.loss"
    patience: int = 3
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    best: float | None = field(default=None, init=False)
    without_improvement: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        _check_settings(self.patience, self.mode, self.min_delta)

    def __call__(self, metrics: Metrics, trainer: object = None) -> bool:
        value = metrics.value(self.monitor)
        if value is None:
            return False
        if self._improves(value):
            self.best, self.without_improvement = value, 0
        else:
            self.without_improvement += 1
        return self.stopped

    @property
    def stopped(self) -> bool:
        return self.without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "mode": self.mode,
            "best": self.best,
            "without_improvement": self.without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what was counted, unless it was of another metric."""
        if (state["monitor"], state["mode"]) == (self.monitor, self.mode):
            self.best, self.without_improvement = state["best"], state["without_improvement"]

    def _improves(self, value: float) -> bool:
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else self.best - value if self.mode == "min" else value - self.best
        return gain > self.min_delta


def _check_settings(patience: object, mode: object, min_delta: object) -> None:
    """Raise ShardcError (SC553) for settings of an EarlyStopping by which it would never stop, or always."""
    if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
        wrong, hint = f"patience={patience!r}", "give a whole number from 1: of values without improvement"
    elif mode not in ("min", "max"):
        wrong, hint = f"mode={mode!r}", '"min" if less is better, "max" if more is'
    elif not (isinstance(min_delta, int | float) and 0 <= min_delta < math.inf):
        wrong, hint = f"min_delta={min_delta!r}", "give a number from 0"
    else:
        return
    raise error("SC553", f"EarlyStopping is given {wrong}", hint=hint)


def check_callbacks(callbacks: object, evaluates: bool) -> None:
    """Raise ShardcError for what cannot be called with metrics and trainer (SC553), and for an EarlyStopping whose
    metric no step will have (SC552)."""
    if not isinstance(callbacks, list | tuple):
        message = f"train is given a {type(callbacks).__name__} as callbacks"
        raise error("SC553", message, hint="give a list of functions of (metrics, trainer)")
    for callback in callbacks:  # pyright: ignore[reportUnknownVariableType]
        if not callable(callback):
            message = f"train is given a callback that cannot be called: a {type(callback).__name__}"
            hint = "a callback is a function of (metrics, trainer), called after each step"
            raise error("SC553", message, hint=hint)
        if isinstance(callback, EarlyStopping):
            check_metric(callback.monitor, evaluates)


def call_back(callbacks: Sequence[Callback], metrics: Metrics, trainer: object) -> bool:
    """Call all of them; whether one asks to stop."""
    answers = [callback(metrics, trainer) for callback in callbacks]
    return any(map(_is_true, answers))


def _is_true(answer: Any) -> bool:
    """True, also as a tensor or of numpy; not whatever else counts as true, such as what a logger's call returns."""
    return answer is True or (str(getattr(answer, "dtype", "")) in ("bool", "torch.bool") and bool(answer))
