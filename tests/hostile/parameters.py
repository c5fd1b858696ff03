"""Parameters of odd kinds: of other dtypes and strides, in lists, parametrized, tied, made late, or shared outside.

Longer than 400 lines: a module for each thing that a step may do to its parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, parametrizations, prune, skip_init, stateless
from torch.nn.utils import parametrize as parametrizing

from tests.hostile.harness import Net, case


@case()
class ListOfParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(6) * i) for i in range(1, 4)])

    def between(self, h: Tensor) -> Tensor:
        for scale in self.scales:
            h = (h * scale).tanh()
        return h


@case()
class DictOfParameters(Net):
    """Their names are not Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"of all": torch.ones(6), "ø/1": torch.full((6,), 2.0), "x": torch.zeros(6)})

    def between(self, h: Tensor) -> Tensor:
        return h * self.scales["ø/1"] + self.scales["of all"] * self.scales["x"].cos()


class _Exponential(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, y: Tensor) -> Tensor:
        return (y.abs() + 0.1).log()


@case()
class ParametrizedTwice(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizing.register_parametrization(self.b, "weight", _Exponential())
        parametrizing.register_parametrization(self.b, "weight", nn.Softmax(-1), unsafe=True)


@case()
class WeightNormAlongNoDim(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.b, dim=None)  # type: ignore[arg-type]


@case()
class WeightNormByAHook(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.b)


@case()
class SpectralNormByAHook(Net):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.spectral_norm(self.b)


@case()
class SpectralNormInEvaluation(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.b)
        self.b.eval()


@case()
class PrunedByMagnitude(Net):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.b, "weight", 0.5)
        prune.ln_structured(self.b, "weight", 0.3, n=2, dim=0)


@case(refused="SC121")
class TiedThroughAView(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(self.a.weight.detach().view(6, 6))


@case(refused="SC121")
class PartsOfOneStorage(Net):
    """They do not overlap, but two of them do with a third."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(72)
        self.a.weight, self.b.weight = nn.Parameter(flat[:36].view(6, 6)), nn.Parameter(flat[36:].view(6, 6))
        self.c = nn.Parameter(flat[30:42])

    def between(self, h: Tensor) -> Tensor:
        return h * self.c[:6] * self.c[6:]


@case()
class NeighboursInOneStorage(Net):
    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(72)
        self.a.weight, self.b.weight = nn.Parameter(flat[:36].view(6, 6)), nn.Parameter(flat[36:].view(6, 6))


@case()
class Transposed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(torch.randn(6, 6).t())


@case()
class EachSecondElement(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = nn.Parameter(torch.randn(12, 12)[::2, ::2])


@case(refused="SC112")
class Expanded(Net):
    """Its rows are one: eager PyTorch's optimizers refuse to write to it."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(1, 6).expand(6, 6))

    def between(self, h: Tensor) -> Tensor:
        return h @ self.c


@case(tolerance=1e-5)
class SinglesAmongDoubles(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(6, dtype=torch.float32))

    def between(self, h: Tensor) -> Tensor:
        return h * self.c


@case(tolerance=5e-2)
class HalvesAmongDoubles(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))

    def between(self, h: Tensor) -> Tensor:
        return h * self.c


@case(optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9))  # AdamW is no elementwise op of it
class ComplexWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.randn(6, 6, dtype=torch.complex128))

    def between(self, h: Tensor) -> Tensor:
        return (h.to(self.c.dtype) @ self.c).abs()


@case()
class WithoutDims(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.tensor(2.0))
        self.d = nn.Parameter(torch.tensor(0.5))

    def between(self, h: Tensor) -> Tensor:
        return h.clamp(-1, 1) ** 2 * self.c + self.d


@case()
class WholeNumbersAsParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([3, 1, 0, 2, 5, 4]), requires_grad=False)
        self.chosen = nn.Parameter(torch.tensor([True, False] * 3), requires_grad=False)

    def between(self, h: Tensor) -> Tensor:
        return h[:, self.order] * self.chosen


@case()
class HalfOfAWeightIsTrained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.fixed = nn.Parameter(torch.randn(3, 6), requires_grad=False)
        self.free = nn.Parameter(torch.randn(3, 6))

    def between(self, h: Tensor) -> Tensor:
        return functional.linear(h, torch.cat([self.fixed, self.free]))


@case(refused="SC104")
class FrozenInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight.requires_grad_(False)
        return self.b(h)


@case(refused="SC104")
class MadeInTheFirstForward(Net):
    """Eager PyTorch's optimizer does not know it either."""

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("c", None)

    def between(self, h: Tensor) -> Tensor:
        if self.c is None:
            self.c = nn.Parameter(torch.full((6,), 2.0, dtype=torch.float64))
        return h * self.c


@case(refused="SC104")
class ReplacedInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        self.b.weight = nn.Parameter(self.b.weight * 1.5)
        return h


@case(refused="SC112")
class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.LazyLinear(6)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


@case(refused="SC112")
class WithoutElements(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.zeros(0, 6))

    def between(self, h: Tensor) -> Tensor:
        return h + self.c.sum(0)


@case()
class InitializedLater(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = skip_init(nn.Linear, 6, 6)
        nn.init.eye_(self.c.weight)
        nn.init.zeros_(self.c.bias)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h).tanh()


class _Tagged(Tensor):
    """A tensor that says of what it was made."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


@case()
class OfASubclassOfTensor(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(6).as_subclass(_Tagged))

    def between(self, h: Tensor) -> Tensor:
        return h * self.c.cos()


@case()
class LaidOutByChannels(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(1, 2, 2, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def between(self, h: Tensor) -> Tensor:
        return self.c(h.view(-1, 1, 2, 3)).flatten(1)[:, :6]


@case()
class AllInOneVector(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * parameters_to_vector(self.b.parameters()).norm()


@case()
class CalledWithOtherWeights(Net):
    def between(self, h: Tensor) -> Tensor:
        other = {name: p * 1.5 for name, p in self.b.named_parameters()}
        return functional_call(self.b, other, (h,)).tanh()


@case()
class CalledWithOtherWeightsTheOldWay(Net):
    def between(self, h: Tensor) -> Tensor:
        other = {"weight": self.a.weight, "bias": self.b.bias}
        return stateless.functional_call(self.b, other, (h,)).tanh()


@case()
class AnEnsemble(Net):
    """Of layers whose weights are stacked in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def between(self, h: Tensor) -> Tensor:
        names = ("weight", "bias")
        stacked = {n: torch.stack([layer.get_parameter(n) for layer in self.many]) for n in names}
        return vmap(lambda p, x: functional.linear(x, p["weight"], p["bias"]), (0, None))(stacked, h).sum(0)


@case()
class StackedModuleState(Net):
    """`stack_module_state` makes leaves of its own, which nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.many = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def between(self, h: Tensor) -> Tensor:
        stacked, _ = stack_module_state(list(self.many))
        return vmap(lambda p, x: functional.linear(x, p["weight"], p["bias"]), (0, None))(stacked, h).sum(0)


@case()
class ACopyMadeInForward(Net):
    """Its weights are leaves of their own: no gradient comes back from it."""

    def between(self, h: Tensor) -> Tensor:
        return copy.deepcopy(self.b)(h)


@case()
class AllOfItIsDetached(Net):
    def between(self, h: Tensor) -> Tensor:
        return h @ self.b.weight.detach() + self.b.bias.data


@case()
class UsedOnlyForItsShape(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.ones(6, 3))

    def between(self, h: Tensor) -> Tensor:
        return h * self.c.shape[1] + torch.zeros_like(self.c).sum()


@case()
class NoBias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.bias = None  # type: ignore[assignment]
        self.b.register_parameter("other", None)


@case()
class APropertyIsTheWeight(Net):
    @property
    def both(self) -> Tensor:
        return self.a.weight @ self.b.weight

    def between(self, h: Tensor) -> Tensor:
        return h @ self.both.t()


@case()
class DeletedFromItsModule(Net):
    """Held by another name only, as libraries that flatten parameters do it."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.b.weight
        del self.b._parameters["weight"]
        self.b.weight = self.kept.view(6, 6)  # type: ignore[assignment]

    def between(self, h: Tensor) -> Tensor:
        self.b.weight = self.kept * 2  # type: ignore[assignment]
        return h


@case()
class OneWeightManyNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ParameterList([self.a.weight, self.b.weight, self.a.weight])
        self.again = nn.ParameterDict({"w": self.b.weight})

    def between(self, h: Tensor) -> Tensor:
        return h @ self.all[2] @ self.again["w"].t()


@case(refused="SC104")
class AProductOfTwoDtypes(Net):
    """Eager PyTorch refuses it; fakes do not notice."""

    def between(self, h: Tensor) -> Tensor:
        return h @ torch.ones(6, 6, dtype=torch.float32)


@case(refused="SC104")
class AConvolutionOfTwoDtypes(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.conv1d(h.unsqueeze(1), torch.ones(1, 1, 1, dtype=torch.float32)).squeeze(1)
