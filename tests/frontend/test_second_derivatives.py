"""Gradients of gradients go through our own ops as through PyTorch's: no derivative is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import shardc
from shardc import torch_compat
from shardc.frontend.op_overrides import WHOLE_OPS, cumprod_backward, overrides, undifferentiated
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import op_name
from shardc.ir.ops.attention import attention
from shardc.ir.ops.grouped import grouped_mm
from shardc.ir.ops.linear import LINEAR, linear
from shardc.ir.ops.scan import scan
from shardc.ir.ops.scan_body import parse_body
from shardc.ir.schema import register_ops
from tests.trained import MESH, PLAN, batches, made

Check = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)


OFFSETS = torch.tensor([2, 2, 5], dtype=torch.int32)  # an empty group, and a row after the last
SEEN = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 1]], dtype=torch.bool)  # a row without keys
Q, K, V = draw(1, 4, 3, 2), draw(1, 2, 5, 2), draw(1, 2, 5, 3)
# Every op that a step may have: before the loop, inside it and after it.
EVERY = (
    "h:bk g:bn | x:btk w:kn m:n p:t | a=exp(x) b=sigmoid(h) c=mul(a,b) d=tanh(c) e=dot(d,w:k) f=add(e,g) i=softplus(f) "
    "j=shift(i:1.5) l=log(j) n=sqrt(j) o=rsqrt(j) q=div(l,n) r=sub(q,o) s=keep(r,m) u=neg(s) v=scale(u:0.7) "
    "z=maximum(v,e) y=abs(z) A=relu(y) B=sum(A:n) D=mul(B,p) E=mul(d,D) F=dot(E,w:k) H=rename(x:kn) G=mul(F,H) "
    "| h=E g=A | btn=G kbt=h"
)
RNN = "h:bk | x:tbn U:kn | s=dot(h,U:k) p=add(s,x) q=tanh(p) r=rename(q:nk) | h=r | tbn=q"


def scanned(text: str, states: int) -> Callable[..., Tensor]:
    def run(*tensors: Tensor) -> Tensor:
        yields, lasts = scan(parse_body(text), tensors[:states], tensors[states:])
        return torch.cat([t.flatten() * (place + 1) for place, t in enumerate([*yields, *lasts])])

    return run


KEPT = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
CHECKS: dict[str, Check] = {
    "scan": (scanned(EVERY, 2), (draw(2, 3), draw(2, 3) * 2, draw(2, 4, 3), draw(3, 3), KEPT, draw(4))),
    "scan, a dim that is another": (scanned(RNN, 1), (draw(2, 3), draw(4, 2, 3), draw(3, 3))),
    "linear": (linear, (draw(2, 3, 4), draw(5, 4), draw(5))),
    "linear of a vector": (linear, (draw(3, 4), draw(4), draw(1).sum())),
    "_grouped_mm": (lambda a, b: grouped_mm(a, b, OFFSETS), (draw(6, 3), draw(3, 3, 2))),
    "scaled_dot_product_attention": (attention, (draw(2, 1, 3, 2), K, V)),
    "attention, causal": (lambda q, k, v: attention(q, k, v, is_causal=True), (draw(1, 2, 3, 2), K, V)),
    "attention, a mask": (lambda q, k, v: attention(q, k, v, SEEN), (draw(1, 2, 3, 2), K, V)),
    "attention, a bias": (attention, (draw(1, 2, 3, 2), K, V, draw(3, 5))),
    "cumprod_backward": (lambda g, x: cumprod_backward(g, x, 1, x.cumprod(1)), (draw(2, 4), draw(2, 4) + 1)),
    "attention, grouped": (lambda q, k, v: attention(q, k, v, enable_gqa=True, scale=0.3), (Q, K, V)),
}


OPERANDS: dict[str, Callable[[], Any]] = {
    "Tensor": lambda: draw(2, 2),
    "List[Tensor]": lambda: [draw(2, 2)],
    "str": str,
    "List[int]": list,
    "List[bool]": list,
}


@pytest.mark.parametrize("name", CHECKS)
def test_derivatives_of_derivatives(name: str) -> None:
    function, operands = CHECKS[name]
    assert gradcheck(function, operands)
    assert gradgradcheck(function, operands)


def test_every_op_that_a_trace_may_hold_is_checked() -> None:
    """What stands for an op of ATen is checked above, or is ordinary ops; all it holds is refused on its own."""
    assert overrides().keys() - CHECKS.keys() == {"dropout"}  # of ATen's own ops
    register_ops()
    for op in WHOLE_OPS:
        with torch_compat.undifferentiable(WHOLE_OPS, undifferentiated), pytest.raises(ShardcError, match=op_name(op)):
            op(*[OPERANDS.get(str(a.type), lambda: None)() for a in op._schema.arguments if not a.has_default_value()])
    assert LINEAR(draw(2, 2), draw(2, 2)).shape == (2, 2)  # outside of a trace they are as they were


def test_a_trace_holds_no_other_op_of_ours_that_autograd_does_not_know() -> None:
    """Besides those, tracing makes random numbers, which have no gradient; all else comes in by passes, after it."""

    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.g = nn.Linear(8, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(self.n(self.a(x))) + torch.rand_like(x)
            return F.cross_entropy(self.g(h.transpose(1, 2)).flatten(0, 1), torch.zeros(16, dtype=torch.int64))

    traced = trace(made(Everything), batches(2, 4, 8)[0])
    ours = {n.target for n in traced.graph.nodes if str(n.target).startswith("shardc.")}
    assert ours - set(WHOLE_OPS) == {torch.ops.shardc.random_uniform.default}


class Penalty(nn.Module):
    """A gradient penalty: the loss holds the gradient of the output by the input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        y = self.head(self.body(x).tanh())
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.mean() + (slope.flatten(1).norm(dim=1) - 1).square().mean()


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Products(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.2, 0.0, x).cumprod(1)


BODIES = {
    "linear": lambda: nn.Linear(8, 8),
    "attention": Attends,
    "products": Products,
    "layer": lambda: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_a_gradient_penalty(name: str) -> None:
    """Under dp and tp; eager attention is asked for the kernel that has second derivatives."""
    (x,) = batches(4, 3, 8, count=1)
    model = made(lambda: Penalty(BODIES[name]()))
    plan = PLAN | {"params": {"body.weight": "tp"} if name == "linear" else {"head.weight": "-, tp"}}
    trainer = shardc.compile(model, x, mesh="dp=2, tp=2", plan=plan).launch()
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(x)
    loss.backward()
    torch.testing.assert_close(trainer.step(x).loss, loss.detach(), rtol=1e-11, atol=1e-12)
    found = trainer.gather_grads()
    for key, p in model.named_parameters():
        torch.testing.assert_close(found[key], p.grad, rtol=1e-11, atol=1e-12)


def test_a_hessian_vector_product() -> None:
    class Curvature(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            loss = self.b(self.a(x).tanh()).square().mean()
            slopes = torch.autograd.grad(loss, [self.a.weight, self.b.weight], create_graph=True)
            return loss + sum((s * s.detach()).sum() for s in slopes)

    (x,) = batches(4, 8, count=1)
    model = made(Curvature)
    trainer = shardc.compile(model, x, mesh=MESH, plan=PLAN).launch()
    trainer.step(x)
    model(x).backward()
    found = trainer.gather_grads()
    for key, p in model.named_parameters():
        torch.testing.assert_close(found[key], p.grad, rtol=1e-11, atol=1e-12)
