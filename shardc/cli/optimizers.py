"""`--optimizer NAME`: an optimizer of torch.optim at its defaults, over what the model trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Maker = Callable[..., torch.optim.Optimizer]
# By `main.OptimizerName`: what makes it, and with what beside the step size.
OPTIMIZERS: dict[str, tuple[Maker, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}
DESCENT = 0.1  # the step size of plain gradient descent
ADAPTIVE = 1e-3  # and of an optimizer


def make_optimizer(name: str | None, model: nn.Module, lr: float | None) -> torch.optim.Optimizer | None:
    """None where none is asked for, or where nothing is trained: that is for `compile` to say."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if name is None or not trained:
        return None
    make, options = OPTIMIZERS[name]
    return make(trained, lr=step_size(name) if lr is None else lr, **options)


def step_size(name: str | None) -> float:
    """The default."""
    return DESCENT if name is None else ADAPTIVE
