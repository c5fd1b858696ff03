"""A capacity of experts: how many rows of a group of tokens an expert takes, and which rows are over it.

    limit_rows   ids -> ids, of which those over the capacity are -1: of no expert
    count_rows   ids, limited ids -> how many rows are routed to each of `width` experts, and how many were dropped

A group is the tokens of one rank, as in GShard, Switch and Megatron: of `rows` rows for `experts` experts each expert
takes `factor * rows / experts`, rounded up. First come, first served, by the order of tokens and of a token's choices
(Megatron's policy "position"): so no row depends on later tokens.

    ids 0 0 1 0 0 1    2 experts, factor 1: 3 rows each    ->    0 0 1 0 -1 1

On a rank the rows are one group. On one device `layout` says into which groups the ranks' tokens fall: of each atom of
the rows its size, the number of axes that it lies over, and their sizes. An atom of blocks (`ir.blocks`), as of a
zigzag, has in place of its size minus the number of its blocks, and of each block how many rows it has, how many axes
divide, and a bit for each axis that reverses it. Nothing is read by the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.base.library import define
from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.types import Atom, TensorType

NOWHERE = -1


def capacity_of(rows: int, experts: int, factor: float) -> int:
    """How many of the rows of a group each expert takes. The factor is taken as it is written: 1.1 of 10 is 11."""
    return min(rows, math.ceil(Fraction(repr(float(factor))) * rows / experts))


def layout_of(type: TensorType, mesh: Mesh) -> list[int]:
    """How the rows of a value lie on ranks, as `limit_rows` takes it; empty where they are one group."""
    if not type.is_sharded:
        return []
    return [n for atom in type.dims[0] for n in (*_told(atom), len(atom.axes), *(mesh.size(a) for a in atom.axes))]


def _told(atom: Atom) -> list[int]:
    if not isinstance(atom.size, Blocks):
        return [atom.size]
    told = [-len(atom.size.parts)]
    for block in atom.size.parts:
        assert block.cut, f"rows of tokens, all on each rank: {atom}"
        assert block.unit == 1, f"rows of tokens in pieces: {atom}"
        told += [block.count, block.divided, sum(block.reverses(axis) << i for i, axis in enumerate(atom.axes))]
    return told


Cut = tuple[int, int, int]  # a block: its rows, how many axes divide, a bit for each axis that reverses it


def _atoms(layout: Sequence[int]) -> list[tuple[list[Cut], list[int]]]:
    """The atoms of a layout, each with its blocks and with the sizes of its axes."""
    atoms: list[tuple[list[Cut], list[int]]] = []
    todo = list(layout)
    while todo:
        size, *todo = todo
        cuts = [(size, size, 0)]
        if size < 0:
            cuts, todo = [(todo[i], todo[i + 1], todo[i + 2]) for i in range(0, -3 * size, 3)], todo[-3 * size :]
        count, *todo = todo
        atoms.append((cuts, todo[:count]))
        todo = todo[count:]
    return atoms


def _groups(rows: int, layout: Sequence[int], device: torch.device) -> Tensor:
    """The positions of each group's rows, a line a group. Padding is NOWHERE."""
    index = torch.arange(rows, device=device)
    if not layout:
        return index[None]
    atoms = _atoms(layout)
    index = index.view([sum(count for count, _, _ in cuts) for cuts, _ in atoms])
    for dim, (cuts, axes) in enumerate(atoms):
        parts = index.split([count for count, _, _ in cuts], index.ndim - len(atoms) + dim)
        shares = [_shares(part, cut, axes, len(atoms) - dim) for part, cut in zip(parts, cuts, strict=True)]
        index = torch.cat(shares, dim - len(atoms))
    return index.reshape(math.prod(ranks for _, axes in atoms for ranks in axes), -1)


def _shares(index: Tensor, cut: Cut, axes: Sequence[int], last: int) -> Tensor:
    """A block, the dim `-last`, cut by each axis in turn, whose ranks are a dim in front of those that are cut."""
    count, divided, reversed_by = cut
    index = pad(index, [0, 0] * (last - 1) + [0, divided - count], value=NOWHERE)
    for i, ranks in enumerate(axes):
        chunk = -(-index.shape[-last] // ranks)
        index = pad(index, [0, 0] * (last - 1) + [0, ranks * chunk - index.shape[-last]], value=NOWHERE)
        index = index.unflatten(-last, (ranks, chunk))
        index = (index.flip(-last - 1) if reversed_by >> i & 1 else index).movedim(-last - 1, 0)
    return index


def _limit_rows(ids: Tensor, experts: int, factor: float, layout: list[int]) -> Tensor:
    places = _groups(ids.shape[0], layout, ids.device)
    routed = (places >= 0) & (ids[places.clamp(min=0)] >= 0) & (ids[places.clamp(min=0)] < experts)
    chosen = torch.where(routed, ids[places.clamp(min=0)], experts)
    ordered, order = torch.sort(chosen, dim=1, stable=True)
    turn = torch.arange(chosen.shape[1], device=ids.device) - torch.searchsorted(ordered, ordered)
    over = (turn >= capacity_of(chosen.shape[1], experts, factor)) & (ordered < experts)
    dropped = torch.zeros_like(over).scatter_(1, order, over)
    # Rows of padding, which lie nowhere, mark a row behind the last.
    marks = torch.zeros(ids.shape[0] + 1, dtype=torch.bool, device=ids.device)
    marks[torch.where(places >= 0, places, ids.shape[0]).flatten()] = dropped.flatten()
    return torch.where(marks[:-1], NOWHERE, ids)


def _limit_rows_fake(ids: Tensor, experts: int, factor: float, layout: list[int]) -> Tensor:
    return ids.new_empty(ids.shape)


def _count_rows(ids: Tensor, limited: Tensor, experts: int, width: int) -> Tensor:
    routed, kept = (ids >= 0) & (ids < experts), (limited >= 0) & (limited < experts)
    counts = torch.zeros(width + 2, dtype=torch.int64, device=ids.device)
    counts.scatter_add_(0, torch.where(routed, ids, width + 1).long(), torch.ones_like(ids, dtype=torch.int64))
    counts[width] = (routed & ~kept).sum()
    return counts[: width + 1].clone()


def _count_rows_fake(ids: Tensor, limited: Tensor, experts: int, width: int) -> Tensor:
    return ids.new_empty((width + 1,), dtype=torch.int64)


LIMIT_ROWS = define(
    "limit_rows(Tensor ids, int experts, float factor, int[] layout) -> Tensor", _limit_rows, _limit_rows_fake
)
COUNT_ROWS = define(
    "count_rows(Tensor ids, Tensor limited, int experts, int width) -> Tensor", _count_rows, _count_rows_fake
)
