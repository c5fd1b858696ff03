"""What forward returns, and the losses made of it: containers, what is no scalar, functions that hold things."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.harness import Net, case


class Hidden(Net):
    """Forward up to the last layer: a loss is made of it by a function."""

    def hidden(self, x: Tensor) -> Tensor:
        return self.b(self.between(self.a(x)))

    def forward(self, x: Tensor) -> Any:
        return self.hidden(x)


def squares(output: Tensor, batch: Tensor) -> Tensor:
    return (output - batch).square().mean()


def of(loss: Callable[[Any, Any], Any]) -> Callable[[nn.Module], Callable[[Any, Any], Any]]:
    """A loss that wants nothing of the model."""
    return lambda model: loss


# ---------------------------------------------------------------------- outputs that hold their loss
@case()
class ADict(Net):
    def forward(self, x: Tensor) -> Any:
        loss = super().forward(x)
        return {"logits": self.a(x), "loss": loss}


@case()
class AnOrderedDictWithNone(Net):
    def forward(self, x: Tensor) -> Any:
        return OrderedDict(cache=None, loss=super().forward(x), name="a")


@case()
class ATuple(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None, self.a(x)


@case()
class AListWithinATuple(Net):
    def forward(self, x: Tensor) -> Any:
        return [(super().forward(x), "text"), x]


Named = namedtuple("Named", ["loss", "logits"])


@case()
class ANamedTuple(Net):
    def forward(self, x: Tensor) -> Any:
        return Named(super().forward(x), self.a(x))


class Late(NamedTuple):
    logits: Tensor
    loss: Tensor


@case(refused="SC102")
class ANamedTupleWithTheLossLast(Net):
    """First is what is no scalar, and only by its name would the other be known."""

    def forward(self, x: Tensor) -> Any:
        return Late(self.a(x), super().forward(x))


@dataclass
class Output:
    loss: Tensor | None
    hidden: Tensor


@case()
class ADataclass(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(super().forward(x), self.a(x))


@case(refused="SC102")
class ADataclassWithoutALoss(Net):
    def forward(self, x: Tensor) -> Any:
        return Output(None, self.a(x))


@case(refused="SC102")
class AGenerator(Net):
    def forward(self, x: Tensor) -> Any:
        def parts() -> Generator[Tensor]:
            yield Net.forward(self, x)

        return parts()


@case(refused="SC102")
class NotAScalar(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).square()


@case(refused="SC102")
class OfOneElement(Net):
    """Eager PyTorch differentiates it; a program's loss has no dims."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(1)


@case(refused="SC102")
class APythonNumber(Net):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return 1.0


@case(refused="SC101")
class AskedForItsNumber(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).item()


@case(refused="SC102")
class Nothing(Net):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)


@case(refused="SC102")
class Detached(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@case(refused="SC102")
class OfTheInputAlone(Net):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return x.mean()


@case(refused="SC102")
class AComplexLoss(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_complex(self.a(x).view(-1, 3, 2)).mean()


@case(refused="SC102")
class AWholeNumber(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).long()


@case()
class NotANumber(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) - 1e9).log()


@case()
class BeyondAllNumbers(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.inf


@case(tolerance=2e-3)
class OfHalfPrecision(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).half()


@case(tolerance=1e-6)
class OfSinglePrecision(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float() * 2


@case(refused={"pp2": "SC221"})  # nothing of a batch goes through the stages
class AParameterItself(Net):
    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.level


@case(refused={"pp2": "SC221"})
class AnElementOfAParameter(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.a.weight[1, 2]


@case(refused={"pp2": "SC221"})
class NormsOfParametersAlone(Net):
    def forward(self, x: Tensor) -> Tensor:
        return sum((p.square().sum() for p in self.parameters()), x.new_zeros(()))


@case()
class ExpandedFromOneElement(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).expand(2, 3)[1, 2]


# ---------------------------------------------------------------------- losses by a function
@case(loss=of(squares))
class OfOutputAndBatch(Hidden):
    pass


@case(loss=of(lambda output, batch: output["far"].square().mean() + squares(output["near"], batch)))
class OfSeveralOutputs(Hidden):
    def forward(self, x: Tensor) -> Any:
        return {"near": self.hidden(x), "far": self.a(x), "none": None, "words": ["a", 1]}


@case(loss=of(lambda output, batch: squares(output[1], output[0]) + output[2].abs().sum() * 0.1))
class OutputsAreInputsAndParameters(Hidden):
    def forward(self, x: Tensor) -> Any:
        return x, self.hidden(x), self.a.weight


@case(loss=of(lambda output, batch: sum((t.square().mean() for t in output), batch.new_zeros(()))))
class AGeneratorOfOutputs(Hidden):
    def forward(self, x: Tensor) -> Any:
        return (layer(x) for layer in (self.a, self.b))


@case(loss=of(lambda output, batch: output.detach().square().mean()), refused="SC102")
class DetachedByTheLoss(Hidden):
    pass


@case(loss=of(lambda output, batch: float(output.square().mean())), refused="SC101")
class AskedForItsNumberByTheLoss(Hidden):
    pass


@case(loss=of(lambda output, batch: 1.0), refused="SC102")
class ANumberOfTheLoss(Hidden):
    pass


@case(loss=of(lambda output, batch: squares(output, batch["labels"])), refused="SC104")
class LabelsThatAreNotThere(Hidden):
    pass


@case(loss=of(lambda output, batch: output.square_().mean() + output.mean()))
class WritesToTheOutput(Hidden):
    pass


@case(loss=of(lambda output, batch: squares(output, batch.mul_(2))))
class WritesToTheBatch(Hidden):
    def forward(self, x: Tensor) -> Any:
        return self.hidden(x * 1)


@case(loss=of(lambda output, batch: squares(output.clone(), batch)))
class TheOutputIsAView(Hidden):
    def forward(self, x: Tensor) -> Any:
        return self.hidden(x)[:, :].view_as(x)


def _held_target(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    target = torch.linspace(-1, 1, 6, dtype=torch.float64)
    return lambda output, batch: (output - target).square().mean()


@case(loss=_held_target)
class ATensorThatTheLossHolds(Hidden):
    pass


def _with_decay(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    return lambda output, batch: squares(output, batch) + sum(p.square().sum() for p in model.parameters()) * 0.1


@case(loss=_with_decay)
class TheLossReadsTheParameters(Hidden):
    pass


def _calls_again(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    return lambda output, batch: squares(model(batch * 2), output * 2) + output.square().mean()


@case(loss=_calls_again)
class TheLossCallsTheModel(Hidden):
    pass


def _running_mean(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    means: list[Tensor] = []

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        means.append(output.detach().mean())
        return squares(output, batch) * len(means)

    return loss


@case(loss=_running_mean, warned="SC109")
class TheLossKeepsAList(Hidden):
    pass


def _module_with_weights(model: nn.Module) -> nn.Module:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64))

        def forward(self, output: Tensor, batch: Tensor) -> Tensor:
            return ((output - batch).square() * self.weights).mean()

    return Weighted()


@case(loss=_module_with_weights, refused="SC120")
class TheLossHasAParameterThatNobodyTrains(Hidden):
    pass


def _module_with_a_count(model: nn.Module) -> nn.Module:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

        def forward(self, output: Tensor, batch: Tensor) -> Tensor:
            self.seen.add_(1)
            return squares(output, batch) / self.seen

    return Counts()


@case(loss=_module_with_a_count, refused="SC109")
class TheLossCountsInABuffer(Hidden):
    pass


def _shares_a_weight(model: nn.Module) -> Callable[[Any, Any], Tensor]:
    weight: Tensor = model.get_parameter("a.weight")
    return lambda output, batch: functional.mse_loss(output @ weight, batch)


@case(loss=_shares_a_weight)
class TheLossSharesAWeight(Hidden):
    pass


def _scaled_by_itself(output: Tensor, batch: Tensor) -> Tensor:
    loss = squares(output, batch)
    (gradient,) = torch.autograd.grad(loss, output, create_graph=True)
    return loss + gradient.square().sum()


@case(loss=of(_scaled_by_itself))
class TheLossDifferentiates(Hidden):
    pass
