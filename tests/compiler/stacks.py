"""Stacks of many small layers, and programs of them by few of the layers and by all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import shardc
from shardc.compiler import driver
from shardc.compiler.layer_copies import by_few_layers, made_by_few_layers
from shardc.ir.diagnostic import ShardcError
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
