"""Equal layers need not all be recorded, and what a trace of few of them says is what a trace of all says."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardc.frontend.precision import Precision
from shardc.frontend.trace import trace
from shardc.ir.gc_pause import gc_paused
from shardc.ir.lengthened import _Lengthening  # pyright: ignore[reportPrivateUsage]
from tests.frontend.equal_stacks import LAYERS, WIDTH, Block, Stack, X, both, mlp


def attended(block: Block, x: Tensor) -> Tensor:
    """Views that are their argument, tuples, shapes and numbers."""
    a, b = block.up(block.norm(x).contiguous()).to(torch.float32).chunk(2, dim=-1)
    rows, width = a.shape
    scores = (a.reshape(rows, width) @ b.T) / width**0.5
    values, _ = scores.softmax(-1).max(dim=-1, keepdim=True)
    return x + values.expand_as(x) * block.down(torch.cat([a, b], -1))


class Scaled(nn.Module):
    """A layer that is given what all layers share, and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = self.lin(x) + bias
        return x + y.tanh(), y if before is None else before + y


class WithShared(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled() for _ in range(layers)])
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        bias, before = self.bias * 2, torch.zeros_like(x)
        for block in self.blocks:
            x, before = block(x, bias, before)
        return (x + before).square().mean()


class TwoLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack().layers, Stack().layers

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.encoder, *self.decoder]:
            x = layer(x)
        return x.square().mean()


def alternating(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) if block.index % 2 else x + block.down(block.up(x)).tanh()


def noted_in_python(block: Block, x: Tensor) -> Tensor:
    y = block.up(x)
    assert (y.shape, y.dtype, y.requires_grad, y.is_cuda) == ((4, 2 * WIDTH), torch.float32, True, False)
    return x + block.down(y.view(y.size(0), -1)) * y.shape[1]


class BiasedByTheFirst(nn.Module):
    """T5's bias: the first layer makes it, with writes, and all others are given it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Scaled() for _ in range(LAYERS + 1)])

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0
        bias = None
        for block in self.blocks:
            if bias is None:
                bias = block.lin.weight[0] * 2
                with torch.no_grad():
                    places = torch.arange(WIDTH)
                    places += places
                bias = bias * places
            y, _ = block(y, bias)
        return y.square().mean()


def bias_of_the_first(block: Block, x: Tensor) -> Tensor:
    y = block.up(x)
    if block.index == 0:
        y = y.clone()
        y += 1
    return x + block.down(y)


def within_itself(block: Block, x: Tensor) -> Tensor:
    """Writes to what the layer has made, through views too, some without a gradient."""
    y = block.up(x)
    y /= 3
    y[:, 2:4].add_(1)
    with torch.no_grad():
        rates = x.detach() * 2
        rates.mul_(3)
    z = block.down(y)
    z += x
    return z * rates


LEFT_OUT: dict[str, nn.Module] = {
    "plain": Stack(),
    "dropout": Stack(dropout=0.5),
    "views and tuples": Stack(attended),
    "what layers share": WithShared(),
    "two lists": TwoLists(),
    "two kinds in turn": Stack(alternating, layers=30),
    "python asks": Stack(noted_in_python),
    "layers write to their own": Stack(within_itself),
    "the first layer writes": Stack(bias_of_the_first),
    "the first layer's bias": BiasedByTheFirst(),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_equal_layers_are_left_out(name: str) -> None:
    assert both(LEFT_OUT[name])


@pytest.mark.parametrize(
    "options",
    [
        {"precision": Precision(torch.bfloat16)},
        {"microbatches": 2, "weighted": True},
        {"forward_only": True, "with_outputs": True},
        {"with_outputs": True},
    ],
    ids=["bf16", "microbatches", "evaluation", "outputs"],
)
def test_under_every_option(options: dict[str, Any]) -> None:
    assert both(Stack(dropout=0.5), **options)


def test_few_layers_have_nodes() -> None:
    """A trace of 64 layers has as many nodes as one of 16."""
    counts = [
        len(
            trace(Stack(layers=n), X).graph.find_nodes(
                op="call_function", target=torch.ops.aten.native_layer_norm.default
            )
        )
        for n in (16, 64)
    ]
    assert counts == [6, 6]


def test_too_few_layers_are_all_recorded() -> None:
    assert trace(Stack(layers=13), X).few is None


def test_no_garbage_of_lengthening_is_left() -> None:
    """Its functions hold it, and it them and two graphs: it lets go of them itself."""
    with gc_paused():
        traced = trace(Stack(), X)
        assert traced.few is not None
        assert not any(type(held) is _Lengthening for held in gc.get_objects())
