"""Python around tensors: parametrizations, closures, containers, branches, and shapes of outputs."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune

from tests.hostile.harness import Net, case

SCALE = torch.tensor(0.5, dtype=torch.float64)


@case()
class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.b)


@case()
class SpectralNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.b)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


@case()
class SymmetricWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", Symmetric())


@case()
class CachedParametrization(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrize.register_parametrization(self.b, "weight", Symmetric())

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.b(self.b(super().forward(x) * x)).square().mean()


@case()
class OrthogonalWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.orthogonal(self.b, orthogonal_map="cayley")


@case()
class Pruned(Net):
    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.b, "weight", 0.5)


@case()
class LowRank(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) + x @ self.down.t() @ self.up.t()).square().mean()


@case()
class StandardizedWeight(Net):
    def between(self, h: Tensor) -> Tensor:
        w = self.b.weight
        return functional.linear(h, (w - w.mean(1, keepdim=True)) / w.std(1, keepdim=True))


@case()
class PatchedForward(Net):
    def __init__(self) -> None:
        super().__init__()
        plain = self.b.forward
        self.b.forward = lambda input: plain(input).sin()


@case()
class PartialOfAMethod(Net):
    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[Tensor], Tensor] = functools.partial(functional.leaky_relu, negative_slope=0.3)

    def between(self, h: Tensor) -> Tensor:
        return self.act(h)


@case()
class ClosureOverAConstant(Net):
    def __init__(self) -> None:
        super().__init__()
        shift = torch.arange(6.0)
        self.act: Callable[[Tensor], Tensor] = lambda h: h + shift

    def between(self, h: Tensor) -> Tensor:
        return self.act(h) * SCALE


@case()
class ClosureOverTheModulesWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        weight = self.b.weight
        self.act: Callable[[Tensor], Tensor] = lambda h: h @ weight

    def between(self, h: Tensor) -> Tensor:
        return self.act(h)


@case()
class ParameterInAPlainList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [self.b.bias, self.a.bias]

    def between(self, h: Tensor) -> Tensor:
        return h * self.hidden[0] + self.hidden[1]


_OTHERS: list[nn.Module] = []


@case(refused="SC120")
class AnotherModelsWeight(Net):
    """A module that is not registered: eager's optimizer never sees it, but a trained one would change."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Linear(6, 6)]

    def between(self, h: Tensor) -> Tensor:
        return self.others[0](h)


@case()
class Copied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = copy.deepcopy(self.b)

    def between(self, h: Tensor) -> Tensor:
        return self.c(h)


@case()
class ModuleMadeInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        return nn.Softplus()(nn.LayerNorm(6, elementwise_affine=False)(h))


@dataclass
class Output:
    loss: Tensor
    logits: Tensor | None = None
    nothing: None = None


@case()
class ReadsADataclass(Net):
    def between(self, h: Tensor) -> Tensor:
        out = Output(loss=h.sum(), logits=h.tanh())
        assert out.logits is not None
        return out.logits + out.loss / 100


@case()
class ModulesInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"one": nn.Linear(6, 6), "two": nn.Linear(6, 6)})

    def between(self, h: Tensor) -> Tensor:
        return torch.stack([head(h) for _, head in sorted(self.heads.items())]).prod(0)


@case()
class ParametersInADict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"one": nn.Parameter(torch.ones(6)), "two": nn.Parameter(torch.ones(()))})

    def between(self, h: Tensor) -> Tensor:
        return h * self.scales["one"] * self.scales["two"]


@case()
class BranchesByShape(Net):
    def between(self, h: Tensor) -> Tensor:
        for _ in range(h.shape[-1] // 2):
            h = h.sin() if h.dim() == 2 else h.cos()
        return h


@case(refused="SC101")
class BranchesByValue(Net):
    def between(self, h: Tensor) -> Tensor:
        return h if h.sum() > 0 else -h


@case(refused="SC101")
class ReadsANumber(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * h.abs().max().item()


@case(refused="SC101")
class LoopsByValue(Net):
    def between(self, h: Tensor) -> Tensor:
        while h.norm() > 1:
            h = h / 2
        return h


@case()
class SelectsByValue(Net):
    def between(self, h: Tensor) -> Tensor:
        return h[h[:, 0] > 0].sum(0, keepdim=True)


@case()
class TriesAndCatches(Net):
    def between(self, h: Tensor) -> Tensor:
        try:
            return h.view(7, -1)
        except RuntimeError:
            return h.tanh()


class Scaled(nn.Parameter):
    pass


@case()
class ParameterOfASubclass(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = Scaled(torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        return h * self.scale


@case()
class Generated(Net):
    def parts(self, h: Tensor) -> Any:
        for part in h.split(2, -1):
            yield part.cumsum(-1)

    def between(self, h: Tensor) -> Tensor:
        return torch.cat(list(self.parts(h)), -1)


@case()
class SortedRows(Net):
    def between(self, h: Tensor) -> Tensor:
        values, at = h.sort(-1, descending=True)
        return values * at.argsort(-1)


@case()
class TiesInExtremes(Net):
    def between(self, h: Tensor) -> Tensor:
        bounded = h.clamp(-0.1, 0.1)
        return h * bounded.amax(-1, keepdim=True) + bounded.max(-1, keepdim=True).values + h.median(-1, True).values


@case()
class Statistics(Net):
    def between(self, h: Tensor) -> Tensor:
        return (h - h.mean(0)) / (h.std(0) + 1) + h.logsumexp(-1, keepdim=True) + h.var(-1, keepdim=True)


@case()
class Einsum(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.einsum("bi,ij,bk,kj->bj", h, self.b.weight, h, self.a.weight)


@case()
class Looked(Net):
    """Indices from values, a table among the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 6, padding_idx=1)

    def between(self, h: Tensor) -> Tensor:
        return h * self.table((h.detach() > 0).long().sum(-1).clamp(max=3))


@case()
class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(2, 2)

    def between(self, h: Tensor) -> Tensor:
        state = torch.zeros_like(h[:, :2])
        for part in h.split(2, -1):
            state = self.cell(part, state)
        return state.repeat(1, 3)


@case()
class ZeroRows(Net):
    """A value of no elements on the way."""

    def between(self, h: Tensor) -> Tensor:
        return torch.cat([h, h[:0].sin()])


@case()
class LossOfTheLargest(Net):
    def forward(self, x: Tensor) -> Tensor:
        rows = self.b(self.a(x)).square().mean(-1)
        return rows.amax() + 0.1 * rows.prod()
