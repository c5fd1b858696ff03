"""Softmax in kernels, with its statistics in the graph, so that forward need not keep the result for backward.

    forward    p = softmax(scale * s + mask);  y = dropout(p)       stores p and y
    backward   ds = p * (g - sum(g * p)) * scale                    reads g and p

    p, top, total = softmax_parts(scale * s + mask)                 stores y, and two numbers a row
    p = exp(scale * s + mask - top) / total                         rematerialised from s, which a product stored

`rematerialize` decides which of both moves fewer bytes: `p` may be float32 where s is bfloat16, or be read anyway.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

from shardc.ir.graph import Graph, info, op_name, set_info, type_of
from shardc.ir.ops.softmax import SOFTMAX_PARTS
from shardc.ir.types import TensorType
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten
SOFTMAX = aten._softmax.default
NARROW = (torch.bfloat16, torch.float16, torch.float32)  # kernels reduce in float32


def split_softmaxes(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Let each softmax of rows return its maxima and sums too, in place. Unused ones are removed later."""
    for node in graph.calls_of(SOFTMAX):
        x, dim, _ = node.args
        about, type = info(node), type_of(node)
        shape = type.local_shape(graph.mesh)
        if not shape or op_name(node.target) in exclude or about.name in exclude:
            continue
        dim %= len(shape)  # type: ignore[operator]
        if type.dtype not in NARROW or type_of(x).dtype not in NARROW or math.prod(shape[dim + 1 :]) != 1:  # type: ignore[arg-type]
            continue
        dims = tuple(() if d == dim else atoms for d, atoms in enumerate(type.dims))
        rows = TensorType(torch.float32, dims, ragged=type.ragged, room=type.room)
        with graph.fx.inserting_before(node):
            call = graph.call(
                SOFTMAX_PARTS, (x, dim, type.dtype), like=node, type=None, results=(type, rows, rows), name=about.name
            )
            for index, (name, item_type) in enumerate(((about.name, type), ("top", rows), ("total", rows))):
                item = graph.fx.call_function(operator.getitem, (call, index))
                unique = name if index == 0 else graph.unique(f"{about.name}.{name}")
                set_info(item, replace(about, name=unique, type=item_type))
                if index == 0:
                    node.replace_all_uses_with(item)
                    for table in (graph.activations, graph.gradients):
                        table.update({key: item for key, value in table.items() if value is node})
        graph.fx.erase_node(node)


def restore_softmaxes(graph: Graph) -> None:
    """Restore the softmaxes that were not fused and whose statistics nobody reads."""
    for node in graph.calls_of(SOFTMAX_PARTS):
        items = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
        if items.keys() == {0}:
            x, dim, dtype = node.args
            wider = dtype != type_of(x).dtype  # type: ignore[arg-type]
            with graph.fx.inserting_before(node):
                whole = graph.fx.call_function(SOFTMAX, (x, dim, wider))
            set_info(whole, info(items[0]))
            items[0].replace_all_uses_with(whole)
            for table in (graph.activations, graph.gradients):
                table.update({key: whole for key, value in table.items() if value is items[0]})
            graph.fx.erase_node(items[0])
            graph.fx.erase_node(node)


def _inner_dim(m: LoweringBuilder, x: Operand, dim: int) -> list[int] | None:
    """The dims of x with `dim` last; None if it already is the last of more than one element."""
    shape = m.shape_of(x)
    dim %= max(1, len(shape))
    return None if math.prod(shape[dim + 1 :]) == 1 else [*(d for d in range(len(shape)) if d != dim), dim]


def _row_statistics(m: LoweringBuilder, x: Operand, dim: int) -> tuple[tuple[int, ...], int]:
    """The shape of the rows' statistics, and the number of columns."""
    shape = m.shape_of(x)
    dim %= max(1, len(shape))
    if not shape or shape[dim] == 1 or math.prod(shape[dim + 1 :]) != 1:
        raise NotLowerable
    return (*shape[:dim], *[1] * (len(shape) - dim)), shape[dim]


@lower(SOFTMAX_PARTS)
def softmax_parts(
    m: LoweringBuilder, x: Operand, dim: int, dtype: torch.dtype
) -> tuple[Temporary, Temporary, Temporary]:
    return _softmax(m, x, dim)


def _softmax(m: LoweringBuilder, x: Operand, dim: int) -> tuple[Temporary, Temporary, Temporary]:
    """The softmax, its maxima and its sums."""
    rows, cols = _row_statistics(m, x, dim)
    m.shape = m.shape_of(x)
    top = m.reduce("rmax", x, "row", rows, cols)
    exp = m("exp", m.sub(x, top))
    total = m.reduce("rsum", exp, "row", rows, cols)
    return m.div(exp, total), top, total


def _along_inner_dim(
    m: LoweringBuilder, order: list[int], of_rows: Callable[..., Temporary], *operands: Operand
) -> Temporary:
    """Apply a function of rows along an inner dim: operands are read with that dim last, and the result is stored in
    its own order."""
    shape = m.shape
    m.shape = tuple(shape[d] for d in order)
    y = of_rows(m, *[m("same", m.permuted(x, order)) for x in operands], -1)
    m.shape = shape
    return m.store_permuted(y, order)


@lower(SOFTMAX)
def softmax(m: LoweringBuilder, x: Operand, dim: int, half_to_float: bool) -> Operand:
    """Along an inner dim. Along the last one, `split_softmaxes` has replaced it."""
    order = _inner_dim(m, x, dim)
    if order is None:
        raise NotLowerable
    return _along_inner_dim(m, order, lambda *args: _softmax(*args)[0], x)


@lower(aten._safe_softmax.default)
def safe_softmax(m: LoweringBuilder, x: Operand, dim: int, dtype: torch.dtype | None = None) -> Operand:
    """Zeros where all of a row is -inf."""
    if m.dtype_of(x) not in NARROW:
        raise NotLowerable

    def of_rows(m: LoweringBuilder, x: Operand, dim: int) -> Temporary:
        y, top, _ = _softmax(m, x, dim)
        return m("where", m("eq", top, float("-inf"), shape=m.shapes[top], dtype=torch.bool), 0.0, y)

    order = _inner_dim(m, x, dim)
    return of_rows(m, x, dim) if order is None else _along_inner_dim(m, order, of_rows, x)


@lower(aten._softmax_backward_data.default)
def softmax_backward(m: LoweringBuilder, g: Operand, y: Operand, dim: int, dtype: torch.dtype) -> Operand:
    def of_rows(m: LoweringBuilder, g: Operand, y: Operand, dim: int) -> Temporary:
        rows, cols = _row_statistics(m, y, dim)
        return m.mul(y, m.sub(g, m.reduce("rsum", m.mul(g, y), "row", rows, cols)))

    order = _inner_dim(m, y, dim)
    return of_rows(m, g, y, dim) if order is None else _along_inner_dim(m, order, of_rows, g, y)
