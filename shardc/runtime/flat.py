"""A bucket's flat tensor while it is filled: members are made in it where they can be, and copied there otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.buckets import Layout, Piece
from shardc.ir.graph import operands, type_of
from shardc.ir.ops.buckets import fill
from shardc.ir.schema import given


class Flat:
    """The flat tensor of one `pack`, which is in `slot` from its first member on. `reads` are the members' slots."""

    def __init__(
        self, layout: Layout, slot: int, reads: Sequence[int], made: dict[fx.Node, Piece], device: torch.device
    ) -> None:
        self.layout, self.slot, self.device = layout, slot, device
        self.dtype, self._args = type_of(layout.pack).dtype, given(layout.pack)
        self._reads = [None if value in made else s for value, s in zip(operands(layout.pack), reads, strict=True)]
        self._numels = [math.prod(shape) for shape in layout.shapes]

    @property
    def copies(self) -> bool:
        """Is there a member that is not made here?"""
        return any(slot is not None for slot in self._reads)

    def of(self, env: list[Any]) -> Tensor:
        found: Tensor | None = env[self.slot]
        if found is None:
            make = torch.zeros if self.layout.padded else torch.empty
            found = env[self.slot] = make(self.layout.starts[-1], dtype=self.dtype, device=self.device)
        return found

    def place(self, at: int) -> Callable[[list[Any]], Tensor]:
        """Where member `at` is."""
        shape, start = self.layout.shapes[at], self.layout.starts[at]
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]

        def here(env: list[Any]) -> Tensor:
            flat = self.of(env)
            return flat.as_strided(shape, strides, flat.storage_offset() + start)

        return here

    def filled(self, env: list[Any]) -> Tensor:
        """The flat tensor, once its members are there."""
        xs = [None if slot is None else env[slot] for slot in self._reads]
        return fill(self.of(env), xs, self._args["leads"], self._args["mids"], 1, self._args["unit"], self._numels)
