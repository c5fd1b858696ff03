"""Steps of many equal layers are sharded by few of them, and come out as if all of them had been looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from shardc.compiler import driver
from shardc.compiler.layer_copies import sharded_by_layers
from shardc.ir.schema import given as arguments

LAYERS = 14
WIDTH = 16
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
ROWS = {"inputs": {"*": "dp, -"}}
COLUMNS: dict[str, Any] = {"params": {"layers.*.up.weight": "tp, -", "layers.*.down.weight": "-, tp"}, **ROWS}


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float | Tensor = 1.0) -> Tensor:
        return x + scale * self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


Run = Callable[["Stack", Tensor], Tensor]


class Stack(nn.Module):
    """Layers, and how they are run."""

    def __init__(self, run: Run, layers: int = LAYERS, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(dropout) for _ in range(layers)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x).square().mean()


def in_turn(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return x


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def both(model: nn.Module, plan: Any, *, trained: bool = False, batch: Any = X) -> tuple[bool, shardc.Program]:
    """Whether few layers were looked at; asserts that the program is what looking at all of them makes it."""
    taken: list[bool] = []

    def noted(*args: Any) -> Any:
        sharded = sharded_by_layers(*args)
        taken.append(sharded is not None)
        return sharded

    programs: list[shardc.Program] = []
    for way in (noted, lambda *_: None):
        with patch.object(driver, "sharded_by_layers", way):
            optimizer = adam(model) if trained else None
            programs.append(shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, optimizer=optimizer))
    ours, whole = programs
    assert ours.to_plain() == whole.to_plain()
    return any(taken), ours


@pytest.mark.parametrize(
    ("plan", "trained"),
    [
        (COLUMNS, False),
        (ROWS | {"storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16"}, True),
        (COLUMNS | {"storage": {"zero": 1, "axes": ["dp"]}, "accumulate": 2}, True),
        (COLUMNS | {"recompute": {"budget": "4KiB"}}, False),
        (ROWS | {"pipeline": {"axis": "tp", "microbatches": 2}}, False),
        (COLUMNS | {"overlap": {"split": 2}}, False),
    ],
    ids=["tp", "zero-3", "accumulate", "budget", "pipeline", "halves"],
)
def test_few_layers_are_looked_at(plan: dict[str, Any], trained: bool) -> None:
    taken, program = both(Stack(in_turn), plan, trained=trained)
    assert taken
    assert program.verify().ok


def test_random_calls_are_numbered_on() -> None:
    taken, program = both(Stack(in_turn, dropout=0.5), COLUMNS)
    assert taken
    drawn = [arguments(node)["op_id"] for node in program.body.calls() if "random" in str(node.target)]
    assert sorted({*drawn}) == list(range(LAYERS))
    assert program.verify().ok


def test_findings_are_told_of_all_layers() -> None:
    """A note of one pattern is made once, and says of how many layers."""
    odd = Stack(in_turn)
    for layer in odd.layers:
        layer.up, layer.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)  # 9 over 2: padded
    taken, program = both(odd, COLUMNS)
    assert taken
    padded = [d for d in program.diagnostics if d.code == "SC211"]
    assert padded
    assert all(f"and {LAYERS - 4} more" in str(d.also) for d in padded)


def _one_doubled(model: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x, 2.0 if index == 7 else 1.0)
    return x


def _ever_less(model: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x, 1 / (index + 1))
    return x


def _shifted(model: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(x.roll(index, 1))
    return x


def _from_far(model: Stack, x: Tensor) -> Tensor:
    before = [x, x, x]
    for layer in model.layers:
        before.append(layer(before[-1]) + before[-3])
    return before[-1]


def _all_read(model: Stack, x: Tensor) -> Tensor:
    outputs: list[Tensor] = []
    for layer in model.layers:
        x = layer(x)
        outputs.append(x)
    return torch.stack(outputs)


def _one_scale(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x, model.scale)
    return x


def _first_again(model: Stack, x: Tensor) -> Tensor:
    first = model.layers[0](x)
    for layer in model.layers[1:]:
        x = layer(x) + first
    return x


def _backwards(model: Stack, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return x


def _one_twice(model: Stack, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        x = layer(layer(x)) if index == 6 else layer(x)
    return x


ODD = [_one_doubled, _ever_less, _shifted, _from_far, _all_read, _one_scale, _first_again, _backwards, _one_twice]


@pytest.mark.parametrize("run", ODD, ids=lambda run: run.__name__.strip("_"))
def test_layers_that_are_not_equal_are_all_looked_at(run: Run) -> None:
    _, program = both(Stack(run), COLUMNS)
    assert program.verify().ok


def test_one_layer_that_is_asked_for_otherwise_is_seen() -> None:
    other = {"params": {"layers.6.up.weight": "-, -", **COLUMNS["params"]}, **ROWS}
    taken, program = both(Stack(in_turn), other)
    assert not taken
    assert program.verify().ok


def test_a_frozen_layer_is_seen() -> None:
    model = Stack(in_turn)
    model.layers[6].requires_grad_(False)
    taken, program = both(model, COLUMNS)
    assert not taken
    assert program.verify().ok


def test_kinds_of_layers_that_take_turns() -> None:
    model = Stack(in_turn, layers=2 * LAYERS + 4)
    for layer in model.layers[::2]:
        layer.norm = nn.Identity()
    taken, program = both(model, COLUMNS)
    assert taken
    assert program.verify().ok


def test_lists_in_turn() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Stack(in_turn), Stack(in_turn, layers=LAYERS + 1)

        def forward(self, x: Tensor) -> Tensor:
            return in_turn(self.decoder, in_turn(self.encoder, x)).square().mean()

    plan = {"params": {"**.up.weight": "tp, -", "**.down.weight": "-, tp"}, **ROWS}
    taken, program = both(Two(), plan)
    assert taken
    assert program.verify().ok


@st.composite
def models(draw: st.DrawFn) -> tuple[Stack, dict[str, Any], bool]:
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    run = draw(st.sampled_from([in_turn, in_turn, in_turn, *ODD]))
    model = Stack(run, draw(st.integers(12, 20)) * len(kinds), draw(st.sampled_from([0.0, 0.0, 0.5])))
    for index, layer in enumerate(model.layers):
        if kinds[index % len(kinds)] == 1:
            layer.norm = nn.Identity()
        elif kinds[index % len(kinds)] == 2:
            layer.down = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
    for index in draw(st.sets(st.integers(0, len(model.layers) - 1), max_size=1)):
        change = draw(st.sampled_from(["frozen", "identity", "shared"]))
        if change == "frozen":
            model.layers[index].requires_grad_(False)
        elif change == "identity":
            model.layers[index].norm = nn.Identity()
        else:
            model.layers[index].up = model.layers[index - 1].up
    plan: dict[str, Any] = dict(draw(st.sampled_from([COLUMNS, ROWS])))
    plan |= draw(
        st.sampled_from([{}, {"storage": {"zero": 3, "axes": ["dp"]}}, {"accumulate": 2}, {"recompute": "full"}])
    )
    return model, plan, draw(st.booleans())


@pytest.mark.parametrize("examples", [3, pytest.param(60, marks=pytest.mark.long)])
def test_random_stacks(examples: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(models())
    def same(drawn: tuple[Stack, dict[str, Any], bool]) -> None:
        model, plan, trained = drawn
        both(model, plan, trained=trained)

    same()
