"""`trainer.recompile()`: go on with another program of the same job, after the model or the optimizers were changed.

    model.backbone.requires_grad_(True)                          as in eager PyTorch, after some steps
    optimizer.add_param_group({"params": model.backbone.parameters()})
    trainer.recompile()

What both programs hold is handed on: parameters, buffers, the loss's scale, and of parameters that were trained before
the optimizer's state, their step counts too. State of parameters that are frozen now is put aside, as an optimizer of
eager PyTorch keeps it, and taken up when they are trained again. State that is new starts as in a first step. A tensor
that both programs place alike is the same tensor; others are gathered and cut again, one at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.program import CONSTANT
from shardc.ir.types import TensorType
from shardc.runtime.train.engine import Engine

KEPT = ("param", "buffer", "state")


@dataclass(frozen=True)
class Aside:
    """State of a parameter that is frozen, held as the parameter's ranks hold things."""

    parameter: str
    type: TensorType
    tensor: torch.Tensor | None  # None on ranks that do not hold the parameter


@dataclass(frozen=True)
class HandedOn:
    """The tensors that a program goes on with, by name; None for those that this rank does not hold."""

    tensors: Mapping[str, torch.Tensor | None]
    aside: Mapping[str, Aside]


class Holder(Protocol):
    """What of a trainer is handed on."""

    engine: Engine
    state: dict[str, torch.Tensor]
    aside: Mapping[str, Aside]

    @property
    def held(self) -> Mapping[str, tuple[Port, TensorType]]: ...
    @property
    def returned(self) -> Collection[tuple[str, str]]: ...


def hand_on(trainer: Holder, body: Graph, engine: Engine) -> HandedOn:
    """The tensors that a trainer holds, as another program holds them; all ranks must call it."""
    old, tensors = trainer.engine, dict[str, torch.Tensor | None]()
    wanted = {p.name: (p, type_of(n)) for p, n in zip(body.inputs, body.placeholders, strict=True) if p.role in KEPT}
    known = {name: Aside(name, type, trainer.state.get(name)) for name, (_, type) in trainer.held.items()}
    for name, (_, type) in wanted.items():
        source = known.get(name) or trainer.aside.get(name)
        if source is None or (name.startswith(CONSTANT) and ("buffer", name) not in trainer.returned):
            continue  # the new program's own
        if source.type.shape == type.shape:
            tensors[name] = moved(source, type, old, engine, name)
    aside = {
        name: Aside(port.parameter, type, trainer.state.get(name))
        for name, (port, type) in trainer.held.items()
        if _is_frozen(port, wanted)
    }
    aside = {name: kept for name, kept in {**trainer.aside, **aside}.items() if name not in wanted}
    kept_aside = {
        name: Aside(kept.parameter, kept.type, moved(kept, kept.type, old, engine, kept.parameter))
        for name, kept in aside.items()
        if kept.parameter in wanted
    }
    return HandedOn(tensors, kept_aside)


def _is_frozen(port: Port, wanted: Mapping[str, object]) -> bool:
    return port.role == "state" and port.name not in wanted and port.parameter in wanted


def moved(source: Aside, type: TensorType, old: Engine, new: Engine, name: str) -> torch.Tensor | None:
    """A held tensor in another layout, on the ranks that hold `name` from now on."""
    if source.type == type and list(old.homes.get(source.parameter, ())) == list(new.homes.get(name, ())):
        return source.tensor
    whole = old.fetch(source.parameter, source.tensor, source.type)
    return new.shards.hold(whole, type).clone() if new.holds(name) else None
