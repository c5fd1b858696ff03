"""Steps of many equal layers are sharded by few of them, and come out as if all of them had been looked at."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shardc
from benchmarks.compile_time import function_calls
from shardc.compiler import driver, layer_copies, request
from shardc.compiler.layer_copies import by_few_layers, made_by_few_layers
from shardc.frontend import traced
from shardc.frontend.trace import trace
from shardc.ir.diagnostic import ShardcError
from shardc.ir.schema import given as arguments
from shardc.ir.units import UnequalError

LAYERS = 14
MANY, MORE = 24, 32  # so many that few of them go through all passes, and where weights are gathered
# Or all gradients of such small layers would travel as one, and it would hardly matter when they do.
SLOW = dict.fromkeys(("fp32_flops_per_second", "bf16_flops_per_second"), 1e9)
SMALL: dict[str, Any] = {"bucket": "1KiB", "hardware": {**SLOW, "collective_start_seconds": 1e-6}}
WIDTH = 16
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
ROWS = {"inputs": {"*": "dp, -"}}
UP: dict[str, Any] = {"params": {"layers.*.up.weight": "tp, -"}, **ROWS}
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


def both(model: nn.Module, plan: Any, *, trained: bool = False, batch: Any = X) -> tuple[str, shardc.Program]:
    """How far few layers stood for all ("" where all were looked at, "sharded", "body" or "finished"), and the program;
    asserts that it is what it is when all layers are looked at."""
    taken, normalized = [""], driver.normalized_by_layers

    def by_few(few: Callable[..., Any], to: Callable[[Any], str], *args: Any) -> Any:
        try:
            made = few(*args)
        except (UnequalError, ShardcError):  # and nothing else: `made_by_layers` would hide a fault
            return None
        if made is not None and not args[0].units:
            taken.append(to(made))
        return made

    def compiled(*ways: str) -> shardc.Program:
        made = partial(by_few, made_by_few_layers, lambda made: "finished" if made.finished else "body")
        sharded = partial(by_few, by_few_layers, lambda _: "sharded")
        with (
            patch.object(driver, "made_by_layers", made if "made" in ways else lambda *_: None),
            patch.object(driver, "sharded_by_layers", sharded if "sharded" in ways else lambda *_: None),
            patch.object(driver, "normalized_by_layers", normalized if ways else lambda *_: None),
        ):
            optimizer = adam(model) if trained else None
            return shardc.compile(model, batch, mesh="dp=2, tp=2", plan=plan, optimizer=optimizer)

    whole, ours = compiled(), compiled("made", "sharded")
    assert ours.to_plain() == whole.to_plain()
    way = taken[-1]
    if way in ("body", "finished"):
        assert compiled("sharded").to_plain() == whole.to_plain()
    return way, ours


# The plan, whether it trains, and how far few of many layers stand for all.
PLANS: dict[str, tuple[dict[str, Any], bool, str]] = {
    "tp": (COLUMNS, False, "finished"),
    "zero-3": (
        ROWS | {"storage": {"zero": 3, "axes": ["dp"]}, "precision": "bf16", "bucket": "4KiB"},
        True,
        "finished",
    ),
    "accumulate": (COLUMNS | {"storage": {"zero": 1, "axes": ["dp"]}, "accumulate": 2}, True, "finished"),
    "budget": (COLUMNS | {"recompute": {"budget": "4KiB"}}, False, "sharded"),
    "pipeline": (ROWS | {"pipeline": {"axis": "tp", "microbatches": 2}}, False, "body"),
    "halves": (COLUMNS | {"overlap": {"split": 2}}, False, "finished"),
    "fuse": (COLUMNS | {"fuse": True}, True, "finished"),
    "exclude": (COLUMNS | {"fuse": {"exclude": ["layers.3.norm"]}}, False, "body"),
    "recompute": (COLUMNS | {"recompute": "full"}, False, "finished"),
    "offload": (COLUMNS | {"offload": {"activations": "all"}}, False, "finished"),
    "long buckets": (COLUMNS | {"bucket": "25MiB"}, False, "body"),
    "clip": (COLUMNS | {"clip_grad_norm": 1.0}, True, ""),  # one norm of all gradients
}


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize("name", PLANS)
def test_few_layers_are_looked_at(name: str, many: bool) -> None:
    plan, trained, way = PLANS[name]
    layers = (MORE if "storage" in plan else MANY) if many else LAYERS
    taken, program = both(Stack(in_turn, layers=layers), SMALL | plan, trained=trained)
    assert taken == (way if many else way and "sharded")
    assert program.verify().ok


def test_few_layers_take_less() -> None:
    """Calls of functions, once what is the same for all compiles is there."""
    model = Stack(in_turn, layers=MANY + 32)

    def calls() -> int:
        return sum(function_calls(lambda: shardc.compile(model, X, mesh="dp=2, tp=2", plan=COLUMNS | SMALL)))

    calls()
    by_few = calls()
    with patch.object(driver, "made_by_layers", lambda *_: None):  # the passes up to `combine` go over few still
        assert by_few < 0.75 * calls()


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", ODD, ids=lambda run: run.__name__.strip("_"))
def test_layers_that_are_not_equal_are_all_looked_at(run: Run) -> None:
    _, program = both(Stack(run), COLUMNS)
    assert program.verify().ok


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "placed"])
def test_one_layer_that_differs_is_seen(frozen: bool) -> None:
    model = Stack(in_turn)
    model.layers[6].requires_grad_(not frozen)
    other = COLUMNS if frozen else {"params": {"layers.6.up.weight": "-, -", **COLUMNS["params"]}, **ROWS}
    taken, program = both(model, other)
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


def test_a_fault_of_few_layers_is_no_fault() -> None:
    """Whatever goes wrong with few of them, all layers are looked at."""

    def broken(*_: Any) -> Any:
        raise KeyError("h.3")

    programs: list[shardc.Program] = []
    ways = ("made_by_layers", "sharded_by_layers", "normalized_by_layers")
    for where, names, instead in ((layer_copies, ("lengthened",), broken), (driver, ways, lambda *_: None)):
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(where, name, instead))
            programs.append(shardc.compile(Stack(in_turn), X, mesh="dp=2, tp=2", plan=COLUMNS))
    assert programs[0].to_plain() == programs[1].to_plain()


def test_layers_are_recorded_where_few_do_not_tell_what_all_do() -> None:
    def unequal(*_: Any) -> Any:
        raise UnequalError("layers")

    model, plan, recorded = Stack(in_turn), COLUMNS, list[bool]()

    def noted(*args: Any, **options: Any) -> Any:
        recorded.append(options["all_layers"])
        return trace(*args, **options)

    def compiled() -> shardc.Program:
        return shardc.compile(model, X, mesh="dp=2, tp=2", plan=plan)

    with (
        patch.object(driver, "normalized_by_layers", lambda *_: None),
        patch.object(traced, "lengthened", unequal),
        patch.object(request, "trace", noted),
    ):
        program = compiled()
    assert recorded == [False, True]
    assert program.to_plain()["body"] == compiled().to_plain()["body"]


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
