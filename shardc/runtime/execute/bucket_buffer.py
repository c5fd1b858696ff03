"""A bucket's flat tensor while it is filled: members are allocated in it where possible, and copied into it otherwise.

On a GPU all copies into a flat tensor, or out of it, are one launch (`kernels_triton.bucket`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from kernels_triton.base.inplace import Operand, Place
from kernels_triton.launch.launch import HAS_TRITON
from shardc.ir.buckets import Layout, Piece, is_summed
from shardc.ir.graph import Graph, operands, type_of
from shardc.ir.ops.buckets import fill, member_views, shapes_of
from shardc.ir.schema import given


class FlatBuffer:
    """The flat tensor of one `pack`. It is in `slot` from its first member on. `reads` are the members' slots."""

    def __init__(
        self, layout: Layout, slot: int, reads: Sequence[int], pieces: dict[fx.Node, Piece], device: torch.device
    ) -> None:
        self.layout, self.slot, self.device = layout, slot, device
        self.dtype, self._args = type_of(layout.pack).dtype, given(layout.pack)
        self._reads = [None if value in pieces else s for value, s in zip(operands(layout.pack), reads, strict=True)]
        self._numels = [math.prod(shape) for shape in layout.shapes]
        leads, mids = tuple(self._args["leads"]), tuple(self._args["mids"])
        self._views, _, _ = member_views(tuple(self._numels), leads, mids, 1, self._args["unit"])
        self._zeroed = layout.padded and not is_summed(layout.pack)

    @property
    def has_copies(self) -> bool:
        """Is there a member that must be copied into the flat tensor?"""
        return any(slot is not None for slot in self._reads)

    def tensor(self, env: list[Any]) -> Tensor:
        flat: Tensor | None = env[self.slot]
        if flat is None:
            allocate = torch.zeros if self._zeroed else torch.empty
            flat = env[self.slot] = allocate(self.layout.starts[-1], dtype=self.dtype, device=self.device)
        return flat

    def member_view(self, index: int) -> Callable[[list[Any]], Tensor]:
        """The view of the flat tensor that is member `at`."""
        shape, start, slot = self.layout.shapes[index], self.layout.starts[index], self.slot
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]

        def view(env: list[Any]) -> Tensor:
            flat = env[slot]
            if flat is None:
                flat = self.tensor(env)
            return flat.as_strided(shape, strides, flat.storage_offset() + start)

        return view

    def fill(self, env: list[Any]) -> Tensor:
        """The flat tensor, after copying the members that are not allocated in it."""
        xs = [None if slot is None else env[slot] for slot in self._reads]
        return fill(self.tensor(env), xs, self._views)

    def prepare_fill(self, fixed: Mapping[int, Tensor]) -> Callable[[list[Any]], Tensor] | None:
        """`fill` in one launch, that writes the zeros between members too. None where no kernel does it."""
        if not (self.has_copies and has_kernels(self.device)):
            return None
        from kernels_triton.bucket.layout import pack_layout
        from kernels_triton.bucket.prepared_call import PreparedPack

        args, xs = self._args, [None if slot is None else fixed.get(slot, slot) for slot in self._reads]
        present = {index for index, x in enumerate(xs) if x is not None}
        layout = pack_layout(self._numels, args["leads"], args["mids"], 1, args["unit"], self.dtype, present)
        if layout is None:
            return None
        self._zeroed = False
        return PreparedPack(layout, xs, fixed.get(self.slot, self.tensor), self.dtype, self.device)


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and HAS_TRITON


def prepare_pack(
    graph: Graph, pack: fx.Node, reads: Sequence[int], fixed: Mapping[int, Tensor], device: torch.device
) -> Callable[[list[Any]], Tensor] | None:
    """A `pack` of several rows in one launch, given the values of slots. None where no kernel does it."""
    if not has_kernels(device):
        return None
    from kernels_triton.bucket.layout import pack_layout
    from kernels_triton.bucket.prepared_call import PreparedPack

    args, dtype = given(pack), type_of(pack).dtype
    numels = [math.prod(type_of(x).local_shape(graph.mesh)) for x in operands(pack)]
    layout = pack_layout(numels, args["leads"], args["mids"], args["rows"], args["unit"], dtype, range(len(numels)))
    return (
        None if layout is None else PreparedPack(layout, [fixed.get(slot, slot) for slot in reads], None, dtype, device)
    )


def prepare_unpack(
    unpack: fx.Node,
    flat: Operand,
    used: Collection[int],
    places: Mapping[int, Place],
    device: torch.device,
) -> Callable[[list[Any]], Sequence[Tensor | None]] | None:
    """An `unpack` in one launch, or without a launch if all results are views. Results that are not `used` are None.
    Returns None if no kernel supports it."""
    if not has_kernels(device):
        return None
    from kernels_triton.bucket.layout import unpack_layout
    from kernels_triton.bucket.prepared_call import PreparedUnpack

    args, dtype = given(unpack), type_of(unpack.all_input_nodes[0]).dtype
    shapes, rows = shapes_of(args["shapes"], args["ranks"]), args["rows"]
    buffered = {index for index in used if rows > 1 or args["leads"][index] > 1 or index in places}
    layout = unpack_layout(shapes, args["leads"], args["mids"], args["sizes"], rows, args["unit"], dtype, buffered)
    return None if layout is None else PreparedUnpack(layout, flat, shapes, places, used, dtype, device)
