"""Learning-rate schedules in the loop: what is refused, and what of one a checkpoint holds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from shardc.ir.diagnostic import error


class Scheduler(Protocol):
    """The part of a `torch.optim.lr_scheduler` that the loop uses."""

    optimizer: torch.optim.Optimizer

    def step(self) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def check_scheduler(scheduler: Scheduler | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ShardcError for a scheduler whose step needs an argument, as ReduceLROnPlateau's metric (SC552), and for
    one of another optimizer than the program's, which would change nothing (SC553)."""
    if scheduler is None:
        return
    name = type(scheduler).__name__
    if hasattr(scheduler, "step"):
        try:
            inspect.signature(scheduler.step).bind()
        except TypeError:
            hint = "step it in the loop over train(...), with the metric: scheduler.step(metrics.loss)"
            raise error("SC552", f"{name} wants a metric at each step, which train does not have", hint=hint) from None
    if not hasattr(scheduler, "step") or getattr(scheduler, "optimizer", None) is not optimizer or optimizer is None:
        whose = "the program has none" if optimizer is None else "it is not that of the program"
        message = f"the scheduler, a {name}, would change nothing: its optimizer's rates are not used, {whose}"
        hint = "make it of the very optimizer that was passed to compile(..., optimizer=...)"
        raise error("SC553", message, hint=hint)


def rates_of(scheduler: Scheduler | None) -> tuple[float, ...]:
    return () if scheduler is None else tuple(float(group["lr"]) for group in scheduler.optimizer.param_groups)


def position_of(scheduler: Scheduler | None) -> dict[str, Any]:
    """What of the loop a checkpoint holds: torch keeps the present rates with the optimizer, not with its schedule."""
    if scheduler is None:
        return {}
    return {"scheduler": scheduler.state_dict(), "learning_rates": list(rates_of(scheduler))}


def restore(extra: Mapping[str, Any], scheduler: Scheduler | None) -> None:
    if scheduler is None or "scheduler" not in extra:
        return
    scheduler.load_state_dict(dict(extra["scheduler"]))
    for group, rate in zip(scheduler.optimizer.param_groups, extra["learning_rates"], strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
