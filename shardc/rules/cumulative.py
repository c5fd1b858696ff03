"""Prefix sums, products and extremes along a dim that ranks have parts of (`ir.ops.cumulative`): a total for each run
of rows that a rank has is gathered, and a rank's own rows begin with what the runs before them come to.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import fx

from shardc.ir.blocks import blocks_of
from shardc.ir.graph import info, set_info, type_of
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import all_gather
from shardc.ir.ops.cumulative import CUMULATIVE, CUMULATIVE_PART, CUMULATIVE_TOTALS, total_rows, wide
from shardc.ir.ops.cumulative_extremes import (
    CUMULATIVE_EXTREME,
    CUMULATIVE_EXTREME_PART,
    EXTREME_GRADIENT,
    EXTREME_GRADIENT_PART,
    EXTREME_SPILLS,
    EXTREME_TOTALS,
)
from shardc.ir.ops.extreme import EXTREME, EXTREME_OF_RUNS, RUN_EXTREMES
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.rules.halo import with_rows
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.projection import Projection
from shardc.rules.registry import by_block, example, rule
from shardc.rules.shift import cause_of, moved


class Totals(NamedTuple):
    """What has one row, or a few, for each run of a rank: how the call that makes it is told the layout, and types."""

    layout: tuple[Any, ...]
    types: tuple[TensorType, ...]


def totals_of(type: TensorType, dim: int, dtypes: tuple[torch.dtype, ...], mesh: Mesh, rows: int = 1) -> Totals:
    (atom,) = type.dims[dim]
    axes, blocks = tuple(mesh.resolve(atom.axes)), len(blocks_of(atom.size))
    types = tuple(with_rows(replace(type, dtype=dtype), dim, blocks * rows, axes, mesh) for dtype in dtypes)
    return Totals((str(atom.size), list(axes), blocks), types)


def whole(node: fx.Node, projection: Projection, split: Mapping[int, Axes], mesh: Mesh) -> set[int]:
    """A dim of several atoms: a rank's rows of it are no runs."""
    args = given(node)
    dim, x = args["dim"], type_of(args["x" if "x" in args else "g"])
    first = sum(map(len, x.dims[:dim]))
    pieces = projection.operands[0][first : first + len(x.dims[dim])]
    return {p for p in pieces if split.get(p)} if len(pieces) > 1 else set()


def _divided(call: LocalCall) -> bool:
    x = call.args["x" if "x" in call.args else "g"]
    return any(atom.axes for atom in type_of(x).dims[call.args["dim"]])


def _gathered(call: LocalCall, value: fx.Node, dim: int, axes: Axes) -> fx.Node:
    """A value with rows of each rank, of all ranks."""
    type, mesh = type_of(value), call.graph.mesh
    size = type.shape[dim]
    every = replace(type, dims=(*type.dims[:dim], (Atom(size),), *type.dims[dim + 1 :]))
    pos = sum(map(len, type.dims[:dim]))
    told = (list(axes), list(type.local_atoms(mesh)), pos, size, list(every.local_shape(mesh)))
    return moved(call, value, all_gather, (value, *told), every, axes)


def _pair(call: LocalCall, of: fx.Node, target: Any, args: tuple[Any, ...], totals: Totals) -> list[fx.Node]:
    """Two results for each run, gathered of all ranks."""
    graph, axes = call.graph, tuple(totals.layout[1])
    name, cause = f"{info(call.node).name}.totals", cause_of(call, of, axes)
    made = graph.call(target, args, like=call.node, type=None, results=totals.types, name=name, cause=cause)
    every: list[fx.Node] = []
    for i, type in enumerate(totals.types):
        value = graph.fx.call_function(operator.getitem, (made, i))
        set_info(value, graph.info_like(call.node, target, type, name, cause=cause))
        every.append(_gathered(call, value, call.args["dim"], axes))
    return every


# ------------------------------------------------------------------------------------------------ sums and products
@by_block
def local_cumulative(call: LocalCall) -> Any:
    x, dim, kind, reverse = (call.args[name] for name in ("x", "dim", "kind", "reverse"))
    if not _divided(call):
        return call.with_args()
    type = type_of(x)
    (source, axes, blocks), (each,) = totals_of(
        type, dim, (wide(type.dtype),), call.graph.mesh, total_rows(kind, type.dtype)
    )
    totals = moved(call, x, CUMULATIVE_TOTALS, (x, dim, kind, source, axes, blocks), each, tuple(axes))
    every = _gathered(call, totals, dim, tuple(axes))
    return CUMULATIVE_PART, (x, every, dim, kind, reverse, source, axes), {}


@rule(
    CUMULATIVE,
    localize=local_cumulative,
    unfit=whole,
    examples=[
        ((4, 6), 1, "sum", False),
        ((4, 6, 3), 1, "sum", True),
        ((6,), 0, "prod", False),
        ((4, 6, 3), 1, "prod", True),
        ((4, 7), 1, "logsumexp", False),
        ((6, 2), 0, "logsumexp", True),
    ],
)
def cumulative(x: Dims, dim: int, kind: str, reverse: bool) -> Notation:
    return Notation(f"{x} -> {x}", linear="joint" if kind == "sum" else ())


# ------------------------------------------------------------------------------------------------ extremes
@by_block
def local_extreme(call: LocalCall) -> Any:
    x, dim, largest = (call.args[name] for name in ("x", "dim", "largest"))
    if not _divided(call):
        return call.with_args()
    totals = totals_of(type_of(x), dim, (type_of(x).dtype, torch.int64), call.graph.mesh)
    every = _pair(call, x, EXTREME_TOTALS, (x, dim, largest, *totals.layout), totals)
    return CUMULATIVE_EXTREME_PART, (x, *every, dim, largest, *totals.layout[:2]), {}


@rule(
    CUMULATIVE_EXTREME,
    localize=local_extreme,
    unfit=whole,
    examples=[((4, 6), 1, True), ((4, 7, 3), 1, False), ((6,), 0, True), example((4, 9), 1, False, ints={"x": 3})],
)
def cumulative_extreme(x: Dims, dim: int, largest: bool) -> Notation:
    return Notation(f"{x} -> {x}, {x}")


@by_block
def local_extreme_gradient(call: LocalCall) -> Any:
    g, indices, dim = (call.args[name] for name in ("g", "indices", "dim"))
    if not _divided(call):
        return call.with_args()
    totals = totals_of(type_of(g), dim, (wide(type_of(g).dtype), torch.int64), call.graph.mesh)
    totals = totals._replace(types=(totals.types[0], replace(totals.types[1], partial=())))
    every = _pair(call, g, EXTREME_SPILLS, (g, indices, dim, *totals.layout), totals)
    return EXTREME_GRADIENT_PART, (g, indices, *every, dim, *totals.layout[:2]), {}


def _places(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randint(0, 3, shape).cummax(1).indices


@rule(
    EXTREME_GRADIENT,
    localize=local_extreme_gradient,
    unfit=whole,
    examples=[
        example((4, 6), (4, 6), 1, ints={"indices": lambda shape: _places((4, 6))}),
        example((4, 7, 3), (4, 7, 3), 1, ints={"indices": lambda shape: _places((4, 7, 3))}),
    ],
)
def extreme_gradient(g: Dims, indices: Dims, dim: int) -> Notation:
    return Notation(f"{g}, {g} -> {g}", linear=(0,))


# ------------------------------------------------------------------------------------------------ the greatest row
@by_block
def local_greatest(call: LocalCall) -> Any:
    x, dim, largest = (call.args[name] for name in ("x", "dim", "largest"))
    if not _divided(call):
        return call.with_args()
    totals = totals_of(type_of(x), dim, (type_of(x).dtype, torch.int64), call.graph.mesh)
    every = _pair(call, x, RUN_EXTREMES, (x, dim, largest, *totals.layout), totals)
    return EXTREME_OF_RUNS, (*every, dim, largest, *totals.layout[:2]), {}


@rule(
    EXTREME,
    localize=local_greatest,
    unfit=whole,
    examples=[((4, 6), 1, True), ((4, 7, 3), 1, False), example((4, 9), 1, False, ints={"x": 3})],
)
def extreme(x: Dims, dim: int, largest: bool) -> Notation:
    y = x.replace(dim, "1")
    return Notation(f"{x} -> {y}, {y}", max=x[dim], merged=(0, 1))
