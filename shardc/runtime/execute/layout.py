"""Converts global tensors to shards and back, by the `TensorType` that says what each rank stores.

A tensor is reshaped to its atoms; a rank holds one run of every atom, or one of each of its blocks, zero padded to the
local size:

    f32[(3 8@tp 4)], tp=2     rank 1 holds, of each of the 3 blocks, heads 4..7

`shard` and `assemble` convert tensors. `shard_slices` gives the same mapping as index ranges, so that a checkpoint is
read shard by shard, and no rank holds a whole tensor of which it needs only a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import product
from typing import NamedTuple

import torch

from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops.local import Run, runs
from shardc.ir.types import Dim, Partial, TensorType

REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


class IndexRun(NamedTuple):
    """One contiguous range of a tensor dim: its indices in the global tensor and in the shard."""

    whole: slice
    local: slice


def shard(tensor: torch.Tensor, type: TensorType, mesh: Mesh, rank: int) -> torch.Tensor:
    """One rank's part of a global tensor: a fresh contiguous tensor, padding 0. The type must have no partials."""
    assert not type.partial, f"a tensor cannot be cut into pending reductions: {type}"
    assert tuple(tensor.shape) == type.shape, f"a tensor of shape {tuple(tensor.shape)} is no {type}"
    x = tensor.reshape([int(a.size) for a in type.atoms])
    for pos, (atom, held) in enumerate(zip(type.atoms, _held(type, mesh, rank), strict=True)):
        if atom.axes:
            part = x.new_zeros([*x.shape[:pos], atom.local(mesh), *x.shape[pos + 1 :]])
            for run in held:
                part.narrow(pos, run.local, run.extent).copy_(x.narrow(pos, run.start, run.extent))
            x = part
    if not type.axes:
        x = x.clone(memory_format=torch.contiguous_format)
    return x.reshape(type.local_shape(mesh))


def assemble(shards: Mapping[int, torch.Tensor], type: TensorType, mesh: Mesh) -> torch.Tensor:
    """The global tensor: each shard at its place, padding dropped, pending reductions resolved over their axes.

    Of replicas, the lowest rank's is used; `replica_spread` tells whether they agree.
    """
    whole: torch.Tensor | None = None
    for ranks in _holders(type, mesh).values():
        value = _resolve_partials(ranks[0], type.partial, shards, mesh)
        if whole is None:
            whole = value.new_zeros([int(a.size) for a in type.atoms])
        stored = value.reshape(type.local_atoms(mesh))
        for runs_of_atoms in product(*_held(type, mesh, ranks[0])):
            part, into = stored, whole
            for pos, run in enumerate(runs_of_atoms):
                part, into = part.narrow(pos, run.local, run.extent), into.narrow(pos, run.start, run.extent)
            into.copy_(part)
    assert whole is not None
    return whole.reshape(type.shape)


def replica_spread(shards: Mapping[int, torch.Tensor], type: TensorType, mesh: Mesh) -> float:
    """The largest difference between ranks that should hold the same, padding left out; 0 when they agree."""
    spread = _spread(shards, type, mesh, type, None)
    for pos, atom in enumerate(type.atoms):
        if isinstance(atom.size, Blocks) and atom.size.copied and atom.axes:
            # Ranks that hold different shares of the atom hold the same of its whole blocks.
            held_alike = type.place([() if i == pos else axes for i, axes in enumerate(type.placement)], type.partial)
            spread = max(spread, _spread(shards, type, mesh, held_alike, pos))
    return spread


def _spread(
    shards: Mapping[int, torch.Tensor], type: TensorType, mesh: Mesh, alike: TensorType, copied: int | None
) -> float:
    """Of ranks whose coordinates on the axes of `alike` agree; `copied`: of this atom, the blocks that are not cut."""
    spread = 0.0
    names = [name for name in mesh.names if name in _resolve_axes(mesh, type.partial_axes)]
    for ranks in _holders(alike, mesh).values():
        first_replica: dict[tuple[int, ...], int] = {}
        for rank in ranks:
            coordinate = mesh.coordinate(rank)
            first = first_replica.setdefault(tuple(coordinate[name] for name in names), rank)
            if first == rank:
                continue
            of_first, of_rank = _compared(type, mesh, first, copied), _compared(type, mesh, rank, copied)
            for those, these in zip(product(*of_first), product(*of_rank), strict=True):
                a, b = (shards[r].reshape(type.local_atoms(mesh)) for r in (first, rank))
                for pos, (run_a, run_b) in enumerate(zip(those, these, strict=True)):
                    a, b = a.narrow(pos, run_a.local, run_a.extent), b.narrow(pos, run_b.local, run_b.extent)
                if a.numel() and not torch.equal(a, b):
                    gap = (a.double() - b.double()).abs()
                    # Equal infinities differ by NaN, and so does a NaN from itself: neither is a disagreement.
                    gap = gap.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(nan=math.inf)
                    spread = max(spread, float(gap.max()))
    return spread


def _compared(type: TensorType, mesh: Mesh, rank: int, copied: int | None) -> list[tuple[Run, ...]]:
    held = list(_held(type, mesh, rank))
    if copied is not None:
        size, starts = type.atoms[copied].size, set[int]()
        assert isinstance(size, Blocks)
        start = 0
        for block in size.parts:
            starts |= set() if block.cut else {start}
            start += block.size
        held[copied] = tuple(run for run in held[copied] if run.start in starts and _whole(size, run))
    return held


def _whole(blocks: Blocks, run: Run) -> bool:
    """Is the run a block that is not cut?"""
    found = blocks.between(run.start, run.start + run.extent)
    return found is not None and len(found) == 1 and not found[0].cut


def shard_slices(type: TensorType, mesh: Mesh, rank: int) -> tuple[tuple[IndexRun, ...], ...]:
    """For each dim, the ranges of it that the rank holds. The shard is the product of these ranges over the dims."""
    held = iter(_held(type, mesh, rank))
    return tuple(_runs(dim, [next(held) for _ in dim], mesh) for dim in type.dims)


def load_shard(
    read: Callable[[tuple[slice, ...]], torch.Tensor], type: TensorType, mesh: Mesh, rank: int
) -> torch.Tensor:
    """One rank's shard, read block by block: `read` gets a contiguous slice of each dim of the global tensor."""
    shape = type.local_shape(mesh)
    local: torch.Tensor | None = None
    for of_dims in product(*shard_slices(type, mesh, rank)):
        block = read(tuple(run.whole for run in of_dims))
        if local is None:
            local = block.new_zeros(shape)
        local[tuple(run.local for run in of_dims)] = block
    # A rank whose share of an uneven dim is padding alone reads nothing.
    return torch.zeros(shape, dtype=type.dtype) if local is None else local


def _runs(dim: Dim, held: Sequence[tuple[Run, ...]], mesh: Mesh) -> tuple[IndexRun, ...]:
    """Cut a dim where its indices stop counting up by one, in the whole or in the shard, and between blocks."""
    if len(dim) == 1:  # almost every dim, and the longest ones
        return tuple(
            IndexRun(slice(run.start, run.start + run.extent), slice(run.local, run.local + run.extent))
            for run in held[0]
            if run.extent
        )
    indices = [(0, 0, 0)]  # in the whole, in the shard, and which run it is of
    for atom, of_atom in zip(dim, held, strict=True):
        local = atom.local(mesh)
        indices = [
            (whole * atom.size + run.start + i, base * local + run.local + i, part * len(of_atom) + k)
            for whole, base, part in indices
            for k, run in enumerate(of_atom)
            for i in range(run.extent)
        ]
    found: list[IndexRun] = []
    start = 0
    for index in range(1, len(indices) + 1):
        whole, base, part = indices[index - 1]
        if index == len(indices) or indices[index] != (whole + 1, base + 1, part):
            found.append(IndexRun(slice(indices[start][0], whole + 1), slice(indices[start][1], base + 1)))
            start = index
    return tuple(found) if indices else ()


@lru_cache(maxsize=65536)
def _held(type: TensorType, mesh: Mesh, rank: int) -> tuple[tuple[Run, ...], ...]:
    coordinate = mesh.coordinate(rank)
    return tuple(runs(a.size, a.axes, mesh, coordinate) for a in type.atoms)


def _resolve_axes(mesh: Mesh, axes: frozenset[str]) -> frozenset[str]:
    return frozenset(mesh.resolve(sorted(axes)))


def _holders(type: TensorType, mesh: Mesh) -> dict[tuple[int, ...], list[int]]:
    """Ranks by what they hold: those of one entry have the same coordinate on every axis that shards the tensor."""
    names = [name for name in mesh.names if name in _resolve_axes(mesh, type.axes)]
    holders: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        coordinate = mesh.coordinate(rank)
        holders.setdefault(tuple(coordinate[name] for name in names), []).append(rank)
    return holders


def _resolve_partials(rank: int, pending: Partial, shards: Mapping[int, torch.Tensor], mesh: Mesh) -> torch.Tensor:
    """A rank's value after its pending reductions over their axes."""
    if not pending:
        return shards[rank]
    (axis, kind), others = pending[0], pending[1:]
    values = [_resolve_partials(member, others, shards, mesh) for member in mesh.group_of(rank, axis)]
    return reduce(REDUCE[kind], values)
