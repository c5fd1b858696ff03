"""Models that let a layer differ by what no call of torch shows: modules, random numbers, modes, repeated elements."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from contextvars import Context, ContextVar
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shardc import torch_compat
from shardc.frontend import trace as tracing
from shardc.frontend.trace import trace
from tests.frontend.equal_stacks import LAYERS, Do, Stack, X, both, described, mlp


def passing_on(do: Do) -> Stack:
    """A stack whose layers have a module that computes nothing."""
    model = Stack(do)
    for layer in model.layers:
        layer.identity = nn.Identity()
    return model


# ---------------------------------------------------------------------- modules that return without a call
def test_every_layer_passes_on() -> None:
    assert both(passing_on(lambda block, x: block.identity(mlp(block, x))))


@pytest.mark.parametrize("at", [True, False], ids=["the ninth", "all but the ninth"])
def test_one_layer_passes_on(at: bool) -> None:
    def chosen(block: Any, x: Tensor) -> Tensor:
        y = mlp(block, x)
        return block.identity(y) if (block.index == 9) is at else y

    assert not both(passing_on(chosen))


def test_one_layer_passes_on_another_value() -> None:
    def chosen(block: Any, x: Tensor) -> Tensor:
        y, z = x + block.up(x)[:, :8], block.down(block.up(x))
        block.identity(z if block.index == 9 else y)
        return y + z

    assert not both(passing_on(chosen))


class Encoder(nn.Module):
    """Returns what one layer made, and what the last did."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layers, self.index = Stack().layers, index

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = [x := layer(x) for layer in self.layers]
        return states[self.index], x


class Encoded(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.encoder = Encoder(index)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)[1].square().mean()


@pytest.mark.parametrize(("index", "left_out"), [(1, True), (3, False), (9, False), (12, False), (LAYERS - 1, True)])
def test_a_module_around_the_layers_returns_one(index: int, left_out: bool) -> None:
    assert both(Encoded(index)) is left_out


# ---------------------------------------------------------------------- random numbers
def drawn_again(block: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[], enabled=block.index == 9):
        return mlp(block, x)


def drawn_again_within(block: Any, x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = mlp(block, x)
    if block.index == 9:
        torch.set_rng_state(state)
    return y + mlp(block, x)


@pytest.mark.parametrize("do", [drawn_again, drawn_again_within])
def test_one_layer_draws_other_random_numbers(do: Do) -> None:
    assert not both(Stack(do, dropout=0.5))


def test_every_layer_draws_again() -> None:
    def forked(block: Any, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return mlp(block, x)

    assert both(Stack(forked, dropout=0.5))


# ---------------------------------------------------------------------- modes
class Scaling(TorchDispatchMode):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * self.by if func is torch.ops.aten.relu.default else result


def scaled_at_the_ninth(block: Any, x: Tensor) -> Tensor:
    with Scaling(2.0) if block.index == 9 else nullcontext():
        return mlp(block, x)


def scaled_by_index(block: Any, x: Tensor) -> Tensor:
    with Scaling(float(block.index)):
        return mlp(block, x)


@pytest.mark.parametrize("do", [scaled_at_the_ninth, scaled_by_index])
def test_modes_that_see_what_is_dispatched(do: Do) -> None:
    assert not both(Stack(do))


# ---------------------------------------------------------------------- settings that are changed and set back
def with_another_dtype(block: Any, x: Tensor) -> Tensor:
    if block.index == 9:
        torch.set_default_dtype(torch.float64)
    shift = torch.zeros(8)
    torch.set_default_dtype(torch.float32)
    return mlp(block, x) + shift.float()


def with_autocast(block: Any, x: Tensor) -> Tensor:
    torch.set_autocast_enabled("cpu", block.index == 9)
    y = block.up(x)
    torch.set_autocast_enabled("cpu", False)
    return x + block.down(y.float())


@pytest.mark.parametrize("do", [with_another_dtype, with_autocast])
def test_one_layer_changes_settings(do: Do) -> None:
    assert not both(Stack(do))


def with_deterministic_algorithms(block: Any, x: Tensor) -> Tensor:
    torch.use_deterministic_algorithms(block.index == 9)
    y = x + block.up(x)[:, :8]
    torch.use_deterministic_algorithms(False)
    return mlp(block, y)


def test_settings_are_left_as_they_were() -> None:
    both(Stack(with_deterministic_algorithms))
    assert not torch.are_deterministic_algorithms_enabled()


def minus_zero(block: Any, x: Tensor) -> Tensor:
    return mlp(block, x) * (-0.0 if block.index == 9 else 0.0)


def imitations() -> int:
    gc.collect()
    return sum(torch_compat.is_imitation(each) for each in gc.get_objects())


def test_imitations_are_gone_when_all_layers_are_recorded() -> None:
    counts: list[int] = []
    traced = tracing._traced

    def counted(*arguments: Any) -> Any:
        counts.append(imitations())
        return traced(*arguments)

    with patch.object(tracing, "_traced", counted):
        trace(Stack(minus_zero), X)
    assert counts == [0, 0]


# ---------------------------------------------------------------------- elements of lists
def test_elements_that_are_repeated() -> None:
    model = Stack(layers=20)
    for i in range(4):
        model.layers[16 + i] = model.layers[i]
    assert not both(model)


# ---------------------------------------------------------------------- what a second trace would find changed
NUMBERS: list[Iterator[int]] = []
STEP: ContextVar[int] = ContextVar("step")


def counted_by_an_iterator(block: Any, x: Tensor) -> Tensor:
    return mlp(block, x) * (2.0 if next(NUMBERS[0]) == 9 else 1.0)


def counted_in_the_context(block: Any, x: Tensor) -> Tensor:
    STEP.set(STEP.get(0) + 1)
    return mlp(block, x) * (2.0 if STEP.get() == 9 else 1.0)


@pytest.mark.parametrize("do", [counted_by_an_iterator, counted_in_the_context])
def test_what_cannot_be_put_back(do: Do) -> None:
    """A trace that fails, and another in its place, would go on counting."""

    def fresh() -> None:
        NUMBERS[:] = [itertools.count()]

    contexts = iter([Context(), Context()])
    said: list[Any] = []
    for lists in (tracing.long_lists, lambda _: {}):
        fresh()
        with patch.object(tracing, "long_lists", lists):
            said.append(described(next(contexts).run(trace, Stack(do), X)))
    assert said[0] == said[1]
