"""`EMA`: an exponential moving average of what a trainer trains, held as the parameters are.

    ema = shardc.EMA(trainer, decay=0.999)
    for metrics in trainer.train(loader, steps=1000, checkpoint="out/run"):   # updated after each step
        ...
    with ema.swapped():                                                       # the averages in the place of parameters
        trainer.evaluate(batches)
        trainer.export_hf("out/averaged")

The same as torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn: the first update takes the parameters as they
are, and each later one average = decay * average + (1 - decay) * parameter. A step that was skipped updates nothing.
Buffers are not averaged. Each rank averages its own shards, in place and in float32 at least: nothing is sent. What is
not trained is not averaged, as its average is itself. A checkpoint has the averages beside the parameters, of role
"average" and named `<parameter>:average`; make the EMA before it is loaded. An average that a checkpoint lacks starts
from its parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch

from shardc.ir.caller import warn
from shardc.ir.diagnostic import Diagnostic, error
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.held import Held
from shardc.runtime.train.engine import Engine
from shardc.runtime.train.recompile import Aside, Holder, moved

ROLE = "average"
KEY = "ema"  # in a checkpoint's extra
HALF = (torch.bfloat16, torch.float16)


class Averaged(Holder, Protocol):
    """The part of a trainer that an average needs."""

    ema: EMA | None

    @property
    def leads(self) -> bool: ...
    def state_dict(self) -> dict[str, torch.Tensor]: ...


class EMA:
    """The averages of a trainer's parameters. It updates itself after each of the trainer's steps."""

    def __init__(self, trainer: Averaged, decay: float) -> None:
        if isinstance(decay, bool) or not 0.0 <= decay < 1.0:
            raise error("SC553", f"EMA is given decay={decay!r}", hint="give a number from 0 to below 1, such as 0.999")
        if trainer.ema is not None:
            raise error("SC553", "the trainer has an EMA already", hint="use trainer.ema")
        self.trainer, self.decay, self.updates = trainer, float(decay), 0
        self.averages: dict[str, torch.Tensor] = {}
        self._types: dict[str, TensorType] = {}
        self.is_swapped = False
        self.include()
        trainer.ema = self

    def __repr__(self) -> str:
        return f"EMA(decay {self.decay:g}, {self.updates} updates, {len(self._types)} parameters)"

    def include(self, more: Collection[str] = ()) -> None:
        """Average whatever is trained, and `more` by name: what is not averaged yet starts as it is."""
        held, returned = self.trainer.held, self.trainer.returned
        trained = [name for name in held if ("param", name) in returned or ("grad", name) in returned]
        more = [name for name in more if name in held and held[name][0].role == "param"]
        # The same on all ranks, those of a pipeline included that do not hold the parameter.
        for name in dict.fromkeys((*self._types, *trained, *more)):
            type = held[name][1]
            self._types[name] = replace(type, dtype=torch.float32) if type.dtype in HALF else type
            if name in self.trainer.state and name not in self.averages:
                self.averages[name] = self.trainer.state[name].detach().to(self._types[name].dtype, copy=True)

    @torch.no_grad()
    def update(self) -> None:
        """Take the trainer's present parameters into the averages; the trainer calls it."""
        first, self.updates = self.updates == 0, self.updates + 1
        for name, average in self.averages.items():
            value = self.trainer.state[name].to(average.dtype)
            _ = average.copy_(value) if first else average.lerp_(value, 1.0 - self.decay)

    @contextmanager
    def swapped(self) -> Generator[None]:
        """While it is entered, the trainer's parameters are the averages: to evaluate, predict and export. Every rank
        must enter it. Raises ShardcError (SC553) within another, and from what would train or save them."""
        if self.is_swapped:
            raise error("SC553", "the averages are swapped in already", hint="leave the other `with ema.swapped():`")
        state = self.trainer.state
        own = {name: state[name] for name in self.averages}
        state |= {name: average.to(own[name].dtype) for name, average in self.averages.items()}
        self.is_swapped = True
        try:
            yield
        finally:
            self.is_swapped = False
            self.trainer.state |= own

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What the model's own `state_dict` would hold, with the averages for parameters; every rank must call it."""
        with self.swapped():
            return self.trainer.state_dict()

    # ------------------------------------------------------------------ of the trainer
    def take_up(self, names: Collection[str]) -> None:
        """Have room for the averages that a checkpoint has, of parameters that were trained then and are frozen now."""
        self.include([name.removesuffix(f":{ROLE}") for name in names])

    def refuse_swapped(self, what: str) -> None:
        """Raise ShardcError (SC553) for what would take averages for parameters."""
        if self.is_swapped:
            message = f"{what} is called within ema.swapped(), where the parameters are the averages"
            raise error("SC553", message, hint=f"leave `with ema.swapped():` before {what}")

    def held(self) -> dict[str, Held]:
        """What is saved."""
        entries = {name: (self.averages.get(name), type) for name, type in self._types.items()}
        return {f"{name}:{ROLE}": Held(tensor, type, ROLE) for name, (tensor, type) in entries.items()}

    def position(self) -> dict[str, Any]:
        """What of it a checkpoint says beside the tensors."""
        return {KEY: {"decay": self.decay, "updates": self.updates}}

    @torch.no_grad()
    def resume(self, position: Mapping[str, Any], names: Collection[str]) -> None:
        """Go on from a checkpoint whose tensors were read, `names` those of its averages. What it has no average of
        starts from its parameter. One without any has no `position` of them: a warning says so (SC406)."""
        self.updates = int(position.get("updates", 0))
        for name, average in self.averages.items():
            if f"{name}:{ROLE}" not in names:
                average.copy_(self.trainer.state[name])
        if not position and self.trainer.leads:
            message = "the checkpoint has no moving averages: they start from its parameters"
            hint = "right where it was saved without shardc.EMA, and the EMA is new"
            warn(str(Diagnostic("SC406", message, "warning", hint=hint)))

    def follow(self, after: Averaged, old: Engine) -> None:
        """Go on with a trainer that was compiled again; all ranks must call it."""
        averages: dict[str, torch.Tensor] = {}
        for name, type in self._types.items():
            wanted = replace(after.held[name][1], dtype=type.dtype)
            average = moved(Aside(name, type, self.averages.get(name)), wanted, old, after.engine, name)
            if average is not None:
                averages[name] = average
        self.averages = averages
        after.ema = self
