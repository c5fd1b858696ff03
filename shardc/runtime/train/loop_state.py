"""What of the loop's objects a checkpoint holds: of the schedule, of callbacks, and of what the caller names.

    {"scheduler": {...}, "learning_rates": [0.1], "stateful": {"EarlyStopping": {"best": 3.2, ...}, "sampler": {...}}}

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
from shardc.runtime.train.lr_schedule import Scheduler

KINDS: dict[str, Callable[[Any], Any]] = {"dict": dict, "Counter": Counter}  # of mappings with other keys than text


class Stateful(Protocol):
    """An object whose state is saved: a scheduler that the caller steps, a sampler, a callback."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True)
class LoopState:
    """The objects by name, and the optimizer whose rates go with a schedule."""

    scheduler: Scheduler | None
    stateful: Mapping[str, Stateful]
    optimizer: torch.optim.Optimizer | None

    @classmethod
    def of(
        cls,
        scheduler: Scheduler | None,
        stateful: object,
        callbacks: Sequence[Any],
        optimizer: torch.optim.Optimizer | None,
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
        return cls(scheduler, named, optimizer)

    def check(self) -> None:
        """Raise ShardcError (SC408) for a state that cannot be saved, before the first step is made."""
        scheduler = {} if self.scheduler is None else {"scheduler": self.scheduler}
        for name, value in {**scheduler, **self.stateful}.items():
            try:
                json.dumps(plain(value.state_dict()))
            except (TypeError, ValueError) as failure:
                message = f"the state of '{name}', a {type(value).__name__}, is not plain data: {failure}"
                hint = "its state_dict may hold numbers, text, lists and mappings of them; turn tensors into lists"
                raise error("SC408", message, hint=hint) from None

    def save(self) -> dict[str, Any]:
        """What the checkpoint holds."""
        extra: dict[str, Any] = {}
        if self.scheduler is not None:
            extra["scheduler"] = plain(self.scheduler.state_dict())
        if self.stateful:
            extra["stateful"] = {name: plain(value.state_dict()) for name, value in self.stateful.items()}
        if self._has_schedule() and self.optimizer is not None:
            # torch keeps the present rates with the optimizer, not with its schedule.
            extra["learning_rates"] = [float(group["lr"]) for group in self.optimizer.param_groups]
        return extra

    def load(self, extra: Mapping[str, Any]) -> None:
        """Give each object the state that was saved under its name; one that is new keeps its own."""
        if self.scheduler is not None and "scheduler" in extra:
            self.scheduler.load_state_dict(restored(extra["scheduler"]))
        saved: Mapping[str, Any] = extra.get("stateful", {})
        for name, value in self.stateful.items():
            if name in saved:
                value.load_state_dict(restored(saved[name]))
        if self._has_schedule() and self.optimizer is not None and "learning_rates" in extra:
            for group, rate in zip(self.optimizer.param_groups, extra["learning_rates"], strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def _has_schedule(self) -> bool:
        schedules = [self.scheduler, *self.stateful.values()]
        return any(getattr(value, "optimizer", None) is self.optimizer for value in schedules if value is not None)


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
