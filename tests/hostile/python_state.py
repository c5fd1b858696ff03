"""What a forward keeps in Python where nobody looks, and what it asks of tensors that a trace cannot answer."""

from __future__ import annotations

from array import array
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from tests.hostile.harness import Net, case


class _Counts:
    steps = 0


class _Log(list[int]):
    """A list with a class of its own."""


class _Scales(torch.autograd.Function):
    """Its backward counts the steps in a class that only it knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        _Counts.steps += 1
        return g * 2 * _Counts.steps


STEP: ContextVar[int] = ContextVar("STEP", default=0)
TOTALS = {"sum": torch.zeros((), dtype=torch.float64)}


@case(warned="SC109")
class AClassElsewhereCounts(Net):
    def between(self, h: Tensor) -> Tensor:
        _Counts.steps += 1
        return h / _Counts.steps


@case(warned="SC109")
class BackwardCounts(Net):
    def between(self, h: Tensor) -> Tensor:
        return _Scales.apply(h)


@case(warned="SC109")
class AListOfItsOwnClassGrows(Net):
    def __init__(self) -> None:
        super().__init__()
        self.log = _Log()

    def between(self, h: Tensor) -> Tensor:
        self.log.append(1)
        return h / len(self.log)


@case(warned="SC109")
class AContextVariableCounts(Net):
    def between(self, h: Tensor) -> Tensor:
        STEP.set(STEP.get() + 1)
        return h / STEP.get()


@case(warned="SC109")
class AnArrayCounts(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = array("d", [0.0])

    def between(self, h: Tensor) -> Tensor:
        self.count[0] += 1
        return h / self.count[0]


@case(warned="SC109")
class AGlobalTableTakesAnotherTensor(Net):
    """Made from no input, but counted on."""

    def between(self, h: Tensor) -> Tensor:
        TOTALS["sum"] = TOTALS["sum"] + 1
        return h / TOTALS["sum"]


@case(warned="SC109")
class LayersTakeTurns(Net):
    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def between(self, h: Tensor) -> Tensor:
        self.turns = nn.ModuleList([*self.turns[1:], self.turns[0]])
        for i, layer in enumerate(self.turns):
            h = layer(h) * (i + 1)
        return h


@case(refused="SC120")
class AnArrayOfNumpyIsTheWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.array = self.b.weight.detach().numpy()

    def between(self, h: Tensor) -> Tensor:
        return h * float(self.array[0, 0])


@case(refused="SC101")
class AValueAskedForAndTheErrorCaught(Net):
    def between(self, h: Tensor) -> Tensor:
        try:
            return h * h.sum().item()
        except RuntimeError:
            return h


@case(refused="SC104")
class DataOfAnActivationAssigned(Net):
    def between(self, h: Tensor) -> Tensor:
        other = h * 1
        other.data = h.data.relu()
        return other


@case(refused="SC104")
class AnInputReshapedInPlace(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze_(1))


@case()
class ParametersAreOfTheirClass(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * sum(isinstance(p, nn.Parameter) for p in self.parameters())
