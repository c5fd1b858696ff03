"""A bucket's flat tensor while it is filled: members are made in it where they can be, and copied there otherwise.

On a GPU what is copied, to a flat tensor and out of it, is one launch (`kernels_triton.bucket`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kernels_triton.launch import HAS_TRITON
from shardc.ir.buckets import Layout, Piece
from shardc.ir.graph import Graph, operands, type_of
from shardc.ir.in_place import Operand, Place
from shardc.ir.ops.buckets import fill, shapes_of
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
        self._zeroed = layout.padded

    @property
    def copies(self) -> bool:
        """Is there a member that is not made here?"""
        return any(slot is not None for slot in self._reads)

    def of(self, env: list[Any]) -> Tensor:
        found: Tensor | None = env[self.slot]
        if found is None:
            make = torch.zeros if self._zeroed else torch.empty
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

    def prepared(self, fixed: Mapping[int, Tensor]) -> Callable[[list[Any]], Tensor] | None:
        """`filled` in one launch, that writes the zeros between members too. None where no kernel does it."""
        if not (self.copies and has_kernels(self.device)):
            return None
        from kernels_triton.bucket.layout import packing
        from kernels_triton.bucket.prepared import Pack

        args, xs = self._args, [None if slot is None else fixed.get(slot, slot) for slot in self._reads]
        there = {at for at, x in enumerate(xs) if x is not None}
        laid = packing(self._numels, args["leads"], args["mids"], 1, args["unit"], self.dtype, there)
        if laid is None:
            return None
        self._zeroed = False
        return Pack(laid, xs, fixed.get(self.slot, self.of), self.dtype, self.device)


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and HAS_TRITON


def packed(
    graph: Graph, pack: fx.Node, reads: Sequence[int], fixed: Mapping[int, Tensor], device: torch.device
) -> Callable[[list[Any]], Tensor] | None:
    """A `pack` of several rows in one launch, given the values of slots. None where no kernel does it."""
    if not has_kernels(device):
        return None
    from kernels_triton.bucket.layout import packing
    from kernels_triton.bucket.prepared import Pack

    args, dtype = given(pack), type_of(pack).dtype
    numels = [math.prod(type_of(x).local_shape(graph.mesh)) for x in operands(pack)]
    laid = packing(numels, args["leads"], args["mids"], args["rows"], args["unit"], dtype, range(len(numels)))
    return None if laid is None else Pack(laid, [fixed.get(slot, slot) for slot in reads], None, dtype, device)


def unpacked(
    unpack: fx.Node,
    flat: Operand,
    used: Collection[int],
    places: Mapping[int, Place],
    device: torch.device,
) -> Callable[[list[Any]], Sequence[Tensor | None]] | None:
    """An `unpack` in one launch, or none if all results are views; what is not `used` is None. None where no kernel
    does it."""
    if not has_kernels(device):
        return None
    from kernels_triton.bucket.layout import unpacking
    from kernels_triton.bucket.prepared import Unpack

    args, dtype = given(unpack), type_of(unpack.all_input_nodes[0]).dtype
    shapes, rows = shapes_of(args["shapes"], args["ranks"]), args["rows"]
    there = {at for at in used if rows > 1 or args["leads"][at] > 1 or at in places}
    laid = unpacking(shapes, args["leads"], args["mids"], args["sizes"], rows, args["unit"], dtype, there)
    return None if laid is None else Unpack(laid, flat, shapes, places, used, dtype, device)
