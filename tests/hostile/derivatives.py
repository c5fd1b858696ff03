"""Derivatives within a forward, autograd functions of the user's own, and gradients that are stopped or bent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function, forward_ad
from torch.nn import functional

from tests.hostile.harness import Net, case


@case()
class GradientPenalty(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        score = self.b(self.a(x).tanh()).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score.square() / 100 + (slope.norm(dim=-1) - 1).square().mean()


@case()
class Forces(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.b(self.a(x).sin()).square().sum()
        (force,) = torch.autograd.grad(-energy, x, create_graph=True)
        return (force - 0.1).square().mean()


@case()
class PenaltyThroughAttention(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        h = self.a(x).view(-1, 1, 3, 2)
        out = self.b(functional.scaled_dot_product_attention(h, h, h).reshape(-1, 6))
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().mean()


@case()
class Residual(Net):
    """The Laplacian of a field, by derivatives of derivatives, as physics-informed losses have it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        field = self.b(self.a(x).tanh()).sum(-1)
        (slope,) = torch.autograd.grad(field.sum(), x, create_graph=True)
        laplacian = torch.zeros_like(field)
        for axis in range(2):
            (bend,) = torch.autograd.grad(slope[:, axis].sum(), x, create_graph=True)
            laplacian = laplacian + bend[:, axis]
        return (laplacian + field).square().mean()


@case()
class HessianTimesAVector(Net):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        (slope,) = torch.autograd.grad(loss, self.a.weight, create_graph=True)
        (product,) = torch.autograd.grad((slope * slope.detach()).sum(), self.a.weight, create_graph=True)
        return loss + product.square().sum()


@case()
class NormOfTheGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        slopes = torch.autograd.grad(loss, [self.a.weight, self.b.weight], create_graph=True)
        return loss + 0.1 * sum(s.square().sum() for s in slopes)


@case()
class InnerStep(Net):
    """A step of the inner task, whose derivative the outer one takes (MAML)."""

    def forward(self, x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(super().forward(x), self.b.weight, create_graph=True)
        fast = self.b.weight - 0.1 * slope
        return functional.linear(self.a(x).tanh(), fast, self.b.bias).square().mean()


@case()
class DetachedGradientAsWeight(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        (weight,) = torch.autograd.grad(self.b(h).square().mean(), h, retain_graph=True)
        return (self.b(h) * (1 + weight.detach())).square().mean()


@case()
class FunctionalGradient(Net):
    def forward(self, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda v: self.b(self.a(v).tanh()).square().sum())(x)
        return (slope + x).square().mean()


@case()
class ForwardModeByFunctions(Net):
    def between(self, h: Tensor) -> Tensor:
        value, along = torch.func.jvp(lambda x: self.b(x).tanh(), (h,), (torch.ones_like(h),))
        return value * along


@case()
class ForwardModeByTwoBackwards(Net):
    def between(self, h: Tensor) -> Tensor:
        found: Any = torch.autograd.functional.jvp(
            lambda x: self.b(x).tanh(), h, torch.ones_like(h), create_graph=True, strict=True
        )
        return found[1]


@case(refused="SC104")
class DualNumbers(Net):
    def between(self, h: Tensor) -> Tensor:
        with forward_ad.dual_level():
            pair: Any = forward_ad.unpack_dual(self.b(forward_ad.make_dual(h, torch.ones_like(h))))
            return pair.primal * pair.tangent


@case()
class JacobianForward(Net):
    def between(self, h: Tensor) -> Tensor:
        rows: Any = torch.func.vmap(torch.func.jacfwd(lambda x: (x @ self.b.weight.t()).tanh()))(h)
        return rows.sum(-1)


@case(refused="SC104")
class HessianOfARow(Net):
    """Forward over reverse, which torch cannot do on fakes."""

    def between(self, h: Tensor) -> Tensor:
        rows: Any = torch.func.vmap(torch.func.hessian(lambda x: (x @ self.b.weight.t()).tanh().sum()))(h)
        return rows.sum(-1)


@case()
class FunctionalVmap(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: self.b(self.a(row).tanh()).square().mean())(x).mean()


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 3  # not the derivative of what forward does


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return grads[0] @ weight if wanted[0] else None, grads[0].t() @ x if wanted[1] else None


class ReadsLate(Function):
    """Its backward reads the layer as it then is, instead of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        return functional.linear(x, layer.weight)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0] @ ctx.layer.weight.detach(), None


class StraightThrough(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0]


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        return grads[0] * 2


class Ranked(Function):
    """Two outputs, of which one has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, at = x.sort(-1)
        ctx.mark_non_differentiable(at)
        ctx.save_for_backward(at)
        return values, at

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (at,) = ctx.saved_tensors
        return torch.zeros_like(grads[0]).scatter(-1, at, grads[0])


@case()
class OwnGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        return Doubled.apply(h)


@case()
class OwnProduct(Net):
    def between(self, h: Tensor) -> Tensor:
        return Product.apply(h, self.b.weight)


@case()
class BackwardReadsAWeight(Net):
    def between(self, h: Tensor) -> Tensor:
        return ReadsLate.apply(h, self.b)


@case()
class RoundedStraightThrough(Net):
    def between(self, h: Tensor) -> Tensor:
        return StraightThrough.apply(h * 4)


@case()
class OwnInPlace(Net):
    def between(self, h: Tensor) -> Tensor:
        return InPlace.apply(h * 1).tanh()


@case()
class OwnSort(Net):
    def between(self, h: Tensor) -> Tensor:
        values, at = Ranked.apply(h)
        return values * at


@case()
class PenaltyThroughOwnFunction(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        out = Product.apply(self.a(x).tanh(), self.b.weight)
        (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return slope.square().mean()


@case()
class ReversedGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        return 2 * h.detach() - h


@case()
class PartWithoutGradient(Net):
    def between(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.b(h).softmax(-1)
            with torch.enable_grad():
                again = self.b(h)
        return h * target + again


@case()
class GradientsSetOff(Net):
    def between(self, h: Tensor) -> Tensor:
        torch.set_grad_enabled(False)
        scale = self.b(h).sigmoid()
        torch.set_grad_enabled(True)
        return h * scale


@case()
class StoppedByWhere(Net):
    """Both branches of `where` have gradients; that of the one not taken would be nan if it were not bounded."""

    def between(self, h: Tensor) -> Tensor:
        safe = h.where(h > 0, 1)
        return safe.sqrt().where(h > 0, 0.1 * h)


@case()
class TeacherWithoutGradient(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(6, 6).requires_grad_(False)

    def between(self, h: Tensor) -> Tensor:
        return h - self.teacher(h)
