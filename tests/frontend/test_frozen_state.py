"""No program has a tensor of the model for a constant, whatever way the model, a loss or a backward comes to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardc
from shardc import Mesh
from shardc.ir.diagnostic import ShardcError
from tests.trained import MESH, assert_trains_as_eager, batches, made, trained_by_eager

DATA = batches(4, 6)


class Two(nn.Module):
    """Two layers; `forward` of each case says how their weights are come by."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)


# ------------------------------------------------------------------ other ways to a parameter
class InAList(Two):
    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.a.weight, (self.b.weight,)]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weights[0]).tanh(), self.weights[1][0]).square().sum()


class Views(Two):
    """Kept since __init__: a transposed view, rows, a view in another shape, and a detached one."""

    def __init__(self) -> None:
        super().__init__()
        self.turned, self.row = self.a.weight.t(), self.a.weight[1:3]
        self.flat, self.still = self.b.weight.view(-1), self.b.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        h = (x @ self.turned).tanh() + x @ self.row.sum(0, keepdim=True).t()
        return (h * self.flat[:6]).square().sum() + (x @ self.still).square().mean()


class OfNumpy(Two):
    """Shares memory with a buffer, in a storage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(6))
        self.seen = torch.from_numpy(self.total.numpy())

    def forward(self, x: Tensor) -> Tensor:
        self.total.add_(x.detach().mean(0))
        return self.a(x + self.seen).square().sum()


class InAClosure(Two):
    def __init__(self) -> None:
        super().__init__()
        weight = self.a.weight
        self.act = lambda h: h @ weight
        self.part = partial(torch.mul, self.b.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.act(x)).tanh().square().sum()


class Apply(torch.autograd.Function):
    """A linear layer whose backward reads the layer again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ ctx.layer.weight, grads[0].t() @ x, None


class ReadInBackward(Two):
    def forward(self, x: Tensor) -> Tensor:
        return Apply.apply(self.b(x), self.a.weight, self.a).square().sum()


class RunsBackward(torch.autograd.Function):
    """As reentrant checkpointing: a backward pass within another adds to `.grad` by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (saved,) = ctx.saved_tensors
        x = saved.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, grads[0])
        return x.grad, None


class BackwardWithin(Two):
    def forward(self, x: Tensor) -> Tensor:
        return RunsBackward.apply(self.a(x), self.b).square().sum()


class BackwardInForward(Two):
    """What a backward pass in forward leaves in `.grad` is part of the gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h.square().mean().backward(retain_graph=True)
        return self.b(h).square().sum()


class AssignsGrad(Two):
    def forward(self, x: Tensor) -> Tensor:
        self.b.bias.grad = torch.ones_like(self.b.bias)
        return self.b(self.a(x)).square().sum()


OTHER_WAYS = [
    InAList, Views, OfNumpy, InAClosure, ReadInBackward, BackwardWithin, BackwardInForward, AssignsGrad,
]  # fmt: skip


@pytest.mark.parametrize("build", OTHER_WAYS)
@pytest.mark.sampled(8)
def test_other_ways_to_a_parameter(build: type[nn.Module]) -> None:
    assert_trains_as_eager(build, DATA)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("build", OTHER_WAYS)
def test_the_models_own_tensors_are_left_alone(build: type[nn.Module]) -> None:
    """Nothing of a trace stays on the model: no gradient, no fake tensor, the same tensors in the same places."""
    model = made(build)
    before = {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())}
    shardc.compile(model, DATA[0], mesh=MESH)
    assert {name: id(t) for name, t in (*model.named_parameters(), *model.named_buffers())} == before
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_reads_the_model() -> None:
    model, twin = made(Two), made(Two)

    def penalised(of: nn.Module) -> Callable[[Any, Any], Tensor]:
        return lambda y, x: y.square().sum() + 0.1 * sum(p.square().sum() for p in of.parameters())

    class Head(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner.b(self.inner.a(x))

    program = shardc.compile(Head(model), DATA[0], mesh=MESH, loss=penalised(model))
    trainer = program.launch()
    trainer.step(DATA[0])
    penalised(twin)(Head(twin)(DATA[0]), DATA[0]).backward()
    found = trainer.gather_grads()
    for name, p in Head(twin).named_parameters():
        torch.testing.assert_close(found[name], p.grad, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------ activation checkpointing
class Checkpointed(Two):
    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.norm, self.how = nn.BatchNorm1d(6), how  # its running statistics count the recomputation too

    def block(self, h: Tensor) -> Tensor:
        return self.norm(self.b(h)).tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.block, self.a(x)).square().sum()


def sequential(block: Callable[[Tensor], Tensor], h: Tensor) -> Tensor:
    class Call(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            return block(h)

    return checkpoint_sequential([Call(), Call()], 2, h, use_reentrant=False)


WAYS = {
    "plain": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "whole": partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": lambda block, h: checkpoint(lambda h: checkpoint(block, h, use_reentrant=False), h, use_reentrant=False),
    "sequential": sequential,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_checkpointing(way: str) -> None:
    assert_trains_as_eager(lambda: Checkpointed(WAYS[way]), DATA)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("plan", [{"inputs": {"x": "dp"}, "storage": {"zero": 3, "axes": ["dp"]}}, {"accumulate": 2}])
@pytest.mark.sampled(4)
def test_checkpointing_under_plans(reentrant: bool, plan: dict[str, Any]) -> None:
    class PerSample(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda h: self.b(h).tanh(), self.a(x), use_reentrant=reentrant)
            return h.square().mean()

    assert_trains_as_eager(PerSample, DATA, plan=plan)


def test_hugging_faces_checkpointing() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16, use_cache=False)
    config.attn_pdrop = config.embd_pdrop = config.resid_pdrop = 0.0
    tokens = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(0))

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT2LMHeadModel(config)
            self.model.gradient_checkpointing_enable()

        def forward(self, x: Tensor) -> Tensor:
            return self.model(input_ids=tokens, labels=tokens).loss + 0 * x.sum()

    program = shardc.compile(made(Text).train(), DATA[0], mesh=Mesh(dp=2))
    parameters = {tuple(p.shape) for p in made(Text).parameters() if p.ndim == 2}
    assert not any(tuple(t.shape) in parameters for t in program.constants.values())
    assert_trains_as_eager(Text, DATA, tolerance=1e-5)  # the library's loss is float32


# ------------------------------------------------------------------ what cannot be made right
def refused(model: nn.Module, code: str, **options: Any) -> str:
    with pytest.raises(ShardcError) as failure:
        shardc.compile(model, DATA[0], mesh=MESH, **options)
    assert [d.code for d in failure.value.diagnostics] == [code]
    return str(failure.value)


def test_a_tensor_that_is_trained_and_no_parameter() -> None:
    class Plain(Two):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.ones(6, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) * self.scale).sum()

    said = refused(made(Plain), "SC120")
    assert "(self.a(x) * self.scale).sum()" in said
    assert "nn.Parameter" in said


def test_another_dtypes_view_of_a_parameter() -> None:
    class Bits(Two):
        def __init__(self) -> None:
            super().__init__()
            self.bits = self.a.weight.detach().view(torch.int64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() * (self.bits > 0).sum()

    assert "a.weight" in refused(made(Bits), "SC120")


def test_parameters_in_one_memory() -> None:
    class Overlap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Parameter(self.a.weight.data[:2])

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() + (x @ self.c.t()).sum()

    assert "'c'" in refused(made(Overlap), "SC121")


def test_columns_of_one_matrix_are_parameters_of_their_own() -> None:
    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 6)
            self.left, self.right = nn.Parameter(whole[:, :3]), nn.Parameter(whole[:, 3:])

        def forward(self, x: Tensor) -> Tensor:
            return ((x @ self.left).tanh() * (x @ self.right)).square().sum()

    assert_trains_as_eager(Columns, DATA)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(m.a, "weight", nn.Parameter(m.a.weight * 0.9)), "replaces"),
        (lambda m: m.a.weight.requires_grad_(False), "freezes"),
        (lambda m: m.a.weight.detach().clamp_(-1, 1), "overwrites"),
        (lambda m: setattr(m.a.weight, "data", m.a.weight.data * 0.9), "data"),
    ],
)
def test_forward_changes_a_parameter(change: Callable[[Any], None], said: str) -> None:
    class Changes(Two):
        def forward(self, x: Tensor) -> Tensor:
            change(self)
            return self.b(self.a(x)).sum()

    assert said in refused(made(Changes), "SC104")


def test_eager_does_what_these_tests_compare_with() -> None:
    """The other side of the comparison has no part of shardc in it, and sees what the cases are about."""
    plain, counted = made(lambda: Checkpointed(lambda block, h: block(h))), made(lambda: Checkpointed(WAYS["plain"]))
    once, twice = trained_by_eager(plain, DATA), trained_by_eager(counted, DATA)
    assert twice["norm.num_batches_tracked"] == 2 * once["norm.num_batches_tracked"]
