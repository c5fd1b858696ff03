"""Indexing by numbers that are known while compiling, and the gradient of picking rows.

    index(x, [arange(n)[:, None], arange(m)])            x: how attention masks are built, element by element
    index_put(zeros, [rows], values, accumulate=True)    embedding_dense_backward, whose shards add up
    index(x, [arange(n), last])                          gather along dim 1: one position of each sample
    index_put(zeros, [arange(n), last], values, True)    scatter_add, its gradient
    index(x, [arange(2 * n) // 2])                       expand: each row twice, as interpolation to the nearest has it

Left as they are, all would need their operand whole, and a batch sharded over ranks would be gathered for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import info
from shardc.ir.ops.check_index import check_index
from shardc.passes.normalize.decompositions.table import KEEP, Emit, Node, Result, aten, decompose, dtype_of, shape_of

KNOWN_ELEMENTS = 2**20  # larger constants are not worth computing here


@decompose(aten.index.Tensor, sometimes=True)
def index(e: Emit, x: Node, indices: Sequence[Node | None]) -> Result:
    shape = shape_of(x)
    grid = _grid(e, shape, indices)
    if grid is not None:
        return e.view(x, [*grid, *shape[len(indices) :]])
    if (times := _repeats(e, shape, indices)) is not None:
        apart = [n for d, size in enumerate(shape) for n in (size, *([1] if times[d] else []))]
        wide = [n for d, size in enumerate(shape) for n in (size, *([times[d]] if times[d] else []))]
        return e.view(e.expand(e.view(x, apart), wide), [size * max(times[d], 1) for d, size in enumerate(shape)])
    picked = _picked(e, shape, indices)
    if picked is None:
        return KEEP
    dim, rest = len(indices) - 1, shape[len(indices) :]
    return e.view(e(aten.gather.default, x, dim, picked), [*shape[:dim], *rest])


@decompose(aten.index_put.default, sometimes=True)
def index_put(e: Emit, x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool = False) -> Result:
    if not accumulate or x.target is not aten.full.default or x.args[1] != 0 or not shape_of(x):
        return KEEP
    shape, places = shape_of(x), [i for i in indices if i is not None]
    if any(dtype_of(i) == torch.bool for i in places) or dtype_of(values) != dtype_of(x):
        return KEEP
    if (times := _repeats(e, shape, indices)) is not None:
        wide = [n for d, size in enumerate(shape) for n in (size, *([times[d]] if times[d] else []))]
        if math.prod(shape_of(values)) != math.prod(wide):
            return KEEP  # values that are broadcast
        copies = [d + 1 + sum(bool(n) for n in times[:d]) for d, n in enumerate(times) if n]
        return e.sum(e.view(values, wide), copies)
    picked = torch.broadcast_shapes(*map(shape_of, places))
    if shape_of(values) != (*picked, *shape[len(indices) :]):
        return KEEP  # values that are broadcast, or indices that stand apart
    if _grid(e, shape, indices) is not None:
        return e.view(values, shape)
    if not dtype_of(x).is_floating_point:
        return KEEP
    each = _picked(e, shape, indices)
    if each is not None:
        return e(aten.scatter_add.default, x, len(indices) - 1, each, e.view(values, shape_of(each)))
    if len(indices) != 1:
        return KEEP
    rows = _from_front(e, places[0], shape[0])
    if info(e.at).phase == "fwd":  # in backward they are those of the lookup, which has refused what is no row
        rows = e(check_index, rows, shape[0])
    flat = e.view(values, [*picked, math.prod(shape[1:])])
    return e.view(e(aten.embedding_dense_backward.default, flat, rows, shape[0], -1, False), shape)


@decompose(aten._unsafe_index.Tensor)
def unsafe_index(e: Emit, x: Node, indices: Sequence[Node | None]) -> Result:
    result = index(e, x, indices)
    return e(aten.index.Tensor, x, list(indices)) if result == KEEP else result


@decompose(aten._unsafe_index_put.default)
def unsafe_index_put(e: Emit, x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool) -> Result:
    result = index_put(e, x, indices, values, accumulate)
    return e(aten.index_put.default, x, list(indices), values, accumulate) if result == KEEP else result


def _repeats(e: Emit, shape: Sequence[int], indices: Sequence[Node | None]) -> list[int] | None:
    """How many times each element of a dim is read, one after the other, as by interpolation to the nearest; 0 of a dim
    that is not indexed. None for other indices."""
    dims = [d for d, i in enumerate(indices) if i is not None]
    if dims != list(range(dims[0], dims[0] + len(dims))):
        return None
    times = [0] * len(shape)
    for place, d in enumerate(dims):
        i = indices[d]
        assert i is not None
        value = None if dtype_of(i) == torch.bool or not shape[d] else _constant_value(e, i)
        along = [k for k, n in enumerate(value.shape) if n != 1] if value is not None else []
        if value is None or len(along) > 1 or value.numel() % shape[d] or not value.numel():
            return None
        if along and value.ndim - along[0] != len(dims) - place:
            return None  # it lies along another dim of the result
        times[d] = value.numel() // shape[d]
        if not torch.equal(value.flatten(), torch.arange(value.numel(), dtype=value.dtype) // times[d]):
            return None
    ndim = max(len(shape_of(i)) for i in indices if i is not None)
    return times if ndim == len(dims) and max(times) > 1 else None


def _picked(e: Emit, shape: Sequence[int], indices: Sequence[Node | None]) -> Node | None:
    """The index of a gather, where the indices name one position in the last dim indexed for each element of the dims
    before it: all but the last count through these dims."""
    *counting, position = indices
    dim, rest = len(counting), shape[len(indices) :]
    if not counting or position is None or dtype_of(position) not in (torch.int32, torch.int64):
        return None
    if shape_of(position) != tuple(shape[:dim]) or _grid(e, shape, counting) != tuple(shape[:dim]):
        return None
    position = _from_front(e, e.cast(position, torch.int64), shape[dim])
    if info(e.at).phase == "fwd":
        position = e(check_index, position, shape[dim])
    return e.expand(e.view(position, [*shape[:dim], 1, *(1 for _ in rest)]), [*shape[:dim], 1, *rest])


def _from_front(e: Emit, rows: Node, count: int) -> Node:
    """Row numbers with those counted from the back, as indexing allows, counted from the front."""
    constant_rows = _constant_value(e, rows)
    if constant_rows is not None and (not constant_rows.numel() or int(constant_rows.min()) >= 0):
        return rows
    return e.where(e(aten.lt.Scalar, rows, 0), e.add(rows, count), rows)


def _grid(e: Emit, shape: Sequence[int], indices: Sequence[Node | None]) -> tuple[int, ...] | None:
    """The shape that the indices broadcast to, if together they count through the leading dims in order, each once."""
    index_values: list[torch.Tensor] = []
    for i in indices:
        constant = None if i is None or dtype_of(i) == torch.bool else _constant_value(e, i)
        if constant is None:
            return None
        index_values.append(constant)
    grid = torch.broadcast_shapes(*(i.shape for i in index_values))
    last = -1
    for size, i in zip(shape, index_values, strict=False):
        if i.numel() != size or not torch.equal(i.flatten(), torch.arange(size, dtype=i.dtype)):
            return None
        along = [len(grid) - i.ndim + d for d, n in enumerate(i.shape) if n != 1]
        if len(along) > 1 or (along and along[0] <= last):
            return None
        last = along[0] if along else last
    return tuple(grid)


def _constant_value(e: Emit, node: Node) -> torch.Tensor | None:
    """The value of a constant; None of one that is not known, or is several results."""
    if not info(node).constant or info(node).type is None or math.prod(shape_of(node)) > KNOWN_ELEMENTS:
        return None

    def compute() -> torch.Tensor | None:
        values: dict[Node, torch.Tensor] = {}
        for source in node.all_input_nodes:
            operand_value = _constant_value(e, source)
            if operand_value is None:
                return None
            values[source] = operand_value

        def value(source: Node) -> Any:
            return values[source]

        target: Any = node.target
        return target(*fx.map_arg(tuple(node.args), value), **fx.map_arg(dict(node.kwargs), value))

    return e.once(("known", node), compute)
