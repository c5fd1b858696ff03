"""A global batch as a program's microbatches are fed it, checked first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.ops.streams import step_key
from shardc.ir.types import TensorType
from shardc.runtime.execute.batch import Inputs, Sample, batch_inputs
from shardc.runtime.execute.data_parts import DataParts, Parts
from shardc.runtime.execute.index_check import IndexCheck
from shardc.runtime.execute.microbatches import Feed, feeds, halved
from shardc.runtime.oracle.simulate import supplied
from shardc.runtime.train.device_copy import Copied
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.replicas import Item


@dataclass(frozen=True)
class Feeding:
    """What a body is fed. `sample` describes the batch that it was compiled for, `check` looks at a microbatch."""

    body: Graph
    sample: Sample | None = None
    check: IndexCheck | None = None
    split: Collection[str] = ()  # the inputs that are split into microbatches, of a step that has several
    parts: DataParts | None = None  # how a batch is given in parts
    own: RankPart | None = None  # the part that this rank is given, if not all of it

    @cached_property
    def placed(self) -> dict[str, tuple[Port, TensorType]]:
        """The inputs that a batch gives."""
        pairs = zip(self.body.inputs, self.body.placeholders, strict=True)
        return {port.name: (port, type_of(node)) for port, node in pairs if port.role in ("input", "seed")}

    def given(self, batch: Any, microbatches: int | None = None) -> Any:
        """The batch that this rank has: of `Parts` its own, or in simulation all of them as one batch, for a program of
        so many microbatches, by default this one's."""
        if not isinstance(batch, Parts):
            return batch
        if self.parts is None:
            message = "the batch is given in parts, and the program's ranks are given whole batches"
            raise error("SC501", message, hint="compile with a plan that says data: per_rank, or give one batch")
        self.parts.check_count(batch)
        return self._joined(batch, microbatches) if self.own is None else batch[self.own.index]

    def _joined(self, batch: Parts, microbatches: int | None) -> Any:
        assert self.parts is not None
        return self.parts.joined(batch, microbatches or self.body.microbatches * self.body.halves)

    def tensors(self, batch: Any) -> Inputs:
        """The batch's tensors by input."""
        names = [name for name, (port, _) in self.placed.items() if port.role == "input"]
        return batch_inputs(batch, names, self.sample)

    def feeds(self, batch: Any, seed: int, step: int) -> list[Feed]:
        """The batch's tensors by microbatch, each with a key of its own for random numbers."""
        host = self.tensors(self.given(batch.host if isinstance(batch, Copied) else batch))
        inputs: dict[str, torch.Tensor] = {**host}
        own = self.own
        types = {} if own is None else own.parts.types
        if own is not None:
            own.parts.check(host)
        if isinstance(batch, Copied):
            inputs = {**self.tensors(batch.arrived())}
        for port, type in self.placed.values():
            if port.role == "seed":
                inputs[port.name] = torch.full(type.shape, step_key(seed, step), dtype=type.dtype)
        counted = None if own is None else own.counted
        feeds_by_microbatch = feeds(self.body, inputs, types=types, split=self.split, counted=counted)
        placed = [(port, types.get(port.name, type)) for port, type in self.placed.values()]
        for feed in feeds_by_microbatch:
            supplied(placed, {**inputs, **feed})
        if self.check is not None:  # which looks at tensors on the CPU
            on_host = feeds_by_microbatch
            if host is not inputs:
                on_host = feeds(self.body, host, types=types, split=self.split)
            for feed in (half for whole in on_host for half in halved(self.body, whole, self.split)):
                self.check(feed if own is None else own.parts.repeated(feed), whole=own is None)
        return feeds_by_microbatch

    def items(self, fed: Sequence[Feed]) -> list[Item]:
        """What is compared over ranks: of a whole batch all, since a rank takes the others to have the rest of it."""
        ports = {port.name: port for port in self.body.inputs}
        if self.own is not None:
            return self.own.items(fed, {name: port.role for name, port in ports.items()})
        return [
            Item(ports[name].name, ports[name].role, TensorType.plain(value.dtype, tuple(value.shape)), value)
            for feed in fed
            for name, value in feed.items()
        ]
