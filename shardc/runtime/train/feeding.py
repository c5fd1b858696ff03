"""A global batch as a program's microbatches are fed it, checked first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.ops.streams import step_key
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import Inputs, Sample, batch_inputs
from shardc.runtime.execute.microbatches import Feed, feeds
from shardc.runtime.oracle.simulate import supplied
from shardc.runtime.train.replicas import Item


@dataclass(frozen=True)
class Feeding:
    """What a body is fed. `sample` describes the batch that it was compiled for, `check` looks at a microbatch."""

    body: Graph
    sample: Sample | None = None
    check: Callable[[Feed], None] | None = None

    @cached_property
    def placed(self) -> dict[str, tuple[Port, TensorType]]:
        """The inputs that a batch gives."""
        pairs = zip(self.body.inputs, self.body.placeholders, strict=True)
        return {port.name: (port, type_of(node)) for port, node in pairs if port.role in ("input", "seed")}

    def tensors(self, batch: Any) -> Inputs:
        """The batch's tensors by input."""
        names = [name for name, (port, _) in self.placed.items() if port.role == "input"]
        return batch_inputs(batch, names, self.sample)

    def feeds(self, batch: Any, seed: int, step: int) -> list[Feed]:
        """The batch's tensors by microbatch, each with a key of its own for random numbers."""
        inputs: dict[str, torch.Tensor] = {**self.tensors(batch)}
        for port, type in self.placed.values():
            if port.role == "seed":
                inputs[port.name] = torch.full(type.shape, step_key(seed, step), dtype=type.dtype)
        feeds_by_microbatch = feeds(self.body, inputs)
        for feed in feeds_by_microbatch:
            supplied(list(self.placed.values()), {**inputs, **feed})
            if self.check is not None:
                self.check(feed)
        return feeds_by_microbatch

    def items(self, fed: Sequence[Feed]) -> list[Item]:
        """The whole batch, to be compared over ranks: a rank reads a part, and takes the others' to be the rest."""
        ports = {port.name: port for port in self.body.inputs}
        return [
            Item(ports[name].name, ports[name].role, TensorType.plain(value.dtype, tuple(value.shape)), value)
            for feed in fed
            for name, value in feed.items()
        ]
