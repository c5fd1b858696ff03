"""What runs beside each collective of a graph: the products between where it begins and where it is waited for.

    begin  %dx.sum = all_reduce(%dx, tp)
    run    %dw = linear_wgrad(%g, %x)            beside it
    wait   %dx.sum

A collective without any is exposed: compute stands still until it has ended. How long others cover, a prediction says.
One that is decomposed (`ir.ops.decomposed`) has its own product beside it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from shardc.cost.flops import PRODUCTS
from shardc.cost.streams import steps_of
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, Phase, info, op_name
from shardc.ir.ops.decomposed import DECOMPOSED


class Beside(NamedTuple):
    node: fx.Node
    kind: str
    phase: Phase
    products: tuple[fx.Node, ...]


def beside(graph: Graph) -> list[Beside]:
    """A row for each collective of a localized graph, in the order in which they are waited for."""
    steps = steps_of(graph)
    under_way: dict[fx.Node, list[fx.Node]] = {}
    rows: list[Beside] = []
    for action in (*steps.before, *steps.repeated, *steps.once):
        node = steps.calls[action.at]
        sent = collective(graph, node)
        if action.kind == "begin":
            under_way[node] = []
        elif sent is not None and action.kind in ("run", "wait"):
            own = (node,) if node.target in DECOMPOSED else ()
            rows.append(Beside(node, sent.kind, info(node).phase, tuple(under_way.pop(node, own))))
        elif action.kind == "run" and op_name(node.target) in PRODUCTS:
            for products in under_way.values():
                products.append(node)
    return rows
