"""A few rows of a sequence that a tensor names, or the greatest one: ranks that have them give them to all.

    x[:, index], gather, index_select           take_rows          max(x, 1), argmax(x, 1)    extreme
    their gradients: scatter_add, index_put     add_rows           its gradient, scatter      add_rows

Fewer than half of the rows: their sum over ranks is then less than all rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, results, set_info, type_of
from shardc.ir.ops.check_index import check_index
from shardc.ir.ops.extreme import EXTREME
from shardc.ir.ops.take import ADD_ROWS, TAKE_ROWS
from shardc.ir.schema import given
from shardc.ir.types import TensorType

aten = torch.ops.aten
EXTREMES: dict[Any, bool] = {
    aten.max.dim: True,
    aten.min.dim: False,
    aten.argmax.default: True,
    aten.argmin.default: False,
}
TAKEN = (aten.gather.default, aten.index_select.default, aten.index.Tensor)
ADDED = (aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.index_put.default, aten.index_add.default)
NAMED = (*EXTREMES, *TAKEN, *ADDED)
Along = Callable[[fx.Node, int], bool]


def write_named(graph: Graph, is_along: Along) -> None:
    """Of dims that are a whole sequence."""
    for node in list(graph.calls()):
        if node.target not in NAMED or any(t is not None and t.ragged for t in (info(node).type, *info(node).results)):
            continue
        with graph.fx.inserting_before(node):
            if node.target in EXTREMES:
                _write_extreme(graph, node, is_along)
            elif (named := _named(graph, node, is_along)) is not None:
                node.target, node.args, node.kwargs = *named, {}


def _named(graph: Graph, node: fx.Node, is_along: Along) -> tuple[Any, tuple[Any, ...]] | None:
    """The op and the arguments that a call stands for, where it names few rows."""
    args = given(node)
    added, x = node.target in ADDED, args["self"]
    if added and (x.target is not aten.full.default or x.args[1] != 0):
        return None
    whole = type_of(node if added else x)
    if "indices" in args:
        indices = list(args["indices"])
        dim, index = len(indices) - 1, indices[-1]
        if (
            any(i is not None for i in indices[:-1])
            or type_of(index).ndim != 1
            or (added and not args.get("accumulate", False))
        ):
            return None
    else:
        dim, index = args["dim"] % max(1, whole.ndim), args["index"]
    if not is_along(node if added else x, dim) or type_of(index).dtype not in (torch.int32, torch.int64):
        return None
    of_rows = node.target in (aten.index_select.default, aten.index_add.default) or "indices" in args
    if type_of(index).ndim != (1 if of_rows else whole.ndim) or args.get("alpha", 1) != 1:
        return None
    count = type_of(index).shape[0 if of_rows else dim]
    if not 0 < 2 * count < whole.shape[dim] or (node.target in (aten.scatter.src, aten.scatter.value) and count > 1):
        return None
    source: Any = args.get("src", args.get("source", args.get("values")))
    part = (*whole.shape[:dim], count, *whole.shape[dim + 1 :])
    if not of_rows and type_of(index).shape != part:
        return None
    if node.target is aten.scatter.value:
        type = replace(type_of(index), dtype=whole.dtype)
        told = (list(part), bool(args["value"]) if whole.dtype == torch.bool else args["value"])
        source = graph.call(aten.full.default, told, {"dtype": whole.dtype}, like=node, type=type, constant=True)
    if added and (type_of(source).shape != part or type_of(source).dtype != whole.dtype):
        return None
    index = _rows(graph, node, index, dim, whole) if of_rows else _narrow(index, dim)
    index = _checked(graph, node, index, whole.shape[dim], counted_back="indices" in args)
    return (ADD_ROWS, (source, dim, index, whole.shape[dim])) if added else (TAKE_ROWS, (x, dim, index))


def _rows(graph: Graph, node: fx.Node, index: fx.Node, dim: int, whole: TensorType) -> fx.Node:
    """The numbers of rows, which are for all other dims, as a tensor of as many dims."""
    type = type_of(index)
    dims = (*((),) * dim, type.dims[0], *((),) * (whole.ndim - dim - 1))
    shape = [*[1] * dim, type.shape[0], *[1] * (whole.ndim - dim - 1)]
    constant = info(index).constant
    return graph.call(aten.view.default, (index, shape), like=node, type=replace(type, dims=dims), constant=constant)


def _narrow(index: fx.Node, dim: int) -> fx.Node:
    """An index before it was repeated along other dims."""
    if index.target is aten.expand.default:
        before = given(index)["self"]
        if type_of(before).ndim == type_of(index).ndim and type_of(before).shape[dim] == type_of(index).shape[dim]:
            return before
    return index


def _checked(graph: Graph, node: fx.Node, index: fx.Node, size: int, counted_back: bool) -> fx.Node:
    """Numbers of rows in 64 bits, from the front, of which each is one of a row; in backward this is known."""

    def call(target: Any, *args: Any, dtype: torch.dtype = torch.int64) -> fx.Node:
        kwargs = {"dtype": dtype} if target is aten._to_copy.default else {}
        type = replace(type_of(index), dtype=dtype)
        return graph.call(target, args, kwargs, like=node, type=type, constant=constant)

    constant = info(index).constant
    if type_of(index).dtype != torch.int64:
        index = call(aten._to_copy.default, index)
    if counted_back:
        behind = call(aten.lt.Scalar, index, 0, dtype=torch.bool)
        index = call(aten.where.self, behind, call(aten.add.Tensor, index, size), index)
    if info(node).phase == "fwd" and index.target is not check_index:
        index = call(check_index, index, size)
    return index


# ------------------------------------------------------------------------------------------------ the greatest row
def _write_extreme(graph: Graph, node: fx.Node, is_along: Along) -> None:
    args = given(node)
    x = args["self"]
    if args.get("dim") is None or not type_of(x).ndim:
        return
    dim = args["dim"] % type_of(x).ndim
    if not is_along(x, dim):
        return
    one = replace(type_of(x), dims=(*type_of(x).dims[:dim], (), *type_of(x).dims[dim + 1 :]))
    types = (one, replace(one, dtype=torch.int64))
    both = node.target in (aten.max.dim, aten.min.dim)
    wanted: Sequence[fx.Node | None] = results(node) if both else (None, node)
    name = info(node).name
    made = graph.call(EXTREME, (x, dim, EXTREMES[node.target]), like=node, type=None, results=types, name=name)
    for i, (value, type) in enumerate(zip(wanted, types, strict=True)):
        if value is None:
            continue
        found = graph.fx.call_function(operator.getitem, (made, i))
        set_info(found, graph.info_like(node, EXTREME, type, f"{name}.{i}", results=()))
        if not args.get("keepdim", False):
            found = graph.call(aten.squeeze.dim, (found, dim), like=node, type=type_of(value), results=())
        graph.replace_value(value, found)
