"""Rows moved along a dim: a rank's result is of its own rows but for few, which others send (see `ir.ops.shift`).

    labels[:, 1:]                      shift by 1, of 15 rows of 16      one row a rank
    F.pad(labels, (0, 1))[..., 1:]     shift by 1, of 16 rows            one row a rank
    logits[:, :-1]                     shift by 0, of 15 rows of 16      none

Where the result is of another length, its rows have to lie with the ranks that have those of the operand: its atom is
then one of blocks with room (`ir.blocks`), which `find_sequences` puts there. Otherwise both are whole.

Rows in the other order (`ir.ops.mirror`) go to the rank as far from the end, where all have as many of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.ir.blocks import Blocks, blocks_of
from shardc.ir.graph import info, op_name, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.ops.mirror import MIRROR, MIRROR_ROWS
from shardc.ir.ops.shift import REGROUP, SHIFT, SHIFT_JOIN, SHIFT_ROWS, routes, rows_by_hop
from shardc.ir.provenance import Cause, Derivation
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.halo import with_rows
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block, rule


def layout_of(dim: Sequence[Atom]) -> str:
    """What axes cut of a dim, as a call tells it: an atom, or the first of several, in pieces of all others."""
    size, inner = dim[0].size, math.prod(int(atom.size) for atom in dim[1:])
    parts = (replace(block, unit=block.unit * inner) for block in blocks_of(size))
    return str(Blocks(parts) if len(dim) > 1 else size)


def unfit(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """All atoms of a dim but the first: a rank's rows of them are no runs."""
    x, dim = type_of(given(node)["x"]), given(node)["dim"]
    first = sum(map(len, x.dims[:dim]))
    return {p for p in projection.operands[0][first + 1 : first + len(x.dims[dim])] if split.get(p)}


def cause_of(call: LocalCall, value: fx.Node, axes: Axes) -> Cause:
    """The annotation of the axes, as far as the values of the call know of it."""
    known = [info(v).cause for v in (value, call.node)]
    names = {*axes, *call.graph.mesh.merged(axes)}
    named = [r for cause in known for r in cause.requirements if names.intersection(r.axes)]
    return Cause(tuple(named[:1])) if named else known[0]


def moved(call: LocalCall, value: fx.Node, target: Any, args: tuple[Any, ...], type: TensorType, axes: Axes) -> fx.Node:
    """A call that has to do with the rows of others, before this one."""
    of = info(value).name
    name = f"{of}.{op_name(target).removeprefix('shardc.')}"
    about: dict[str, Any] = {"origin": Derivation("moved", of), "cause": cause_of(call, value, axes)}
    return call.graph.call(target, args, like=call.node, type=type, name=name, **about)


@by_block
def local_shift(call: LocalCall) -> Any:
    args = call.args
    return _routed(call, args["x"], args["offset"], args["wrap"], args["fill"])


def _routed(call: LocalCall, x: fx.Node, offset: int, wrap: bool, fill: float, mirror: bool = False) -> Any:
    dim, mesh = call.args["dim"], call.graph.mesh
    type, after = type_of(x), call.results[0]
    if not any(atom.axes for atom in type.dims[dim]):
        return call.with_args()
    axes, source, target = (
        tuple(mesh.resolve(type.dims[dim][0].axes)),
        *map(layout_of, (type.dims[dim], after.dims[dim])),
    )
    layout, turned = (dim, source, target, list(axes), offset, wrap), (True,) if mirror else ()
    by_hop = rows_by_hop(routes(source, target, axes, mesh, offset, wrap, mirror))
    received: list[fx.Node] = []
    for hop, rows in by_hop.items():
        some = with_rows(type, dim, rows, axes, mesh)
        sent = moved(call, x, SHIFT_ROWS, (x, *layout, hop, rows, *turned), some, axes)
        received.append(moved(call, x, NEIGHBOUR_ROWS, (sent, list(axes), dim, 0, rows, -hop), some, axes))
    return SHIFT_JOIN, (x, received, *layout, list(by_hop), after.local_shape(mesh)[dim], fill, *turned), {}


@rule(
    SHIFT,
    localize=local_shift,
    unfit=unfit,
    examples=[
        ((4, 6), 1, 1, 6, 0.0, False),
        ((4, 6), 1, -2, 6, 1.5, False),
        ((4, 6, 3), 1, 4, 6, 0.0, True),
        ((4, 6), 1, 1, 5, 0.0, False),
        ((5, 6), 0, -1, 7, 0.0, False),
        ((6,), 0, 7, 6, 0.0, False),
    ],
)
def shift(x: Dims, dim: int, offset: int, length: int, fill: float, wrap: bool) -> Notation:
    label, linear = x[dim], "joint" if fill == 0 or wrap else ()
    if length == x.shape[dim]:
        return Notation(f"{x} -> {x}", linear=linear)
    part = f"moved_{label}"
    text = f"{x} -> {x.replace(dim, part)}"
    return Notation(text, whole=f"{label} {part}", linear=linear, aligned=((label, part),))


@by_block
def local_regroup(call: LocalCall) -> Any:
    return _routed(call, call.args["x"], call.args.get("offset", 0), False, 0.0)


@rule(
    REGROUP,
    localize=local_regroup,
    unfit=unfit,
    examples=[
        ((4, 6), 1, 8, 4, False),
        ((4, 6, 3), 1, 6, 2, False),
        ((4, 8), 1, 6, 4, True),
        ((6, 4), 0, 6, 3, True),
        ((4, 6), 1, 8, 4, False, -1),
        ((4, 9), 1, 5, 3, True, 2),
    ],
)
def regroup(x: Dims, dim: int, length: int, chunk: int, join: bool, offset: int = 0) -> Notation:
    chunked = f"(chunks {chunk})"
    text = f"{x.replace(dim, chunked)} -> {x.replace(dim, 'rows')}" if join else f"{x} -> {x.replace(dim, chunked)}"
    rows = "rows" if join else x[dim]
    return Notation(text, sum="chunks" if join else rows, linear="joint", following=((rows, "chunks"),))


# ------------------------------------------------------------------------------------------------ the other order
def has_both_ends(atom: Atom, mesh: Mesh) -> bool:
    """Has each rank of a zigzag the rows as far from the end as those that it has of the front?"""
    size = atom.size
    if not isinstance(size, Blocks) or len(size.parts) != 2 or len(mesh.resolve(atom.axes)) != 1:
        return False
    front, back = size.parts
    same = front.count == back.count and front.unit == back.unit and front.cut and back.cut
    return same and not front.reverse and back.reverses(mesh.resolve(atom.axes)[0]) and not atom.uneven(mesh)


def unlike(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """A dim of several atoms, or of which the parts of several axes are unequal, is turned whole."""
    x, dim = type_of(given(node)["x"]), given(node)["dim"]
    first = sum(map(len, x.dims[:dim]))
    pieces = {p for p in projection.operands[0][first : first + len(x.dims[dim])] if split.get(p)}
    atoms = [Atom(projection.sizes[p], tuple(split[p])) for p in pieces]
    several = any(len(mesh.resolve(atom.axes)) > 1 and atom.uneven(mesh) for atom in atoms)
    copied = any(isinstance(atom.size, Blocks) and atom.size.copied for atom in atoms)
    return pieces if len(x.dims[dim]) != 1 or several or copied else set()


@by_block
def local_mirror(call: LocalCall) -> Any:
    """Rows go to the rank as far from the end, and as many further as that one's part is longer. Of a zigzag, whose
    ranks have rows of both ends, few have to go."""
    x, dim, mesh = call.args["x"], call.args["dim"], call.graph.mesh
    type = type_of(x)
    axes = tuple(axis for atom in type.dims[dim] for axis in mesh.resolve(atom.axes))
    if not axes or has_both_ends(type.dims[dim][0], mesh):
        return call.with_args()
    (atom,) = type.dims[dim]
    if isinstance(atom.size, Blocks) and len(atom.size.parts) > 1:
        return _routed(call, x, 0, False, 0.0, mirror=True)
    if not atom.uneven(mesh):
        return MIRROR_ROWS, (x, list(axes), dim), {}
    every = with_rows(type, dim, atom.local(mesh), axes, mesh)
    turned = moved(call, x, MIRROR_ROWS, (x, list(axes), dim), every, axes)
    return _routed(call, turned, every.shape[dim] - int(atom.size), False, 0.0)


@rule(
    MIRROR,
    linear="joint",
    localize=local_mirror,
    unfit=unlike,
    examples=[((4, 6), 1), ((4, 6, 3), 0), ((6,), 0)],
)
def mirror(x: Dims, dim: int) -> str:
    return f"{x} -> {x}"
