"""The optimizers of a program: one, or several over disjoint parameters, as users keep Muon beside AdamW.

    [Muon(matrices), AdamW(rest)]  ->  group 0: Muon's, groups 1 and 2: AdamW's; rates lr.0, lr.1, lr.2

Groups are numbered through all optimizers, in their order. State is named by parameter and key, so that names of two
optimizers cannot meet. The optimizers' steps touch different tensors: their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardc import torch_compat
from shardc.frontend.optimizer_trace import hyperparameters, refused
from shardc.ir.diagnostic import error

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None  # as users give them
CYCLED = ("base_momentum", "max_momentum")  # what a scheduler leaves in the groups whose momentum it changes


class Group(NamedTuple):
    """A parameter group, and the optimizer that it is of."""

    optimizer: torch.optim.Optimizer
    options: dict[str, Any]


def optimizers_of(given: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers, one after the other. Raises ShardcError (SC107) for what is none, and where Python acts around
    the step of one: a program's update has no such place."""
    if given is None:
        return ()
    several: tuple[Any, ...] = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    for optimizer in several:
        if not isinstance(optimizer, torch.optim.Optimizer):
            hint = "pass a torch.optim.Optimizer, or a list of several over different parameters"
            raise error("SC107", f"the optimizer is a {type(optimizer).__name__}", hint=hint)
        if hooks := torch_compat.step_hooks(optimizer):
            name = getattr(hooks[0], "__qualname__", type(hooks[0]).__qualname__)
            hint = "clip by the plan's clip_grad_norm or by hooks of the parameters; make the rest part of the"
            raise refused(
                optimizer, f"{name} acts before, after or in the place of its step", f"{hint} optimizer's step"
            )
    return several


def groups_of(given: Optimizers) -> list[Group]:
    """The parameter groups of all optimizers, in order."""
    return [Group(optimizer, group) for optimizer in optimizers_of(given) for group in optimizer.param_groups]


def learning_rates(given: Optimizers) -> dict[str, Tensor]:
    """The "hyper" inputs: each group's present learning rate, in float64 as Python's. Raises ShardcError (SC107) where
    it is not finite, or an optimizer was given a hook."""
    rates = {
        f"lr.{i}": torch.as_tensor(group.options["lr"], dtype=torch.float64, device="cpu").detach().reshape(()).clone()
        for i, group in enumerate(groups_of(given))
    }
    for i, rate in enumerate(rates.values()):
        if not torch_compat.is_fake(rate) and not math.isfinite(rate):
            message = f"the learning rate of the optimizer's group {i} is {float(rate)}"
            raise error("SC107", message, hint="give a finite number; a scheduler may divide by 0")
    return rates


def fingerprint(given: Optimizers) -> tuple[Hashable, ...]:
    """All that a program's update was traced with: when it changes, the program is no longer the optimizers'."""
    return tuple((hyperparameters(group), tuple(map(id, group["params"]))) for _, group in groups_of(given))


def stored_state(given: Optimizers) -> dict[Tensor, Mapping[str, Any]]:
    """What the optimizers hold for parameters already."""
    return {p: state for optimizer in optimizers_of(given) for p, state in optimizer.state.items()}


def cycles_momentum(given: Optimizers) -> bool:
    """Was a scheduler made for one of them that changes the momentum beside the rate?"""
    return any(key in group for _, group in groups_of(given) for key in CYCLED)


def group_indices(given: Optimizers, model: nn.Module) -> Iterator[tuple[str, int]]:
    """(parameter's first name, index of its group). Raises ShardcError (SC107) for a parameter that is not the model's,
    one of two optimizers, and a scheduler that changes more than learning rates."""
    names = {p: name for name, p in reversed(list(model.named_parameters(remove_duplicate=False)))}
    owners: dict[Tensor, int] = {}  # the group
    groups = groups_of(given)
    for index, (optimizer, group) in enumerate(groups):
        if any(key in group for key in CYCLED):
            hint = "pass cycle_momentum=False to the scheduler"
            raise refused(optimizer, "its scheduler changes the momentum, and only learning rates may change", hint)
        for position, p in enumerate(group["params"]):
            if p not in names:
                raise error(
                    "SC107",
                    f"parameter {position} of the optimizer's group {index}, {list(p.shape)}, is not the model's",
                    hint="make the optimizer from the parameters of the very model that is compiled, not of a copy",
                )
            if (other := owners.setdefault(p, index)) != index:
                kinds = f"{type(groups[other].optimizer).__name__} and {type(optimizer).__name__}"
                message = f"{names[p]} is a parameter of two optimizers, {kinds}: each would update it"
                raise error("SC107", message, hint="give each optimizer parameters of its own")
            yield names[p], index
