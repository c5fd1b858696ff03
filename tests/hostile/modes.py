"""Modes, what is trained, precision, and numbers drawn at random."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.hostile.harness import Net, case


@case()
class EvaluatesAPart(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def between(self, h: Tensor) -> Tensor:
        self.norm.eval()
        out = self.norm(h)
        self.norm.train()
        return out


@case()
class DependsOnItsMode(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * 2 if self.training else h


@case()
class FrozenLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.b.requires_grad_(False)


@case()
class FrozenFirstLayer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


@case()
class FrozenBias(Net):
    def __init__(self) -> None:
        super().__init__()
        self.a.bias.requires_grad_(False)


@case()
class NeverUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)


@case()
class UsedWithoutGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6)

    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            return h * self.c(h)


@case(refused="SC102")
class NothingTrained(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


@case()
class Autocast(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            return self.b(h).tanh()


@case()
class CastsToSingle(Net):
    def between(self, h: Tensor) -> Tensor:
        return (h.float() * 0.5).double() + h


@case()
class Complex(Net):
    def between(self, h: Tensor) -> Tensor:
        turned = torch.complex(h.cos(), h.sin()) * torch.polar(h.abs() + 1, h)
        return turned.real + turned.imag


@case()
class Fourier(Net):
    def between(self, h: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(h) * 0.5, n=6)


@case()
class NoDropout(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(functional.dropout(h, 0.0), 0.5, training=False)


@case(random=True)
class Dropout(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.dropout(h, 0.5)


@case(random=True)
class AlphaDropout(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.alpha_dropout(h, 0.2, training=True)


@case(random=True)
class Noise(Net):
    def between(self, h: Tensor) -> Tensor:
        return h + 0.1 * torch.randn_like(h)


@case(random=True)
class Bernoulli(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * torch.bernoulli(h.detach().sigmoid())


@case(random=True)
class Gumbel(Net):
    def between(self, h: Tensor) -> Tensor:
        return functional.gumbel_softmax(h, tau=2.0)


@case(warned="SC111")
class DrawnByPython(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * random.random()


@case(warned="SC111")
class DrawnByNumpy(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * float(np.random.rand())


@case(warned="SC111")
class DrawnByAGeneratorOfItsOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.draw = np.random.default_rng(0)

    def between(self, h: Tensor) -> Tensor:
        return h * self.draw.random()


@case(warned="SC111")
class LayersDroppedAtRandom(Net):
    def between(self, h: Tensor) -> Tensor:
        return h if random.random() < 0.5 else self.b(h)
