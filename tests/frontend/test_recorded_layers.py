"""Layers that differ are all recorded, however they differ, and errors are those of a trace of all layers."""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardc.frontend import trace as tracing
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError
from tests.frontend.equal_stacks import LAYERS, WIDTH, Block, Do, Stack, X, both, in_turn, mlp

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


def reshaped_in_place(block: Block, x: Tensor) -> Tensor:
    y = mlp(block, x).clone()
    y.unsqueeze_(0)
    return y.squeeze(0)


def unseen(block: Block, x: Tensor) -> Tensor:
    if block.index == 9:
        with torch._C.DisableTorchFunction():
            _ = x * 2  # which nothing reads
    return mlp(block, x)


class Into(nn.Module):
    """Returns nothing."""

    def forward(self, x: Tensor, doubled: list[Tensor]) -> None:
        doubled.append(x * 2)


def in_another_module(block: Block, x: Tensor) -> Tensor:
    doubled: list[Tensor] = []
    module = block.other if block.index == 9 else block.one
    module(x, doubled)
    return mlp(block, doubled[0])


def with_two_modules() -> Stack:
    model = Stack(in_another_module)
    for block in model.layers:
        block.one, block.other = Into(), Into()
    return model


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


def into_the_one_before(model: Stack, x: Tensor) -> Tensor:
    return in_turn(model, x * 1)


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
    **{f.__name__: Stack(f) for f in (reshaped_in_place, unseen)},
    **{f.__name__: Stack(run=f) for f in (all_states, left_early, with_the_first, one_left_out, twice)},
    **{f.__name__: Stack(run=f) for f in (reversed_order, regularized, between, three_back)},
    "losses_kept": Stack(remembering, losses_kept),
    "caught": Stack(minus_zero, caught),
    "writes to what the layer before returned": Stack(in_place, into_the_one_before),
    "another module": with_two_modules(),
    "the ninth only": Stack(at_the_ninth(lambda block, x: block.down(block.up(x)))),
    "the ninth swaps": Stack(at_the_ninth(lambda block, x: x + block.down(torch.relu(block.up(x) * 1.0)))),
}


@pytest.mark.sampled(3)
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

    def keeps(block: Block, x: Tensor) -> Tensor:
        y = torch.relu(block.up(block.norm(x)))
        if block.index == 9:
            colorsys.kept = y  # type: ignore[attr-defined]
        return x + block.down(y)

    yield "keeps a tensor", keeps
    yield "raises", at_the_ninth(raises)
    yield "reads values", at_the_ninth(lambda block, x: x * float(x.sum()))
    yield "reads numpy", at_the_ninth(lambda block, x: x + torch.from_numpy(x.detach().numpy()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "do"), [*failing()])
def test_errors_are_those_of_all_layers(name: str, do: Do) -> None:
    told: list[Any] = []
    for lists in (tracing.long_lists, lambda _: {}):
        with patch.object(tracing, "long_lists", lists), pytest.raises(ShardcError) as caught_error:
            trace(Stack(do), X)
        told.append([(d.code, d.message, d.location, d.fqn) for d in caught_error.value.diagnostics])
    vars(colorsys).pop("kept", None)
    assert told[0] == told[1]
    assert told[0][0][3] == (None if name == "keeps a tensor" else "layers.9")


def test_hooks_on_what_layers_return() -> None:
    assert not both(Stack(hooked_gradient))
