"""Ops that a user defines with `torch.library.custom_op`, of which the compiler has no rule."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from tests.hostile.harness import Net, case


@custom_op("hostile::row_norm", mutates_args=())
def row_norm(x: Tensor, eps: float) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


@custom_op("hostile::row_norm_backward", mutates_args=())
def row_norm_backward(grad: Tensor, x: Tensor, eps: float) -> Tensor:
    scale = (x.square().sum(-1, keepdim=True) + eps).rsqrt()
    return grad * scale - x * (grad * x).sum(-1, keepdim=True) * scale**3


row_norm.register_fake(lambda x, eps: torch.empty_like(x))
row_norm_backward.register_fake(lambda grad, x, eps: torch.empty_like(x))


def _keep(ctx, inputs: tuple[Tensor, float], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.eps = inputs[1]


row_norm.register_autograd(
    lambda ctx, g: (row_norm_backward(g, *ctx.saved_tensors, ctx.eps), None), setup_context=_keep
)


@custom_op("hostile::sine_and_sum", mutates_args=())
def sine_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.sum(-1)


sine_and_sum.register_fake(lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])))


@custom_op("hostile::each_sine", mutates_args=())
def each_sine(xs: list[Tensor]) -> list[Tensor]:
    return [x.sin() for x in xs]


each_sine.register_fake(lambda xs: [torch.empty_like(x) for x in xs])


@custom_op("hostile::halve_", mutates_args={"x"})
def halve_(x: Tensor) -> None:
    x.mul_(0.5)


@custom_op("hostile::total", mutates_args=())
def total(x: Tensor) -> float:
    return float(x.sum())


total.register_fake(lambda x: 1.0)


@custom_op("hostile::unknown_shape", mutates_args=())
def unknown_shape(x: Tensor) -> Tensor:
    return x.sin()


@custom_op("hostile::underived", mutates_args=())
def underived(x: Tensor) -> Tensor:
    return x.sin()


underived.register_fake(torch.empty_like)


@case(warned="SC301")
class CustomOp(Net):
    def between(self, h: Tensor) -> Tensor:
        return row_norm(h, 1e-3)


@case(warned="SC301")
class CustomOpOfSeveralResults(Net):
    def between(self, h: Tensor) -> Tensor:
        sine, sums = sine_and_sum(h.detach())
        return h * sine + sums[:, None]


@case(warned="SC301")
class CustomOpOfLists(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * each_sine([h.detach(), h.detach().cos()])[1]


@case(refused="SC104")
class CustomOpThatWrites(Net):
    def between(self, h: Tensor) -> Tensor:
        scale = h.detach().clone()
        halve_(scale)
        return h * scale


@case(refused="SC104")
class CustomOpThatWritesABuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(6))

    def between(self, h: Tensor) -> Tensor:
        halve_(self.scale)
        return h * self.scale


@case(refused="SC104")
class CustomOpOfANumber(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * total(h.detach())


@case(refused="SC104")
class CustomOpWithoutAFake(Net):
    def between(self, h: Tensor) -> Tensor:
        return h * unknown_shape(h.detach())


@case(refused="SC104")
class CustomOpWithoutADerivative(Net):
    def between(self, h: Tensor) -> Tensor:
        return underived(h)
