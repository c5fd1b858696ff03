"""Steps of many equal layers are sharded by few of them, and come out as if all of them had been looked at."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shardc.ir.schema import given as arguments
from tests.compiler.stacks import (
    COLUMNS,
    LAYERS,
    MANY,
    ODD,
    ROWS,
    SMALL,
    UP,
    WIDTH,
    Block,
    Run,
    Stack,
    both,
    in_turn,
)


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


def test_gathers_are_counted_in_all_layers() -> None:
    """A finding says how often in all; of a step without a backward it names a layer that is kept."""

    class Gathered(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = in_turn(self, x)
            return (x * self.scale).square().mean()

    plan = {"params": {"layers.*.down.weight": "tp, -"}, **ROWS}
    _, program = both(Gathered(in_turn, layers=MANY), SMALL | plan)
    assert any(" times, " in d.message for d in program.diagnostics)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", ODD, ids=lambda run: run.__name__.strip("_"))
def test_layers_that_are_not_equal_are_all_looked_at(run: Run) -> None:
    _, program = both(Stack(run), COLUMNS)
    assert program.verify().ok


@pytest.mark.parametrize("layers", [LAYERS, MANY])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "placed"])
def test_one_layer_that_differs_is_seen(frozen: bool, layers: int) -> None:
    model = Stack(in_turn, layers=layers)
    model.layers[layers // 2 - 1].requires_grad_(not frozen)
    other = {f"layers.{layers // 2 - 1}.up.weight": "-, -", **COLUMNS["params"]}
    taken, program = both(model, COLUMNS if frozen else {"params": other, **ROWS})
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


class Tanh(nn.Module):
    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(x)
        return x


class Added(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, gate: float | Tensor = 1.0) -> Tensor:
        return x + torch.tanh(self.linear(x) * gate) * x


class Between(nn.Module):
    """Layers between modules of some length, of which the ends are placed."""

    def __init__(self, before: int, behind: int) -> None:
        super().__init__()
        self.start, self.end, self.before, self.behind = Tanh(), Tanh(), Tanh(before), Tanh(behind)
        self.layers = nn.ModuleList([Added() for _ in range(24)])
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.start(x * self.scale))
        for layer in self.layers:
            x = layer(x)
        return self.end(self.behind(x)).square().mean()


@pytest.mark.parametrize(("before", "behind"), [(0, 10), (10, 0), (0, 0)])
@pytest.mark.parametrize("end", ["-, tp", "tp, -"], ids=["other", "same"])
def test_placements_that_meet_half_way(before: int, behind: int, end: str) -> None:
    """Where they meet, and by which of them a value is placed, depends on how many layers lie between."""
    both(Between(before, behind), {"activations": {"start": "tp, -", "end": end}})


class Read(nn.Module):
    """Layers that read sections of one product."""

    def __init__(self, tail: int) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 24 * 8 + tail, bias=False)
        self.layers = nn.ModuleList([Section(8 * index) for index in range(24)])
        self.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        read = self.all(x)
        x = x[:, :8]
        for layer in self.layers:
            x = layer(x, read)
        return x.square().mean() + read[:, -self.tail :].square().mean()


class Section(nn.Module):
    def __init__(self, start: int) -> None:
        super().__init__()
        self.added, self.start = Added(8), start

    def forward(self, x: Tensor, read: Tensor) -> Tensor:
        return self.added(x, read[:, self.start : self.start + 8])


@pytest.mark.parametrize("tail", [5, 16])
@pytest.mark.parametrize("placed", ["tp, -", "-, tp"])
def test_sections_that_are_counted_by_layers(tail: int, placed: str) -> None:
    taken, _ = both(Read(tail), {"params": {"all.weight": placed}})
    assert not taken


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(512))

    def forward(self, x: Tensor, all: Tensor) -> Tensor:
        return x + torch.tanh((all * self.gate).sum(0)) * x


class Gates(nn.Module):
    """Layers that all read sums over the rows of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(512, 512, bias=False).requires_grad_(False)
        self.layers = nn.ModuleList([Gated() for _ in range(24)])

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        read = self.all(z)
        for layer in self.layers:
            x = layer(x, read)
        return x.square().mean()


@pytest.mark.parametrize("rows", [64, 32768])
def test_what_all_layers_read_is_summed_once_if_they_are_many(rows: int) -> None:
    with torch.device("meta"):
        model, batch = Gates(), (torch.zeros(4, 512), torch.zeros(rows, 512))
    both(model, {"params": {"all.weight": "-, tp"}}, batch=batch)


def test_gradients_that_are_one_value() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Block() for _ in range(24)])

        def forward(self, x: Tensor) -> Tensor:
            total = x
            for layer in self.layers:
                total = total + layer.down(torch.tanh(layer.up(x)))
                x = torch.tanh(x)
            return total.square().mean() + x.sum()

    both(Summed(), COLUMNS)
    both(Summed(), COLUMNS, trained=True)


@st.composite
def models(draw: st.DrawFn) -> tuple[Stack, dict[str, Any], bool]:
    kinds = draw(st.lists(st.integers(0, 2), min_size=1, max_size=3))
    run = draw(st.sampled_from([in_turn, in_turn, in_turn, *ODD]))
    model = Stack(run, draw(st.integers(12, 26)) * len(kinds), draw(st.sampled_from([0.0, 0.0, 0.5])))
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
    plan: dict[str, Any] = dict(draw(st.sampled_from([UP, ROWS]))) | draw(st.sampled_from([{}, SMALL, SMALL]))
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
