"""`model.eval()` for a while: every module's mode is afterwards what it was, module by module, whatever happened.

    with evaluating(model):       # model.eval(), the user's own override included
        ...                       # dropout is the identity, batch norm reads its running statistics

Modes are set back flag by flag: a user may train all of a model but its batch norms. A module whose class overrides
`train` or `eval` (to merge an adapter's weights, say) is told by its own method first.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module, on: bool = True) -> Generator[None]:
    """The model in the mode of `model.eval()`; as it is where not `on`."""
    if not on:
        yield
        return
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        _put_back(modes)


def training_flags(model: nn.Module) -> frozenset[str]:
    """The attributes that hold the modes of a model's modules."""
    return frozenset(f"{name}.training" if name else "training" for name, _ in model.named_modules())


def _put_back(modes: dict[nn.Module, bool]) -> None:
    try:
        for module, mode in modes.items():
            overrides = type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval
            if overrides and module.training != mode:
                module.train(mode)
    finally:
        for module, mode in modes.items():
            module.training = mode
