"""Converts global tensors to shards and back, by the `TensorType` that says what each rank stores.

A tensor is reshaped to its atoms; a rank holds one `span` of every atom, zero padded to the local size:

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

from shardc.ir.mesh import Mesh
from shardc.ir.ops.local import Span, span, take
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
    x = tensor.reshape([a.size for a in type.atoms])
    for pos, (atom, atom_span) in enumerate(zip(type.atoms, _spans(type, mesh, rank), strict=True)):
        if atom.axes:
            x = take(x, pos, atom_span)
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
        spans = _spans(type, mesh, ranks[0])
        if whole is None:
            whole = value.new_zeros([a.size for a in type.atoms])
        part = value.reshape(type.local_atoms(mesh))
        into = whole
        for pos, atom_span in enumerate(spans):
            part, into = part.narrow(pos, 0, atom_span.extent), into.narrow(pos, atom_span.start, atom_span.extent)
        into.copy_(part)
    assert whole is not None
    return whole.reshape(type.shape)


def replica_spread(shards: Mapping[int, torch.Tensor], type: TensorType, mesh: Mesh) -> float:
    """The largest difference between ranks that should hold the same, padding left out; 0 when they agree."""
    spread = 0.0
    names = [name for name in mesh.names if name in _resolve_axes(mesh, type.partial_axes)]
    for ranks in _holders(type, mesh).values():
        first_replica: dict[tuple[int, ...], torch.Tensor] = {}
        spans = _spans(type, mesh, ranks[0])
        for rank in ranks:
            coordinate = mesh.coordinate(rank)
            first = first_replica.setdefault(tuple(coordinate[name] for name in names), shards[rank])
            if first is shards[rank]:
                continue
            a, b = (x.reshape(type.local_atoms(mesh)) for x in (first, shards[rank]))
            for pos, atom_span in enumerate(spans):
                a, b = a.narrow(pos, 0, atom_span.extent), b.narrow(pos, 0, atom_span.extent)
            if a.numel() and not torch.equal(a, b):
                gap = (a.double() - b.double()).abs()
                # Equal infinities differ by NaN, and so does a NaN from itself: neither is a disagreement.
                gap = gap.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0).nan_to_num(nan=math.inf)
                spread = max(spread, float(gap.max()))
    return spread


def shard_slices(type: TensorType, mesh: Mesh, rank: int) -> tuple[tuple[IndexRun, ...], ...]:
    """For each dim, the ranges of it that the rank holds. The shard is the product of these ranges over the dims."""
    spans = iter(_spans(type, mesh, rank))
    return tuple(_runs(dim, [next(spans) for _ in dim]) for dim in type.dims)


def load_shard(
    read: Callable[[tuple[slice, ...]], torch.Tensor], type: TensorType, mesh: Mesh, rank: int
) -> torch.Tensor:
    """One rank's shard, read block by block: `read` gets a contiguous slice of each dim of the global tensor."""
    shape = type.local_shape(mesh)
    local: torch.Tensor | None = None
    for runs in product(*shard_slices(type, mesh, rank)):
        block = read(tuple(run.whole for run in runs))
        if local is None:
            local = block.new_zeros(shape)
        local[tuple(run.local for run in runs)] = block
    # A rank whose share of an uneven dim is padding alone reads nothing.
    return torch.zeros(shape, dtype=type.dtype) if local is None else local


def _runs(dim: Dim, spans: Sequence[Span]) -> tuple[IndexRun, ...]:
    """Cut a dim where its indices stop counting up by one, in the whole or in the shard."""
    if len(dim) == 1:  # almost every dim, and the longest ones
        atom_span = spans[0]
        run = IndexRun(slice(atom_span.start, atom_span.start + atom_span.extent), slice(0, atom_span.extent))
        return (run,) if atom_span.extent else ()
    whole, local = [0], [0]
    for atom, atom_span in zip(dim, spans, strict=True):
        whole = [base * atom.size + atom_span.start + i for base in whole for i in range(atom_span.extent)]
        local = [base * atom_span.local + i for base in local for i in range(atom_span.extent)]
    runs: list[IndexRun] = []
    start = 0
    for index in range(1, len(whole) + 1):
        if index == len(whole) or whole[index] != whole[index - 1] + 1 or local[index] != local[index - 1] + 1:
            runs.append(IndexRun(slice(whole[start], whole[index - 1] + 1), slice(local[start], local[index - 1] + 1)))
            start = index
    return tuple(runs) if whole else ()


@lru_cache(maxsize=65536)
def _spans(type: TensorType, mesh: Mesh, rank: int) -> tuple[Span, ...]:
    coordinate = mesh.coordinate(rank)
    return tuple(span(a.size, a.axes, mesh, coordinate) for a in type.atoms)


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
