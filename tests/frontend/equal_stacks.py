"""Stacks of equal layers, and their traces with and without all of them recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from shardc.frontend import trace as tracing
from shardc.frontend.ingest import ingest
from shardc.frontend.trace import Traced, trace
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
        taken = taken or traced.few is not None
        said.append(described(traced))
    assert said[0] == said[1]
    return taken
