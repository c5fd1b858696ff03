"""Few of many equal layers go through all passes, where they stand for all; where they do not, all are looked at."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardc
from benchmarks.compile_time import function_calls
from shardc.compiler import driver, layer_copies, preparation
from shardc.frontend import traced
from shardc.frontend.trace import trace
from shardc.ir.units import UnequalError
from tests.compiler.stacks import COLUMNS, LAYERS, MANY, MORE, ROWS, SMALL, Stack, X, both, in_turn

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


class UnevenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 9), nn.Linear(9, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """Layers whose gradients are padded where they travel together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([UnevenBlock() for _ in range(40)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_buckets_are_bounded_in_all_layers() -> None:
    """What they are padded by grows with the layers: of few it is within the bound, of all it is not."""
    taken, _ = both(Uneven(), ROWS | {"bucket": "1KiB"}, trained=True, batch=torch.randn(15, 16))
    assert taken == "body"


def test_few_layers_take_less() -> None:
    """Calls of functions, once what is the same for all compiles is there."""
    model = Stack(in_turn, layers=MANY + 32)

    def calls() -> int:
        return sum(function_calls(lambda: shardc.compile(model, X, mesh="dp=2, tp=2", plan=COLUMNS | SMALL)))

    calls()
    by_few = calls()
    with patch.object(driver, "made_by_layers", lambda *_: None):  # the passes up to `combine` go over few still
        assert by_few < 0.75 * calls()


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
        recorded.append(options.get("all_layers", False))
        return trace(*args, **options)

    def compiled() -> shardc.Program:
        return shardc.compile(model, X, mesh="dp=2, tp=2", plan=plan)

    with (
        patch.object(driver, "normalized_by_layers", lambda *_: None),
        patch.object(traced, "lengthened", unequal),
        patch.object(preparation, "trace", noted),
    ):
        program = compiled()
    assert recorded == [False, True]
    assert program.to_plain()["body"] == compiled().to_plain()["body"]
