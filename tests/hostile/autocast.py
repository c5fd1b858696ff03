"""Regions of autocast. The model is of float64, which autocast leaves alone: what it shall cast is made float32 first.

Where halves are computed with, they say so by a factor that a Python `if` takes from their dtype: a region that was
forgotten is wrong by half, which no tolerance of rounding hides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import custom_bwd, custom_fwd  # pyright: ignore
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.hostile.harness import Net, case

HALF = {"tolerance": 4e-2}  # of bfloat16, with 8 bits


def marked(y: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """In float64 again, twice as much where it is of the dtype that the region should give it."""
    return y.double() * (2 if y.dtype == dtype else 1)


class Single(Net):
    """With a layer of float32 among those of float64."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(6, 6).float()


@case()
class LeavesDoublesAlone(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(self.b(h) @ self.a.weight)


@case(**HALF)
class CastsALayer(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(self.c(h.float()))


@case(tolerance=1e-2)
class CastsToHalf(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return marked(self.c(h.float()), torch.float16)


@case(tolerance=1e-5)
class ARegionSwitchedOffWithin(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
            return marked(self.c(h.float()), torch.float32)


@case(**HALF)
class RegionsWithinRegions(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = marked(functional.linear(h.float(), self.c.weight * 1))  # no leaf: its cast is not kept
            with torch.autocast("cpu", torch.float16):
                second = marked(functional.linear(h.float(), self.c.weight * 1), torch.float16)
            return first - second / 3 + marked(functional.linear(h.float(), self.c.weight * 1))


@case(**HALF)
class ACastIsUsedTwice(Single):
    """The region casts the weight once, and keeps it."""

    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(self.c(self.c(h.float()).tanh()))


@case(**HALF)
class ACastIsNotKept(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return marked(self.c(self.c(h.float()).tanh()))


@case(**HALF)
class ACastFirstMadeWithoutGradient(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                scale = self.c(h.float()).double().abs().mean() + 1
            return marked(self.c(h.float())) / scale


@case(**HALF)
class TwoRegionsOverOneWeight(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            first = marked(self.c(h.float()))
        with torch.autocast("cpu", torch.bfloat16):
            return first + marked(self.c(first.float()))


@case(**HALF)
class ADecoratedMethod(Single):
    @torch.autocast("cpu", torch.bfloat16)
    def between(self, h: Tensor) -> Tensor:
        return marked(self.c(h.float()))


@case(**HALF)
class ARegionThatTheModelHolds(Single):
    def __init__(self) -> None:
        super().__init__()
        self.region = torch.autocast("cpu", torch.bfloat16)

    def between(self, h: Tensor) -> Tensor:
        with self.region:
            return marked(self.c(h.float()))


@case(**HALF)
class AsksWhetherItIsCast(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16:
                return marked(self.c(h.float())) * 3
        return h


@case(**HALF)
class SoftmaxStaysSingle(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(self.c(h.float()).softmax(-1).square().cumsum(-1), torch.float32)


@case(**HALF)
class PromotedByCat(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            both = torch.cat([self.c(h.float()), h.float()], -1)
            return marked(both, torch.float32)[:, 3:9]


@case(**HALF)
class ALossOfHalves(Single):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(functional.mse_loss(self.c(self.a(x).float()), x.float()), torch.float32)


@case(**HALF)
class RecomputedUnderItsRegion(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(lambda x: marked(self.c(x.float())).tanh(), h, use_reentrant=False)


@case(**HALF)
class RecomputedUnderARegionWithin(Single):
    def part(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(self.c(x.float())).tanh()

    def between(self, h: Tensor) -> Tensor:
        return checkpoint(self.part, h, use_reentrant=True)


class _AsSingle(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight * (1 if torch.is_autocast_enabled("cpu") else 2)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        scale = 1 if torch.is_autocast_enabled("cpu") else 2
        return g @ weight.t() * scale, x.t() @ g * scale


class _AsItIs(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return (g.float() @ weight).to(x.dtype), (g.float().t() @ x).to(weight.dtype)


@case(**HALF)
class AFunctionThatCastsItsInputs(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(_AsSingle.apply(h.float().bfloat16(), self.c.weight), torch.float32)


@case(**HALF)
class AFunctionUnderARegion(Single):
    def between(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return marked(_AsItIs.apply(h.float(), self.c.weight))


@case(**HALF)
class ABackwardWithARegion(Single):
    def between(self, h: Tensor) -> Tensor:
        out = h * 1

        def cast(g: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return marked(g.float() @ self.c.weight.detach().float())

        out.register_hook(cast)
        return out


@case()
class LeftSwitchedOn(Net):
    """As eager PyTorch leaves it, over float64: without an effect here, and to be off again for whoever comes next."""

    def between(self, h: Tensor) -> Tensor:
        before = torch.is_autocast_enabled("cpu")
        torch.set_autocast_enabled("cpu", True)
        try:
            return h.tanh()
        finally:
            torch.set_autocast_enabled("cpu", before)


@case(**HALF)
class AttentionOfHalves(Single):
    def between(self, h: Tensor) -> Tensor:
        rows = self.c(h.float()).view(-1, 1, 3, 2)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = functional.scaled_dot_product_attention(rows, rows, rows)
        return marked(mixed.reshape(h.shape))


@case(**HALF)
class AttentionOfHalvesUnderAMaskOfSingles(Single):
    def between(self, h: Tensor) -> Tensor:
        rows = self.c(h.float()).view(-1, 1, 3, 2).bfloat16()
        mask = torch.tensor([[0.0, -1.0, -9.0]], dtype=torch.float32)
        return marked(functional.scaled_dot_product_attention(rows, rows, rows, attn_mask=mask).reshape(h.shape))


@case()
class FilledWithAnotherDtype(Net):
    def between(self, h: Tensor) -> Tensor:
        h = h.clone()
        h[h < 0] = torch.tensor(0.25, dtype=torch.float32)
        return h
