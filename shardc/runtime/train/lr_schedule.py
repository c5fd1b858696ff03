"""Learning-rate schedules in the loop: which are refused, and when one is stepped.

A schedule steps after each step. One whose step wants a metric, as ReduceLROnPlateau's, is given the one that the
caller names: `monitor="loss"` after each step, `monitor="evaluated.loss"` after each evaluation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.train.metrics import Metrics
from shardc.torch_compat import count_optimizer_step


class Scheduler(Protocol):
    """The part of a `torch.optim.lr_scheduler` that the loop uses."""

    optimizer: torch.optim.Optimizer

    def step(self, *args: Any, **kwargs: Any) -> None: ...  # of no argument, an epoch or a metric
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


_PER_GROUP = ("base_lrs", "lr_lambdas", "min_lrs", "max_lrs")  # lists of torch's schedulers: an item a parameter group
Schedulers = Scheduler | Sequence[Scheduler] | None  # as `train` takes them: of each of the program's optimizers


def schedulers_of(given: Schedulers) -> tuple[Scheduler, ...]:
    """One, several or none. Raises ShardcError (SC553) for one that is given twice."""
    schedulers: tuple[Scheduler, ...] = tuple(given) if isinstance(given, (list, tuple)) else (given,)  # type: ignore[assignment]
    schedulers = () if given is None else schedulers
    for position, scheduler in enumerate(schedulers):
        if any(scheduler is other for other in schedulers[:position]):
            message = f"a {type(scheduler).__name__} is given twice, and would step twice after each step"
            raise error("SC553", message, hint="give each scheduler once")
    return schedulers


def check_schedulers(
    schedulers: Sequence[Scheduler],
    monitor: str | None,
    optimizers: Sequence[torch.optim.Optimizer],
    evaluates: bool,
) -> None:
    """Raise ShardcError for a scheduler that wants a metric and is given none (SC552), for one of another optimizer
    than the program's, which would change nothing, and for a metric that nobody wants (SC553)."""
    if monitor is not None:
        check_metric(monitor, evaluates)
        if not any(map(wants_metric, schedulers)):
            names = " and ".join(f"a {type(scheduler).__name__}" for scheduler in schedulers)
            what = f"the scheduler is {names}" if schedulers else "no scheduler"
            hint = "it is for schedulers whose step takes a metric, as ReduceLROnPlateau's: leave it out"
            raise error("SC553", f"train is given monitor={monitor!r}, and {what} to step with it", hint=hint)
    for scheduler in schedulers:
        name, owner = type(scheduler).__name__, getattr(scheduler, "optimizer", None)
        if wants_metric(scheduler) and monitor is None:
            hint = (
                'name one: train(..., monitor="loss"), or "evaluated.loss" with evaluate=; or step it in the loop over '
                'train(..., stateful={"scheduler": scheduler}), which saves it'
            )
            raise error("SC552", f"{name} wants a metric at each step, and train is told none", hint=hint)
        if not hasattr(scheduler, "step") or not any(owner is optimizer for optimizer in optimizers):
            whose = "it is not that of the program" if optimizers else "the program has none"
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


def step_schedules(schedulers: Sequence[Scheduler], monitor: str | None, metrics: Metrics) -> None:
    """Step the schedules after a step; one that wants a metric of evaluations, after those.

    Raises ShardcError (SC553) for one that does not know a parameter group that was added after it was made."""
    for scheduler in schedulers:
        count_optimizer_step(scheduler.optimizer)
        try:
            if not wants_metric(scheduler):
                scheduler.step()
            elif monitor is not None and (value := metrics.value(monitor)) is not None:
                scheduler.step(value)
        except (ValueError, KeyError, RuntimeError) as failure:
            if (unknown := _unknown_group(scheduler, failure)) is None:
                raise
            raise unknown from failure


def _unknown_group(scheduler: Scheduler, failure: Exception) -> ShardcError | None:
    """The error of a scheduler of torch that lacks values for a group which its optimizer was given since.

    Those that read a group's own rate, as StepLR, take a new group as it is. The others keep a value a group.
    """
    groups, attributes = scheduler.optimizer.param_groups, vars(scheduler)
    lists = [name for name in _PER_GROUP if isinstance(attributes.get(name), list)]
    counts = [len(attributes[name]) for name in lists] + [sum("initial_lr" in group for group in groups)]
    known = min((count for count in counts if count), default=0)
    if not 0 < known < len(groups):
        return None
    message = f"a {type(scheduler).__name__} has values for {known} of the optimizer's {len(groups)} parameter groups"
    hint = "a group was added after the scheduler was made: make the scheduler behind it"
    if lists and not isinstance(failure, KeyError):
        hint += ", or give it the group's values: " + ", ".join(f"scheduler.{name}.append(...)" for name in lists)
    return error("SC553", message, hint=hint)


def rates_of(schedulers: Sequence[Scheduler]) -> tuple[float, ...]:
    """The rates of all parameter groups that are scheduled."""
    return tuple(float(group["lr"]) for group in groups_of(scheduler.optimizer for scheduler in schedulers))


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The parameter groups of optimizers, of which one may occur several times."""
    distinct = {id(optimizer): optimizer for optimizer in optimizers}
    return [group for optimizer in distinct.values() for group in optimizer.param_groups]
