"""Numbers that forward draws in Python: a graph has them as constants, so that every step has the first one's (SC111).

    if random.random() < self.layer_drop: ...      drawn while compiling, once
    torch.rand(()) < self.layer_drop               drawn in every step, the same under every layout

The generators are Python's and NumPy's global ones, and those that the model holds. A trace leaves them as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from shardc.frontend.python_state import Snapshot, instances
from shardc.ir.diagnostic import Diagnostic

MESSAGE = "forward draws numbers from {}: every step of a program has the number that was drawn while compiling"
HINT = "draw from torch.rand, randn or bernoulli, and let tensors decide; a program draws those anew in every step"


@dataclass(frozen=True)
class _Generator:
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Generators:
    """The generators within a model's reach, and their states when this was made; `before` is what is known of it."""

    def __init__(self, model: nn.Module, before: Snapshot) -> None:
        generators = [
            _Generator("Python's random", random.getstate, random.setstate),
            _Generator("numpy.random", np.random.get_state, np.random.set_state),
        ]
        if any(issubclass(kind, _CLASSES) for kind in before.kinds):
            generators += [_held(place.path, value) for place, value in instances(model, _CLASSES)]
        self._states = [(generator, generator.read()) for generator in generators]

    def drawn(self) -> list[Diagnostic]:
        """A warning (SC111) for each generator that is in another state than it was."""
        names = [generator.name for generator, state in self._states if repr(generator.read()) != repr(state)]
        return [Diagnostic("SC111", MESSAGE.format(name), "warning", hint=HINT) for name in names]

    def restore(self) -> None:
        for generator, state in self._states:
            generator.write(state)


_CLASSES = (random.Random, np.random.RandomState, np.random.Generator)


def _held(path: str, value: Any) -> _Generator:
    if isinstance(value, random.Random):
        return _Generator(path, value.getstate, value.setstate)
    if isinstance(value, np.random.RandomState):
        return _Generator(path, value.get_state, value.set_state)
    bits = value.bit_generator
    return _Generator(path, lambda: bits.state, lambda state: setattr(bits, "state", state))
