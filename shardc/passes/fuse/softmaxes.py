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
from collections.abc import Collection
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


def _columns(m: Make, x: Operand, dim: int) -> tuple[tuple[int, ...], int]:
    """The shape of a row's statistics, and how long rows are."""
    shape = m.shape_of(x)
    dim %= max(1, len(shape))
    if not shape or shape[dim] == 1 or math.prod(shape[dim + 1 :]) != 1:
        raise Unfit
    return (*shape[:dim], *[1] * (len(shape) - dim)), shape[dim]


@lower(SOFTMAX_PARTS)
def softmax_parts(m: Make, x: Operand, dim: int, dtype: torch.dtype) -> tuple[Inner, Inner, Inner]:
    rows, cols = _columns(m, x, dim)
    m.shape = m.shape_of(x)
    top = m.reduce("rmax", x, "row", rows, cols)
    exp = m("exp", m.sub(x, top))
    total = m.reduce("rsum", exp, "row", rows, cols)
    return m.div(exp, total), top, total


@lower(aten._softmax_backward_data.default)
def softmax_backward(m: Make, g: Operand, y: Operand, dim: int, dtype: torch.dtype) -> Operand:
    rows, cols = _columns(m, y, dim)
    return m.mul(y, m.sub(g, m.reduce("rsum", m.mul(g, y), "row", rows, cols)))
