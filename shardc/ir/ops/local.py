"""Ops that differ between ranks without talking: take one's own chunk, mask one's own padding, know one's offset.

All three rest on `span`: which global indices of an atom a rank holds. 10 over (a=2, b=3), axis by axis, major first:

    a  cuts 10 into 5 5          b  cuts each 5 into 2 2 1, stored as 2
    a=1, b=2 holds index 9 and one element of padding: start 9, extent 1, local size 2
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels_triton.base.library import define
from shardc.ir.blocks import Block, Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops.context import current


@dataclass(frozen=True, slots=True)
class Span:
    """Global indices [start, start + extent) of an atom, stored in the first of `local` elements."""

    start: int
    extent: int
    local: int


def span(size: int, axes: Sequence[str], mesh: Mesh, coordinate: Mapping[str, int], block: Block | None = None) -> Span:
    """What the rank at `coordinate` holds of an atom of `size` sharded by `axes`, major first; or of a block's pieces,
    which an axis may have in reverse."""
    start, extent, local = 0, size, block.divided if block and axes else size
    for axis in mesh.resolve(axes):
        ranks = mesh.size(axis)
        local = -(-local // ranks)
        offset = local * (ranks - 1 - coordinate[axis] if block and block.reverses(axis) else coordinate[axis])
        start += offset
        extent = min(max(extent - offset, 0), local)
    # A rank of padding alone starts at the end.
    return Span(min(start, size), extent, local)


@dataclass(frozen=True, slots=True)
class Run:
    """Global indices [start, start + extent) of an atom, stored from the local index `local` on."""

    start: int
    extent: int
    local: int


def runs(size: int, axes: Sequence[str], mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[Run, ...]:
    """What the rank at `coordinate` holds of an atom: one run, or one of each block of which it holds something."""
    if not isinstance(size, Blocks):
        held = span(size, axes, mesh, coordinate)
        return (Run(held.start, held.extent, 0),)
    found: list[Run] = []
    start = local = 0
    for block in size.parts:
        held = span(block.count, axes if block.cut else (), mesh, coordinate, block)
        if held.extent:
            found.append(Run(start + held.start * block.unit, held.extent * block.unit, local))
        start, local = start + block.size, local + held.local * block.unit
    return tuple(found)


def take(x: torch.Tensor, pos: int, shard_span: Span) -> torch.Tensor:
    """The held part of dim `pos`, zero padded to its local size; always a fresh contiguous tensor."""
    if shard_span.extent == shard_span.local:
        return x.narrow(pos, shard_span.start, shard_span.extent).clone(memory_format=torch.contiguous_format)
    shape = [*x.shape[:pos], shard_span.local, *x.shape[pos + 1 :]]
    chunk = x.new_zeros(shape)
    if shard_span.extent:
        chunk.narrow(pos, 0, shard_span.extent).copy_(x.narrow(pos, shard_span.start, shard_span.extent))
    return chunk


def _shard_slice(x: torch.Tensor, axes: list[str], atoms: list[int], pos: int, shape: list[int]) -> torch.Tensor:
    context = current()
    shard_span = span(atoms[pos], axes, context.mesh, context.coordinate)
    return take(x.reshape(atoms), pos, shard_span).view(shape)


def told_blocks(counts: Sequence[int], units: Sequence[int], reverse: Sequence[str] | None = None) -> Blocks:
    """As the ops' arguments tell blocks: the number of pieces of one that is not cut is negative, and `reverse` is a
    name for each, or nothing where no axis reverses any."""
    names = reverse or [""] * len(counts)
    parts: list[Block] = []
    for n, unit, name in zip(counts, units, names, strict=True):
        room, _, axis = name.rpartition("~")
        parts.append(Block(abs(n), unit, n > 0, axis, int(room or 0)))
    return Blocks(parts)


def told(blocks: Blocks) -> tuple[list[int], list[int], list[str]]:
    """Blocks as the ops' arguments `counts`, `units` and `reverse`; the last tells of room too: `16~cp`."""
    counts = [b.count if b.cut else -b.count for b in blocks.parts]
    how = [f"{b.room}~{b.reverse}" if b.room else b.reverse for b in blocks.parts]
    return counts, [b.unit for b in blocks.parts], how if any(how) else []


def _slice_blocks(
    x: torch.Tensor,
    axes: list[str],
    atoms: list[int],
    pos: int,
    counts: list[int],
    units: list[int],
    shape: list[int],
    reverse: Sequence[str] | None = None,
) -> torch.Tensor:
    context = current()
    blocks = told_blocks(counts, units, reverse)
    assert int(blocks) == atoms[pos], f"atom {pos} holds {atoms[pos]}, not {blocks}"
    whole = x.reshape(atoms)
    local = blocks.local(axes, context.mesh)
    part = x.new_zeros([*atoms[:pos], int(local), *atoms[pos + 1 :]])
    for run in runs(blocks, axes, context.mesh, context.coordinate):
        part.narrow(pos, run.local, run.extent).copy_(whole.narrow(pos, run.start, run.extent))
    return part.view(shape)


def _mask_blocks(
    x: torch.Tensor,
    atoms: list[int],
    pos: int,
    counts: list[int],
    units: list[int],
    axes: list[str],
    fill: float,
    copies: bool,
    reverse: Sequence[str] | None = None,
) -> torch.Tensor:
    context = current()
    blocks = told_blocks(counts, units, reverse)
    masked = x.reshape(atoms).clone(memory_format=torch.contiguous_format)
    first = not any(context.coordinate[axis] for axis in context.mesh.resolve(axes))
    start = 0
    for block in blocks.parts:
        held = span(block.count, axes if block.cut else (), context.mesh, context.coordinate, block)
        extent = 0 if copies and not block.cut and not first else held.extent
        masked.narrow(pos, start + extent * block.unit, (held.local - extent) * block.unit).fill_(fill)
        start += held.local * block.unit
    assert start == atoms[pos], f"atom {pos} holds {atoms[pos]}, not the {start} that {blocks} over {axes} has"
    return masked.view(x.shape)


def _mask_pad(x: torch.Tensor, atoms: list[int], pos: int, size: int, axes: list[str], fill: float) -> torch.Tensor:
    context = current()
    shard_span = span(size, axes, context.mesh, context.coordinate)
    assert shard_span.local == atoms[pos], (
        f"atom {pos} holds {atoms[pos]}, not the {shard_span.local} that {size} over {axes} has"
    )
    masked = x.reshape(atoms).clone(memory_format=torch.contiguous_format)
    masked.narrow(pos, shard_span.extent, shard_span.local - shard_span.extent).fill_(fill)
    return masked.view(x.shape)


def _axis_offset(axes: list[str], strides: list[int]) -> torch.Tensor:
    context = current()
    return torch.tensor(sum(context.index((axis,)) * stride for axis, stride in zip(axes, strides, strict=True)))


def _same(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


shard_slice = define(
    "shard_slice(Tensor x, str[] axes, int[] atoms, int pos, int[] shape) -> Tensor",
    _shard_slice,
    lambda x, axes, atoms, pos, shape: x.new_empty(shape),
)
mask_pad = define(
    "mask_pad(Tensor x, int[] atoms, int pos, int size, str[] axes, float fill) -> Tensor", _mask_pad, _same
)
slice_blocks = define(
    "slice_blocks(Tensor x, str[] axes, int[] atoms, int pos, int[] counts, int[] units, int[] shape,"
    " str[]? reverse=None) -> Tensor",
    _slice_blocks,
    lambda x, axes, atoms, pos, counts, units, shape, reverse=None: x.new_empty(shape),
)
mask_blocks = define(
    "mask_blocks(Tensor x, int[] atoms, int pos, int[] counts, int[] units, str[] axes, float fill, bool copies,"
    " str[]? reverse=None) -> Tensor",
    _mask_blocks,
    _same,
)
axis_offset = define(
    "axis_offset(str[] axes, int[] strides) -> Tensor",
    _axis_offset,
    lambda axes, strides: torch.empty((), dtype=torch.int64),
)

# The only ops whose kernels read the coordinate, and of it the axes that the call names: on ranks that agree there, and
# in the operands, the call yields the same. Simulation computes it once for all of them.
AXES_READ: dict[Any, Callable[..., Sequence[str]]] = {
    shard_slice: lambda x, axes, atoms, pos, shape: axes,
    mask_pad: lambda x, atoms, pos, size, axes, fill: axes,
    slice_blocks: lambda x, axes, atoms, pos, counts, units, shape, reverse=None: axes,
    mask_blocks: lambda x, atoms, pos, counts, units, axes, fill, copies, reverse=None: axes,
    axis_offset: lambda axes, strides: axes,
}
