"""Learning-rate schedules in the loop: which are refused, and when one is stepped.

A schedule steps after each step. One whose step wants a metric, as ReduceLROnPlateau's, is given the one that the
caller names: `monitor="loss"` after each step, `monitor="evaluated.loss"` after each evaluation.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch

from shardc.ir.diagnostic import error
from shardc.runtime.train.metrics import Metrics
from shardc.torch_compat import count_optimizer_step


class Scheduler(Protocol):
    """The part of a `torch.optim.lr_scheduler` that the loop uses."""

    optimizer: torch.optim.Optimizer

    def step(self, *metrics: Any) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_scheduler(
    scheduler: Scheduler | None, monitor: str | None, optimizer: torch.optim.Optimizer | None, evaluates: bool
) -> None:
    """Raise ShardcError for a scheduler that wants a metric and is given none (SC552), for one of another optimizer
    than the program's, which would change nothing, and for a metric that nobody wants (SC553)."""
    if monitor is not None:
        check_metric(monitor, evaluates)
    wants = wants_metric(scheduler)
    if scheduler is None or (monitor is not None and not wants):
        if monitor is not None:
            what = "no scheduler" if scheduler is None else f"the scheduler is a {type(scheduler).__name__}"
            hint = "it is for schedulers whose step takes a metric, as ReduceLROnPlateau's: leave it out"
            raise error("SC553", f"train is given monitor={monitor!r}, and {what} to step with it", hint=hint)
        return
    name = type(scheduler).__name__
    if wants and monitor is None:
        hint = (
            'name one: train(..., monitor="loss"), or "evaluated.loss" with evaluate=; or step it in the loop over '
            'train(..., stateful={"scheduler": scheduler}), which saves it'
        )
        raise error("SC552", f"{name} wants a metric at each step, and train is told none", hint=hint)
    if not hasattr(scheduler, "step") or getattr(scheduler, "optimizer", None) is not optimizer or optimizer is None:
        whose = "the program has none" if optimizer is None else "it is not that of the program"
        message = f"the scheduler, a {name}, would change nothing: its optimizer's rates are not used, {whose}"
        hint = "make it of the very optimizer that was passed to compile(..., optimizer=...)"
        raise error("SC553", message, hint=hint)


def wants_metric(scheduler: object) -> bool:
    """Whether a scheduler's step takes a metric."""
    step = getattr(scheduler, "step", None)
    if not callable(step):
        return False
    try:
        inspect.signature(step).bind()
    except TypeError:
        return True
    return False


def check_metric(name: object, evaluates: bool) -> None:
    """Raise ShardcError (SC552) for the name of a metric that no step will have."""
    if not isinstance(name, str):
        raise error("SC552", f"a metric is named by text, not by {name!r}", hint='as in "loss", "evaluated.loss"')
    if name.startswith("evaluated.") and not evaluates:
        hint = "give them: train(..., evaluate=batches, evaluate_every=100)"
        raise error("SC552", f"the metric '{name}' is of evaluations, and train is given no batches for any", hint=hint)


def step_schedule(scheduler: Scheduler | None, monitor: str | None, metrics: Metrics) -> None:
    """Step a schedule after a step, or if its metric is one of evaluations, after those."""
    if scheduler is None:
        return
    count_optimizer_step(scheduler.optimizer)
    if monitor is None:
        scheduler.step()
    elif (value := metrics.value(monitor)) is not None:
        scheduler.step(value)


def rates_of(scheduler: Scheduler | None) -> tuple[float, ...]:
    return () if scheduler is None else tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)
