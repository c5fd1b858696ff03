"""accumulate: sum what a step's microbatches have each of before it is read: the loss, the gradients, the loads of
experts, and the counts of largest elements.

Needs: a normalised joint graph of one microbatch, whose loss was divided by their number when it was traced. Ensures:
an `accumulate` stands between each gradient, and the loss, and all that reads it; so does the graph's `microbatches`.

    %d.w = linear_wgrad(...)          %d.w = linear_wgrad(...)
    return grad "w" = %d.w            %d.w.sum = shardc.accumulate(%d.w)
                                      return grad "w" = %d.w.sum

The terms are summed at float32 at the least, whatever dtype backward makes them in. It is settle_partials that then
leaves a sum pending until it is accumulated: before, it would be reduced once a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, Port, info, type_of
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.scaled import COUNTS
from shardc.passes.base import Pass
from shardc.passes.normalize.decompositions.table import HALF
from shardc.passes.normalize.limit_experts import OF_LAYER

aten = torch.ops.aten


@dataclass(frozen=True)
class Accumulate(Pass):
    """Make a graph of one microbatch that of a step of `microbatches`; see `accumulate` for `always`."""

    microbatches: int = 1
    always: bool = False

    def run(self, graph: Graph) -> Graph:
        return accumulate(graph, self.microbatches, always=self.always)


def accumulate(graph: Graph, microbatches: int, *, always: bool = False) -> Graph:
    """Make a graph of one microbatch that of a step of several. One stays as it is, but for a step that is to be cut
    into stages, for which its sums are made explicit `always`."""
    if microbatches == 1 and not always:
        return graph
    graph.microbatches = microbatches
    sums: dict[fx.Node, fx.Node] = {}
    with graph.fx.inserting_before(graph.output_node):
        for port, value in zip(graph.outputs, graph.output_values, strict=True):
            if _is_summed(port) and value not in sums:
                sums[value] = _summed(graph, value)
        outputs = zip(graph.outputs, graph.output_values, strict=True)
        graph.output_node.args = (tuple(sums[v] if _is_summed(port) else v for port, v in outputs),)
    return graph


def _is_summed(port: Port) -> bool:
    return port.role in ("loss", "grad") or port.name.startswith((OF_LAYER, COUNTS))


def _summed(graph: Graph, value: fx.Node) -> fx.Node:
    type, name = type_of(value), info(value).name
    terms = value
    if type.dtype in HALF:
        terms = _cast(graph, value, f"{name}.wide", torch.float32)
    total = graph.call(ACCUMULATE, (terms,), like=value, type=type_of(terms), name=f"{name}.sum")
    return _cast(graph, total, f"{name}.mean", type.dtype) if type.dtype in HALF else total


def _cast(graph: Graph, value: fx.Node, name: str, dtype: torch.dtype) -> fx.Node:
    type = type_of(value).with_dtype(dtype)
    return graph.call(aten._to_copy.default, (value,), {"dtype": dtype}, like=value, type=type, name=name)
