"""How many rows of tokens each expert of each layer was given in a step, and how many were dropped.

    load = ExpertLoad.of(table, layers)      table: for each layer a line, of an entry an expert and one of what dropped
    load.layers["model.layers.0.mlp.experts"].rows      (36, 44, 28, 20)
    load.imbalance                                      1.25: the fullest rank's rows over the mean, of the worst layer

Rows are those that routers chose, over the whole batch; what was dropped is among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardc.ir.diagnostic import ShardcError, error

Layer = Sequence[Any]  # its module, its experts as the sizes of atoms, and among how many ranks each is divided
SHOWN = 3  # layers in a message


@dataclass(frozen=True)
class LayerLoad:
    """Of a layer: the rows routed to each expert, how many of them were dropped, and how ranks share the experts: a
    number is made of digits, each of a size, and each is divided among so many ranks."""

    rows: tuple[int, ...]
    dropped: int
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """The rows routed to each rank's experts; of ranks that have the same experts, to all of them."""
        totals = [0] * math.prod(self.ranks)
        for expert, rows in enumerate(self.rows):
            owner, below = 0, math.prod(self.sizes)
            for size, ranks in zip(self.sizes, self.ranks, strict=True):
                below //= size
                owner = owner * ranks + expert // below % size // math.ceil(size / ranks)
            totals[owner] += rows
        return tuple(totals)

    @property
    def imbalance(self) -> float:
        """The rows of the fullest rank over the mean: 1 where all have as many."""
        total = sum(self.rows)
        return max(self.of_ranks) * len(self.of_ranks) / total if total else 1.0


@dataclass(frozen=True)
class ExpertLoad:
    """The load of each layer, by its module."""

    layers: Mapping[str, LayerLoad]

    @classmethod
    def of(cls, table: torch.Tensor, layers: Sequence[Layer]) -> ExpertLoad:
        """Read from the output of a step; waits for it."""
        loads: dict[str, LayerLoad] = {}
        for (fqn, sizes, ranks), line in zip(layers, table.tolist(), strict=True):
            calls = sum(name.partition("#")[0] == fqn for name in loads)  # of a module that is called again
            name = f"{fqn}#{calls}" if calls else fqn
            loads[name] = LayerLoad(tuple(line[: math.prod(sizes)]), line[-1], tuple(sizes), tuple(ranks))
        return cls(loads)

    @property
    def dropped(self) -> int:
        """Rows that were dropped, in all layers."""
        return sum(layer.dropped for layer in self.layers.values())

    @property
    def routed(self) -> int:
        """Rows that routers chose, in all layers."""
        return sum(sum(layer.rows) for layer in self.layers.values())

    @property
    def imbalance(self) -> float:
        """That of the layer whose ranks are filled most unevenly."""
        return max((layer.imbalance for layer in self.layers.values()), default=1.0)

    def __str__(self) -> str:
        dropped = f"dropped {self.dropped} of {self.routed} rows  " if self.dropped else ""
        return f"{dropped}imbalance {self.imbalance:.3g}"

    def where_dropped(self) -> str:
        """`12 of 256 rows were dropped: 8 in model.layers.0.mlp, 4 in model.layers.1.mlp`."""
        full = {name: layer.dropped for name, layer in self.layers.items() if layer.dropped}
        shown = [f"{count} in {name or 'the model'}" for name, count in list(full.items())[:SHOWN]]
        more = f" and {len(full) - SHOWN} more layers" if len(full) > SHOWN else ""
        return f"{self.dropped} of {self.routed} rows were dropped: {', '.join(shown)}{more}"


def overfull(step: int, load: ExpertLoad) -> ShardcError:
    """The error of a step that dropped rows, whose plan says `overflow: error`."""
    message = f"step {step}: experts were given more than their capacity, and {load.where_dropped()}"
    hint = "nothing was changed by the step; raise the capacity, or write overflow: drop"
    return error("SC513", message, hint=hint)
