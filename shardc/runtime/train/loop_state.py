"""What of the loop's objects a checkpoint holds: of the schedule, of callbacks, and of what the caller names.

    {"scheduler": {...}, "scheduled": [0], "learning_rates": [0.1],      of which of the program's optimizers, and rates
     "set_rates": [[[0.1, 0.05]]],           of optimizers without a schedule: each group's first rate and its present
     "stateful": {"EarlyStopping": {"best": 3.2, ...}, "sampler": {...}}}

It is JSON, which knows no keys but text (a MultiStepLR counts milestones by number) and no tensors (a rate may be one):
`plain` writes them in another way, and `restored` reads them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

from shardc.ir.diagnostic import error
from shardc.runtime.train.lr_schedule import Scheduler, groups_of

Rates = tuple[tuple[float, ...], ...]
KINDS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}  # of mappings with other keys than text


class Stateful(Protocol):
    """An object whose state is saved: a scheduler that the caller steps, a sampler, a callback."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class LoopState:
    """The objects by name, the program's optimizers, and the rates that their groups had at the first call."""

    schedulers: Sequence[Scheduler]
    stateful: Mapping[str, Stateful]
    optimizers: Sequence[torch.optim.Optimizer]
    first_rates: Rates = ()

    @classmethod
    def of(
        cls,
        schedulers: Sequence[Scheduler],
        stateful: object,
        callbacks: Sequence[Any],
        optimizers: Sequence[torch.optim.Optimizer],
        first_rates: Rates = (),
    ) -> LoopState:
        """Raises ShardcError (SC553) for what has no state to save."""
        if not isinstance(stateful, Mapping | None):
            message = f"train is given a {type(stateful).__name__} as stateful"
            raise error("SC553", message, hint='give names and objects: stateful={"plateau": plateau}')
        named = dict(cast("Mapping[Any, Any]", stateful or {}))
        for name, value in named.items():
            if not isinstance(name, str) or not _has_state(value):
                message = f"train is to save a {type(value).__name__} as {name!r}, which has no state_dict to save"
                raise error("SC553", message, hint="give an object with state_dict() and load_state_dict(state)")
        for callback in filter(_has_state, callbacks):
            name = key = type(callback).__name__
            number = 1
            while key in named:
                number += 1
                key = f"{name} {number}"
            named[key] = callback
        return cls(schedulers, named, optimizers, first_rates)

    def check(self) -> None:
        """Raise ShardcError (SC408) for a state that cannot be saved, before the first step is made."""
        for name, value in [*(("scheduler", scheduler) for scheduler in self.schedulers), *self.stateful.items()]:
            try:
                json.dumps(plain(value.state_dict()))
            except (TypeError, ValueError) as failure:
                message = f"the state of '{name}', a {type(value).__name__}, is not plain data: {failure}"
                hint = "its state_dict may hold numbers, text, lists and mappings of them; turn tensors into lists"
                raise error("SC408", message, hint=hint) from None

    def save(self) -> dict[str, Any]:
        """What the checkpoint holds."""
        extra: dict[str, Any] = {}
        states = [plain(scheduler.state_dict()) for scheduler in self.schedulers]
        if states:
            extra |= {"scheduler": states[0]} if len(states) == 1 else {"schedulers": states}
            extra["scheduled"] = self._owners()
        if self.stateful:
            extra["stateful"] = {name: plain(value.state_dict()) for name, value in self.stateful.items()}
        if groups := self._scheduled():
            # torch keeps the present rates with the optimizer, not with its schedule.
            extra["learning_rates"] = [float(group["lr"]) for group in groups]
        since = self._set_since()
        if any(first != rate for pairs in since for first, rate in pairs):
            extra["set_rates"] = since
        return extra

    def load(self, extra: Mapping[str, Any]) -> None:
        """Give each object the state that was saved under its name; one that is new keeps its own.

        Raises ShardcError (SC553) where other schedulers were saved.
        """
        states = extra.get("schedulers", [extra["scheduler"]] if "scheduler" in extra else [])
        groups, rates = self._scheduled(), extra.get("learning_rates", [])
        resumes_schedules = bool(self.schedulers and states)
        if resumes_schedules and (len(states), len(rates)) != (len(self.schedulers), len(groups)):
            message = f"the checkpoint holds {len(states)} schedulers of {len(rates)} parameter groups, not "
            hint = "give the schedulers that it was saved with, in their order"
            raise error("SC553", f"{message}{len(self.schedulers)} of {len(groups)}", hint=hint)
        if resumes_schedules and extra.get("scheduled", self._owners()) != self._owners():
            was, now = (", ".join(map(str, owners)) for owners in (extra["scheduled"], self._owners()))
            message = f"the checkpoint's schedulers are of optimizers {was} of the program's, these are of {now}"
            hint = "give the schedulers that it was saved with, in their order"
            raise error("SC553", message, hint=hint)
        if resumes_schedules:
            for scheduler, state in zip(self.schedulers, states, strict=True):
                scheduler.load_state_dict(restored(state))
        saved: Mapping[str, Any] = extra.get("stateful", {})
        for name, value in self.stateful.items():
            if name in saved:
                value.load_state_dict(restored(saved[name]))
        if len(groups) == len(rates):
            for group, rate in zip(groups, rates, strict=True):
                _set_rate(group, rate)
        for optimizer, pairs in zip(self.optimizers, extra.get("set_rates", ()), strict=False):
            if not self._has_schedule(optimizer):
                for group, (first, rate) in zip(optimizer.param_groups, pairs, strict=False):
                    if float(group["lr"]) == first:  # else the script begins with another rate by now, which is meant
                        _set_rate(group, rate)

    def _set_since(self) -> list[list[list[float]]]:
        """Of each optimizer the first and the present rates of its groups, none where a schedule sets them."""
        present = rates_by_optimizer(self.optimizers)
        since: list[list[list[float]]] = []
        for optimizer, first, now in zip(self.optimizers, self.first_rates or present, present, strict=True):
            pairs = zip([*first, *now[len(first) :]], now, strict=True)
            since.append([] if self._has_schedule(optimizer) else [list(pair) for pair in pairs])
        return since

    def _has_schedule(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(getattr(v, "optimizer", None) is optimizer for v in (*self.schedulers, *self.stateful.values()))

    def _owners(self) -> list[int]:
        """Which of the program's optimizers each scheduler is of."""
        owners = [getattr(scheduler, "optimizer", None) for scheduler in self.schedulers]
        return [next((i for i, o in enumerate(self.optimizers) if o is owner), -1) for owner in owners]

    def _scheduled(self) -> list[dict[str, Any]]:
        """The parameter groups of the program's optimizers that a schedule is of."""
        return groups_of(optimizer for optimizer in self.optimizers if self._has_schedule(optimizer))


def rates_by_optimizer(optimizers: Sequence[torch.optim.Optimizer]) -> Rates:
    """The present rates of each one's parameter groups."""
    return tuple(tuple(float(group["lr"]) for group in optimizer.param_groups) for optimizer in optimizers)


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def plain(value: Any) -> Any:
    """A state as JSON can hold it; what it cannot hold in any way stays, and is refused when it is saved (SC408)."""
    if isinstance(value, Mapping):
        items = [(key, plain(each)) for key, each in cast("Mapping[Any, Any]", value).items()]
        if all(isinstance(key, str) for key, _ in items):
            return dict(items)
        kind = type(value).__name__
        return {"mapping": kind if kind in KINDS else "dict", "items": [[key, each] for key, each in items]}
    if isinstance(value, list | tuple):
        return [plain(each) for each in cast("Sequence[Any]", value)]
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    return value


def restored(value: Any) -> Any:
    """The state that `plain` wrote; tuples are lists."""
    if isinstance(value, dict):
        saved = cast("dict[str, Any]", value)
        if saved.keys() == {"mapping", "items"}:
            return KINDS[saved["mapping"]]({key: restored(each) for key, each in saved["items"]})
        return {key: restored(each) for key, each in saved.items()}
    return [restored(each) for each in cast("list[Any]", value)] if isinstance(value, list) else value


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
