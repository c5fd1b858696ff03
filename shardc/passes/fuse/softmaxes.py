"""Softmax in kernels, and its statistics in the graph, so that backward need not keep what forward gave.

    forward    p = softmax(scale * s + mask);  y = dropout(p)       stores p and y
    backward   ds = p * (g - sum(g * p)) * scale                    reads g and p

    p, top, total = softmax_parts(scale * s + mask)                 stores y, and two numbers a row
    p = exp(scale * s + mask - top) / total                         made again from s, which a product left in memory

Which of both is less to move is `again`'s decision: `p` may be in float32 where s is in bfloat16, or be read anyway.
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
from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16, torch.float32)  # kernels reduce in float32


def with_statistics(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Let each softmax of rows yield its maxima and sums too, in place; whoever has no use for them drops them."""
    for node in [node for node in graph.calls() if node.target is aten._softmax.default]:
        x, dim, _ = node.args
        about, type = info(node), type_of(node)
        shape = type.local_shape(graph.mesh)
        if not shape or op_name(node.target) in exclude or about.name in exclude:
            continue
        dim %= len(shape)  # type: ignore[operator]
        if type.dtype not in NARROW or type_of(x).dtype not in NARROW or math.prod(shape[dim + 1 :]) != 1:  # type: ignore[arg-type]
            continue
        rows = TensorType(torch.float32, tuple(() if d == dim else own for d, own in enumerate(type.dims)))
        with graph.fx.inserting_before(node):
            call = graph.call(
                SOFTMAX_PARTS, (x, dim, type.dtype), like=node, type=None, results=(type, rows, rows), name=about.name
            )
            for at, (name, own) in enumerate(((about.name, type), ("top", rows), ("total", rows))):
                item = graph.fx.call_function(operator.getitem, (call, at))
                named = name if at == 0 else graph.unique(f"{about.name}.{name}")
                set_info(item, replace(about, name=named, type=own))
                if at == 0:
                    node.replace_all_uses_with(item)
                    for table in (graph.activations, graph.gradients):
                        table.update({key: item for key, value in table.items() if value is node})
        graph.fx.erase_node(node)


def without_statistics(graph: Graph) -> None:
    """Where nobody read them, and no kernel was made of it: a softmax as it was."""
    for node in [node for node in graph.calls() if node.target is SOFTMAX_PARTS]:
        items = {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]
        if items.keys() == {0}:
            x, dim, dtype = node.args
            wider = dtype != type_of(x).dtype  # type: ignore[arg-type]
            with graph.fx.inserting_before(node):
                whole = graph.fx.call_function(aten._softmax.default, (x, dim, wider))
            set_info(whole, info(items[0]))
            items[0].replace_all_uses_with(whole)
            for table in (graph.activations, graph.gradients):
                table.update({key: whole for key, value in table.items() if value is items[0]})
            graph.fx.erase_node(items[0])
            graph.fx.erase_node(node)


def _inner_dim(m: Make, x: Operand, dim: int) -> list[int] | None:
    """The dims of x with `dim` last; None where it is last among those of more than one element."""
    shape = m.shape_of(x)
    dim %= max(1, len(shape))
    return None if math.prod(shape[dim + 1 :]) == 1 else [*(d for d in range(len(shape)) if d != dim), dim]


def _columns(m: Make, x: Operand, dim: int) -> tuple[tuple[int, ...], int]:
    """The shape of a row's statistics, and how long rows are."""
    shape = m.shape_of(x)
    dim %= max(1, len(shape))
    if not shape or shape[dim] == 1 or math.prod(shape[dim + 1 :]) != 1:
        raise Unfit
    return (*shape[:dim], *[1] * (len(shape) - dim)), shape[dim]


@lower(SOFTMAX_PARTS)
def softmax_parts(m: Make, x: Operand, dim: int, dtype: torch.dtype) -> tuple[Inner, Inner, Inner]:
    return _softmax(m, x, dim)


def _softmax(m: Make, x: Operand, dim: int) -> tuple[Inner, Inner, Inner]:
    """The softmax, its maxima and sums."""
    rows, cols = _columns(m, x, dim)
    m.shape = m.shape_of(x)
    top = m.reduce("rmax", x, "row", rows, cols)
    exp = m("exp", m.sub(x, top))
    total = m.reduce("rsum", exp, "row", rows, cols)
    return m.div(exp, total), top, total


def _turned(m: Make, order: list[int], made: Callable[..., Inner], *given: Operand) -> Inner:
    """What is made of rows along an inner dim: read with that dim last, stored where the result has it."""
    shape = m.shape
    m.shape = tuple(shape[d] for d in order)
    y = made(m, *[m("same", m.ordered(x, order)) for x in given], -1)
    m.shape = shape
    return m.placed(y, order)


@lower(aten._softmax.default)
def softmax(m: Make, x: Operand, dim: int, half_to_float: bool) -> Operand:
    """Along an inner dim; of rows, `with_statistics` has made another op."""
    order = _inner_dim(m, x, dim)
    if order is None:
        raise Unfit
    return _turned(m, order, lambda *args: _softmax(*args)[0], x)


@lower(aten._safe_softmax.default)
def safe_softmax(m: Make, x: Operand, dim: int, dtype: torch.dtype | None = None) -> Operand:
    """Zeros where a row is -inf throughout."""
    if m.dtype_of(x) not in NARROW:
        raise Unfit

    def made(m: Make, x: Operand, dim: int) -> Inner:
        y, top, _ = _softmax(m, x, dim)
        return m("where", m("eq", top, float("-inf"), shape=m.shapes[top], dtype=torch.bool), 0.0, y)

    order = _inner_dim(m, x, dim)
    return made(m, x, dim) if order is None else _turned(m, order, made, x)


@lower(aten._softmax_backward_data.default)
def softmax_backward(m: Make, g: Operand, y: Operand, dim: int, dtype: torch.dtype) -> Operand:
    def made(m: Make, g: Operand, y: Operand, dim: int) -> Inner:
        rows, cols = _columns(m, y, dim)
        return m.mul(y, m.sub(g, m.reduce("rsum", m.mul(g, y), "row", rows, cols)))

    order = _inner_dim(m, y, dim)
    return made(m, g, y, dim) if order is None else _turned(m, order, made, g, y)
