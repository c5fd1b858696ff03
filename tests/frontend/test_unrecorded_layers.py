"""Equal layers need not all be recorded, and what a trace of few of them says is what a trace of all says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardc.frontend import trace as tracing
from shardc.frontend.ingest import ingest
from shardc.frontend.precision import Precision
from shardc.frontend.trace import Traced, trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.plain import graph_to_plain

LAYERS = 16
WIDTH = 8
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
Do = Callable[["Block", Tensor], Tensor]
Run = Callable[["Stack", Tensor], Tensor]


def mlp(block: Block, x: Tensor) -> Tensor:
    return x + block.dropout(block.down(torch.relu(block.up(block.norm(x)))))


class Block(nn.Module):
    def __init__(self, index: int, do: Do = mlp, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.index, self.do = index, do

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x)


def in_turn(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


class Stack(nn.Module):
    """Layers that do something, and how they are run."""

    def __init__(self, do: Do = mlp, run: Run = in_turn, layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(i, do, dropout) for i in range(layers)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


def described(traced: Traced) -> Any:
    """All that a trace says, with a graph of it."""
    said = [(i.role, i.name, i.aliases, i.trainable, i.node.meta["val"].shape) for i in traced.inputs]
    outputs = [(o.role, o.name, o.node.meta["val"].shape) for o in traced.outputs]
    modules = [(name, node.meta["val"].shape) for name, node in traced.modules.items()]
    notes = [d.message for d in traced.diagnostics], traced.changed_attributes, traced.unused, traced.written
    return said, outputs, modules, notes, graph_to_plain(ingest(traced, Mesh()))


def both(model: nn.Module, batch: Any = X, *, made: Callable[[], Any] | None = None, **options: Any) -> bool:
    """Whether layers were left out; asserts that the trace says what one of all layers does. `made` undoes what the
    model keeps outside of itself."""
    said: list[Any] = []
    taken = False
    for lists in (tracing.long_lists, lambda _: {}):
        if made is not None:
            made()
        with patch.object(tracing, "long_lists", lists):
            traced = trace(model, batch, **options)
        taken = taken or traced.whole is not None
        said.append(described(traced))
    assert said[0] == said[1]
    return taken


# ---------------------------------------------------------------------- layers that are left out
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
    assert trace(Stack(layers=13), X).whole is None


# ---------------------------------------------------------------------- layers that must not be
CALLS: list[int] = []
KEPT: list[Tensor] = []


def indexed(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) / (1 + block.index)


def at_the_ninth(do: Do) -> Do:
    def chosen(block: Block, x: Tensor) -> Tensor:
        return do(block, x) if block.index == 9 else mlp(block, x)

    return chosen


def counting(block: Block, x: Tensor) -> Tensor:
    CALLS.append(1)
    return mlp(block, x) * 2 if len(CALLS) % 5 == 4 else mlp(block, x)


def remembering(block: Block, x: Tensor) -> Tensor:
    KEPT.append(y := mlp(block, x))
    return y


def losses_kept(model: Stack, x: Tensor) -> Tensor:
    KEPT.clear()
    x = in_turn(model, x)
    total = x + torch.stack(KEPT).mean(0)
    KEPT.clear()
    return total


def on_itself(block: Block, x: Tensor) -> Tensor:
    block.last = mlp(block, x)
    return block.last


def in_place(block: Block, x: Tensor) -> Tensor:
    x += block.down(torch.relu(block.up(x.clone())))
    return x


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.by, None


def with_function(block: Block, x: Tensor) -> Tensor:
    return mlp(block, Doubled.apply(x, float(block.index)))  # type: ignore[no-untyped-call]


def recomputed(block: Block, x: Tensor) -> Tensor:
    return checkpoint(mlp, block, x, use_reentrant=False)


def constant(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) * torch.full((WIDTH,), 1.0 + block.index)


def minus_zero(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x) * (-0.0 if block.index == 9 else 0.0)


def unrecorded_gradient(block: Block, x: Tensor) -> Tensor:
    with torch.no_grad() if block.index == 9 else nullcontext():
        y = mlp(block, x)
    return x + y


def narrowed(block: Block, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=block.index == 9):
        return x + block.down(block.up(x)).float()


def on_another_line(block: Block, x: Tensor) -> Tensor:
    if block.index == 9:
        return x + block.down(torch.relu(block.up(x)))
    return x + block.down(torch.relu(block.up(x)))


def reshaped(block: Block, x: Tensor) -> Tensor:
    y = mlp(block, x).clone()
    return y.unsqueeze_(0).squeeze_(0) if block.index == 9 else y


def detached(block: Block, x: Tensor) -> Tensor:
    return mlp(block, x.detach() if block.index == 9 else x)


def hooked_gradient(block: Block, x: Tensor) -> Tensor:
    y = mlp(block, x)
    y.register_hook(lambda g: g * (1 + block.index))
    return y


def all_states(model: Stack, x: Tensor) -> Tensor:
    states = [x := layer(x) for layer in model.layers]
    return torch.stack(states).mean(0)


def left_early(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers[:11]:
        x = layer(x)
    return x


def with_the_first(model: Stack, x: Tensor) -> Tensor:
    x = first = model.layers[0](x)
    for i, layer in enumerate(model.layers[1:]):
        x = layer(x + first) if i == 9 else layer(x)
    return x


def one_left_out(model: Stack, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = x if i == 9 else layer(x)
    return x


def twice(model: Stack, x: Tensor) -> Tensor:
    return in_turn(model, in_turn(model, x))


def reversed_order(model: Stack, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def regularized(model: Stack, x: Tensor) -> Tensor:
    return in_turn(model, x) + sum(p.square().sum() for p in model.parameters())


def between(model: Stack, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x) * (i + 1)
    return x


def three_back(model: Stack, x: Tensor) -> Tensor:
    states = [x, x, x]
    for layer in model.layers:
        states.append(layer(states[-1]) if len(states) < 12 else layer(states[-3]))
    return states[-1]


def caught(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        try:
            y = layer(x)
        except Exception:
            y = x * 3
        x = y
    return x


SINGLE: dict[str, nn.Module] = {
    **{f.__name__: Stack(f) for f in (indexed, counting, on_itself, in_place, with_function, recomputed, constant)},
    **{f.__name__: Stack(f) for f in (minus_zero, unrecorded_gradient, narrowed, on_another_line, detached, reshaped)},
    **{f.__name__: Stack(run=f) for f in (all_states, left_early, with_the_first, one_left_out, twice)},
    **{f.__name__: Stack(run=f) for f in (reversed_order, regularized, between, three_back)},
    "losses_kept": Stack(remembering, losses_kept),
    "caught": Stack(indexed, caught),
    "the ninth only": Stack(at_the_ninth(lambda block, x: block.down(block.up(x)))),
    "the ninth swaps": Stack(at_the_ninth(lambda block, x: x + block.down(torch.relu(block.up(x) * 1.0)))),
}


@pytest.mark.parametrize("name", SINGLE)
def test_layers_that_differ_are_all_recorded(name: str) -> None:
    assert not both(SINGLE[name], made=CALLS.clear)


def altered(change: Callable[[Block], object]) -> Stack:
    model = Stack()
    change(model.layers[9])  # type: ignore[arg-type]
    return model


def test_one_layer_is_frozen() -> None:
    assert not both(altered(lambda block: block.up.weight.requires_grad_(False)))


def test_one_layer_is_wider() -> None:
    def widen(block: Block) -> None:
        block.up, block.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    assert not both(altered(widen))


def test_one_layer_evaluates() -> None:
    model = Stack(dropout=0.5)
    model.layers[9].eval()
    assert not both(model)


def test_one_layer_has_a_hook() -> None:
    assert not both(altered(lambda block: block.register_forward_hook(lambda _m, _a, y: y * 2)))


def test_a_parameter_has_a_hook() -> None:
    assert not both(altered(lambda block: block.up.weight.register_hook(lambda g: g * 2)))


def test_two_layers_share_a_parameter() -> None:
    model = Stack()
    model.layers[9].up.weight = model.layers[8].up.weight
    assert not both(model)


def test_buffers_whose_values_are_asked_for() -> None:
    class Rated(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.register_buffer("rate", torch.tensor(index == 9))

        def forward(self, x: Tensor) -> Tensor:
            return mlp(self, x) * 2 if self.rate else mlp(self, x)

    model = Stack()
    model.layers = nn.ModuleList([Rated(i) for i in range(LAYERS)])
    assert not both(model)


def test_buffers_of_layers_are_inputs() -> None:
    class Shifted(Block):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.register_buffer("shift", torch.full((WIDTH,), float(index)))

        def forward(self, x: Tensor) -> Tensor:
            return mlp(self, x) + self.shift

    model = Stack()
    model.layers = nn.ModuleList([Shifted(i) for i in range(LAYERS)])
    assert both(model)


def test_statistics_that_a_step_changes() -> None:
    model = Stack(lambda block, x: mlp(block, block.norm(x)))
    for layer in model.layers:
        layer.norm = nn.BatchNorm1d(WIDTH)
    assert not both(model)


def failing() -> Iterator[tuple[str, Do]]:
    def raises(block: Block, x: Tensor) -> Tensor:
        raise ValueError("no ninth layer")

    yield "raises", at_the_ninth(raises)
    yield "reads values", at_the_ninth(lambda block, x: x * float(x.sum()))
    yield "reads numpy", at_the_ninth(lambda block, x: x + torch.from_numpy(x.detach().numpy()))


@pytest.mark.parametrize(("name", "do"), [*failing()])
def test_errors_are_those_of_all_layers(name: str, do: Do) -> None:
    told: list[Any] = []
    for lists in (tracing.long_lists, lambda _: {}):
        with patch.object(tracing, "long_lists", lists), pytest.raises(ShardcError) as caught_error:
            trace(Stack(do), X)
        told.append([(d.code, d.message, d.location, d.fqn) for d in caught_error.value.diagnostics])
    assert told[0] == told[1]
    assert told[0][0][3] == "layers.9"


def test_hooks_on_what_layers_return() -> None:
    assert not both(Stack(hooked_gradient))
