"""How rows lie when they are sent to the ranks of their experts: the types of `shardc.ir.ops.exchange`, and what is
false of a call of it.

    f32[(8@ep 16 2), 64; 4]   rows of a rank's tokens, of all experts      the axes lie on rows
    f32[(8 16 2), 64; 4@ep]   rows of all tokens, of a rank's experts      they lie on experts

In each of these types the rows, or the groups, are dim 0, and what they are divided by is the last, ragged dim. An
exchange takes all its axes from the one and puts them on the other's first atom, so that the experts of a rank are
consecutive numbers. By a capacity fewer rows come than a rank's type has (`TensorType.room`):

    f32[(8 16 2)<=80, 64; 4@ep]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from shardc.ir.graph import operands, producer, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import reshard
from shardc.ir.ops.exchange import COMBINE_ROWS, width_of
from shardc.ir.ops.expert_capacity import LIMIT_ROWS, capacity_of
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.ir.ops.local import mask_blocks, mask_pad
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, Dim, TensorType


def tokens_of(dim: Dim, axes: Axes) -> Dim:
    """The dim of rows, without the axes that are exchanged."""
    return tuple(Atom(atom.size, tuple(a for a in atom.axes if a not in axes)) for atom in dim)


def experts_of(dim: Dim, axes: Axes) -> Dim:
    """The dim of experts, over the axes that are exchanged."""
    first, *rest = dim
    return (Atom(first.size, axes), *rest)


def by_experts(type: TensorType, axes: Axes, room: int = 0) -> TensorType:
    """How rows lie after they are sent to their experts."""
    rows, *features, experts = type.dims
    dims = (tokens_of(rows, axes), *features, experts_of(experts, axes))
    return TensorType(type.dtype, dims, type.partial, type.ragged, room)


def room_of(rows: Dim, experts: Dim, axes: Axes, capacity: int, mesh: Mesh) -> int:
    """For how many rows a rank has room at its experts, where each takes `capacity` of the rows of a rank; 0: for all.

    `rows` and `experts` lie as they do at the tokens.
    """
    own, each = math.prod(atom.local(mesh) for atom in rows), _each(experts, axes, mesh)
    width = width_of(own, each, capacity)
    return width * mesh.size(axes) if capacity and width < own else 0


def _each(experts: Dim, axes: Axes, mesh: Mesh) -> int:
    """How many experts a rank has."""
    return math.prod(atom.local(mesh) for atom in experts_of(experts, axes))


def capacity_by(offs: fx.Node, mesh: Mesh) -> int | None:
    """How many rows of a rank each expert has at most, by what has limited the ids that were grouped; 0 where nothing
    has, None where the grouping is not in the graph."""
    grouping = producer(offs)[0]
    if grouping.target is not GROUP_ROWS:
        return None
    ids = operands(grouping)[0]
    while ids.op == "call_function" and ids.target in (mask_pad, mask_blocks, reshard):
        ids = operands(ids)[0]
    if ids.target is not LIMIT_ROWS:
        return 0
    args, type = given(ids), type_of(ids)
    own = math.prod(atom.local(mesh) for atom in type_of(offs).dims[-1])
    experts = math.prod(atom.size for atom in type_of(offs).dims[0])
    elsewhere = type.placement != type_of(operands(grouping)[0]).placement
    if args["experts"] != experts or math.prod(type.local_shape(mesh)) != own or elsewhere:
        return 0  # it was limited elsewhere
    return capacity_of(own, args["experts"], args["factor"])


def counts_of(offs: TensorType, axes: Axes, mesh: Mesh) -> TensorType:
    """The counts of the rows that are sent, by where the groups end that a rank makes of its own tokens."""
    experts, rows = offs.dims
    dims = (experts_of(experts, axes), (Atom(mesh.size(axes)),), tokens_of(rows, axes))
    return TensorType(torch.int32, dims, (), 1)


def moved_axes(before: TensorType, after: TensorType) -> Axes:
    """The axes that go from rows to experts, or from experts to rows, where one type becomes the other; else none."""
    if not (before.ragged == after.ragged == 1 and before.dims[-1]):
        return ()
    ends = [{axis for atom in type.dims[-1] for axis in atom.axes} for type in (before, after)]
    gained = ends[0] ^ ends[1]
    return next((type.dims[-1][0].axes for type in (before, after) if set(type.dims[-1][0].axes) == gained), ())


def misfit(rows: Dim, experts: Dim, axes: Axes, mesh: Mesh) -> str | None:
    """Why rows of these tokens, which lie over the axes, cannot be sent to these experts, over none; None if they can.

    A rank has room for as many rows as there are in what its type is a shard of, so padding must not be moved about.
    """
    if any(atom.axes for atom in experts):
        return "its experts lie over other axes too"
    if not experts:
        return "there is one expert"
    first = experts_of(experts, axes)[0]
    if first.uneven(mesh) and len(axes) > 1:
        return f"{first.size} experts do not divide by the ranks of {'.'.join(axes)}"
    for atom in rows:
        kept = tuple(a for a in atom.axes if a not in axes)
        if atom.axes[: len(kept)] != kept and atom.uneven(mesh):
            return f"{atom.size} rows do not divide by the ranks of {'.'.join(atom.axes)}"
    return None


def counts_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of the type of `exchange_counts`' result."""
    args, after = given(node), result_types[0]
    offs, axes = type_of(args["x"]), mesh.resolve(args["axes"])
    if (wrong := _offsets_fault(offs, axes, mesh)) is not None:
        return [wrong]
    want = counts_of(offs, axes, mesh)
    if after != want:
        return [f"yields {want}, the result says {after}"]
    return [] if tuple(args["shape"]) == want.local_shape(mesh) else [f"takes counts as {args['shape']}"]


def move_faults(node: fx.Node, result_types: Sequence[TensorType | None], mesh: Mesh) -> list[str]:
    """What is false of the type of the result of `dispatch_rows`, or `combine_rows`."""
    args, after = given(node), result_types[0]
    before, offs, counts = type_of(args["x"]), type_of(args["offs"]), type_of(args["counts"])
    axes = mesh.resolve(args["axes"])
    assert after is not None
    if (wrong := _offsets_fault(offs, axes, mesh)) is not None:
        return [wrong]
    if counts != counts_of(offs, axes, mesh):
        return [f"its counts are {counts}, not {counts_of(offs, axes, mesh)}"]
    by_tokens, there = (after, before) if node.target is COMBINE_ROWS else (before, after)
    if by_tokens.ragged != 1 or (by_tokens.dims[-1], by_tokens.dims[0]) != (offs.dims[0], offs.dims[-1]):
        return [f"moves {by_tokens}, whose groups end as {offs}"]
    capacity = args.get("capacity", 0)
    if (kept := capacity_by(args["offs"], mesh)) is not None and kept != capacity:
        return [f"sends {capacity} rows for each expert, and nothing keeps to that"]
    if there != by_experts(by_tokens, axes, room_of(by_tokens.dims[0], by_tokens.dims[-1], axes, capacity, mesh)):
        return [f"moves {before} to {after}"]
    rows = after.local_shape(mesh)[0]
    return [] if args["rows"] == rows else [f"has room for {args['rows']} rows, of {rows}"]


def _offsets_fault(offs: TensorType, axes: Axes, mesh: Mesh) -> str | None:
    if offs.ragged != 1 or len(offs.dims) != 2:
        return f"{offs} are no ends of groups"
    experts, rows = offs.dims
    if not axes or not {axis for atom in rows for axis in atom.axes}.issuperset(axes):
        return f"exchanges rows over {'.'.join(axes)}, which lie as {offs}"
    return misfit(rows, experts, axes, mesh)
