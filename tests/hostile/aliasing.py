"""Tensors under two names: tied weights, views of parameters, inputs and activations that are changed in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.harness import Net, case


@case()
class TiedWeights(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


@case()
class TiedBiases(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.bias = self.a.bias


@case()
class TiedAndTransposed(Net):
    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(self.a(x)) @ self.a.weight.t() + self.b.bias * self.b.weight.sum()).square().mean()


@case()
class AppliedTwice(Net):
    def between(self, h: Tensor) -> Tensor:
        return self.a(h.tanh())


@case()
class ModuleOfTwoNames(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.b

    def between(self, h: Tensor) -> Tensor:
        return self.again(h).tanh()


@case()
class PartsOfOneWeight(Net):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(18, 6))

    def between(self, h: Tensor) -> Tensor:
        q, k, v = (functional.linear(h, part) for part in self.qkv.chunk(3))
        return functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]


@case()
class RowsOfAWeightInALoop(Net):
    def between(self, h: Tensor) -> Tensor:
        for row in self.b.weight:
            h = h + row * h.mean()
        return h


@case()
class ViewOfAParameterMadeBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.row: Any = (self.a.weight[0],)

    def between(self, h: Tensor) -> Tensor:
        return h * self.row[0]


@case()
class DetachedViewMadeBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.row: Any = (self.a.weight.detach()[0],)

    def between(self, h: Tensor) -> Tensor:
        return h * self.row[0]


@case()
class DataMadeBefore(Net):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = [self.b.bias.data]

    def between(self, h: Tensor) -> Tensor:
        return h + self.kept[0]


@case()
class DataReadInForward(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * self.b.weight.data.sum() + self.b.bias.detach()


@case()
class InputScaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        return super().forward(x)


@case()
class InputsColumnCleared(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x * 1)
        x[:, 0] = 0
        return (first + self.b(x)).square().mean()


@case()
class InputChangedThroughAView(Net):
    def forward(self, x: Tensor) -> Tensor:
        x.view(-1)[::2].add_(1)
        return super().forward(x)


@case()
class ActivationInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        h.mul_(2).add_(h.detach().mean())
        return functional.relu(h, inplace=True)


@case()
class OverlappingParts(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        left, right = h[:, :4], h[:, 2:]
        left.mul_(2)
        right.add_(1)
        left.tanh_()
        return h


@case()
class TransposedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h * 1
        h.t().mul_(torch.arange(6.0, dtype=h.dtype)[:, None])
        h.t_().t_().unsqueeze_(0).squeeze_(0)
        return h


@case()
class DiagonalInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        square = h.t() @ h
        square.diagonal().add_(1)
        return h @ square


@case()
class RowsWrittenInALoop(Net):
    def between(self, h: Tensor) -> Tensor:
        out = torch.zeros_like(h)
        for column in range(h.shape[1]):
            out[:, column] = h[:, column] * (column + 1)
        return out


@case()
class AccumulatedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        total = torch.zeros_like(h)
        for power in range(1, 4):
            total += h**power
        return total


@case()
class IndexedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        at = torch.tensor([0, 2, 2])
        h.index_add_(1, at, h[:, at] * 2)
        h[:, torch.tensor([5, 1])] = h[:, torch.tensor([1, 5])]
        return h


@case()
class MaskedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h.masked_fill_(h > 0.2, 0.2)
        h[h < -0.2] = -0.2
        return h


@case()
class ScatteredInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        top = h.topk(2, -1).indices
        return torch.zeros_like(h).scatter_(1, top, h.gather(1, top) * 2)


@case()
class WrittenToAnOutArgument(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            scale = torch.empty(6, dtype=h.dtype)
            torch.mul(h.detach().mean(0), 2, out=scale)
        return h * scale


@case()
class StridedByHand(Net):
    def between(self, h: Tensor) -> Tensor:
        windows = h.unfold(1, 3, 1)
        return functional.pad(windows.sum(-1), (1, 1))


@case()
class ExpandedThenWritten(Net):
    def between(self, h: Tensor) -> Tensor:
        mean = h.mean(1, keepdim=True).expand(-1, 6).contiguous()
        mean[:, 0] += 1
        return h - mean


@case()
class DetachedInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        scale = h * 2
        scale.detach_()
        return h * scale


@case(refused="SC104")
class DataAssigned(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.b.weight.data = self.b.weight.data * 0.5
        return super().forward(x)


@case(refused="SC104")
class WeightChangedWithoutGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.mul_(0.9)
        return super().forward(x)


@case(refused="SC104")
class WeightCopiedToTheOther(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.b.weight.copy_(self.a.weight)
        return super().forward(x)


@case()
class SumOfViewsOfAWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.a.weight.view(2, 3, 6)
        return (x @ weight[0].t() + x @ weight[1].t() + self.b(x)[:, :3]).square().mean()


@case()
class StackOfParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((6,), 0.5 * i) for i in range(3))
        self.scales.append(self.scales[0])

    def between(self, h: Tensor) -> Tensor:
        return h * torch.stack(list(self.scales)).sum(0)
