"""Prefix sums, products and extremes along a sequence as ops of which ranks can take part by part.

cumsum, cumprod, logcumsumexp    cumulative          cummax, cummin         cumulative_extreme
flip(cumsum(flip(x)))            the other way       scatter_add of zeros by where those point
flip(x, [1])                     mirror                                     extreme_gradient
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, producer, type_of
from shardc.ir.ops.cumulative import CUMULATIVE
from shardc.ir.ops.cumulative_extremes import CUMULATIVE_EXTREME, EXTREME_GRADIENT
from shardc.ir.ops.mirror import MIRROR
from shardc.ir.schema import given

aten = torch.ops.aten
KINDS: dict[Any, str] = {
    aten.cumsum.default: "sum",
    aten.cumprod.default: "prod",
    aten.logcumsumexp.default: "logsumexp",
}
LARGEST: dict[Any, bool] = {aten.cummax.default: True, aten.cummin.default: False}
PREFIXES = (*KINDS, *LARGEST, CUMULATIVE, CUMULATIVE_EXTREME, EXTREME_GRADIENT, aten.flip.default)
Along = Callable[[fx.Node, int], bool]


def unify_prefixes(graph: Graph) -> None:
    """Casts come first, and flip(cumsum(flip(x))), as in gradients, is a sum that runs the other way."""
    for node in list(graph.calls()):
        if node.target in KINDS and type_of(given(node)["self"]).dtype != type_of(node).dtype:
            x, dtype = given(node)["self"], type_of(node).dtype
            with graph.fx.inserting_before(node):
                type = replace(type_of(x), dtype=dtype)
                cast = graph.call(aten._to_copy.default, (x,), {"dtype": dtype}, like=node, type=type)
            node.args, node.kwargs = (cast, given(node)["dim"]), {}
        if node.target is not aten.flip.default:
            continue
        summed, dims = given(node)["self"], list(given(node)["dims"])
        if summed.target not in (*KINDS, CUMULATIVE) or len(summed.users) != 1 or len(dims) != 1:
            continue
        of = given(summed)
        turned, ndim = of["x" if summed.target is CUMULATIVE else "self"], type_of(node).ndim
        if turned.target is not aten.flip.default or type_of(turned).dtype != type_of(node).dtype:
            continue
        along = {d % ndim for d in (*dims, *given(turned)["dims"], of["dim"])}
        if len(given(turned)["dims"]) == 1 and len(along) == 1:
            kind = of["kind"] if summed.target is CUMULATIVE else KINDS[summed.target]
            node.args = (given(turned)["self"], *along, kind, not of.get("reverse", False))
            node.target, node.kwargs = CUMULATIVE, {}
    graph.erase_dead()


def write_prefixes(graph: Graph, is_along: Along) -> None:
    """Of dims that are a sequence."""
    for node in list(graph.calls()):
        if node.target is aten.scatter_add.default:
            _write_gradient(node, is_along)
    for node in list(graph.calls()):
        args, target = given(node), node.target
        if target is aten.flip.default:
            x, dims = args["self"], args["dims"]
            if len(dims) == 1 and not type_of(node).ragged and is_along(x, dims[0] % type_of(x).ndim):
                node.target, node.args, node.kwargs = MIRROR, (x, dims[0] % type_of(x).ndim), {}
        elif target in KINDS or target in LARGEST:
            x = args["self"]
            dim = args["dim"] % max(1, type_of(x).ndim)
            if not type_of(x).ndim or type_of(x).ragged or not is_along(x, dim):
                continue
            if target in LARGEST:
                node.target, node.args = CUMULATIVE_EXTREME, (x, dim, LARGEST[target])
            elif type_of(x).dtype == type_of(node).dtype:
                node.target, node.args = CUMULATIVE, (x, dim, KINDS[target], False)
            else:
                continue
            node.kwargs = {}


def _write_gradient(node: fx.Node, is_along: Along) -> None:
    """Gradients that go where the indices of a running extreme point."""
    args = given(node)
    zeros, index, g = (args[name] for name in ("self", "index", "src"))
    made, place = producer(index)
    if made.target not in LARGEST or place != 1 or zeros.target is not aten.full.default or zeros.args[1] != 0:
        return
    ndim = type_of(node).ndim
    dim, along = args["dim"] % max(1, ndim), given(made)["dim"] % max(1, ndim)
    same = type_of(g).shape == type_of(node).shape == type_of(index).shape and type_of(g).dtype == type_of(node).dtype
    if dim == along and same and is_along(g, dim):
        node.target, node.args, node.kwargs = EXTREME_GRADIENT, (g, index, dim), {}
