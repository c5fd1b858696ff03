"""Experts that are modules, each with weights of its own, which a grouped product reads side by side.

    expert_mm(rows, cat([experts.0.up, experts.1.up, ...]), ends)

No dim of such a weight is that of the experts. An axis over dim 0 of `experts.*.up` splits the width of each expert,
and one over dim 0 of all their weights, as experts in one stacked parameter would lie, makes every product gather.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.ops.experts import EXPERT_MM

aten = torch.ops.aten
_JOINS = (aten.cat.default, aten.stack.default)
STACK = "stack the weights of all experts in one parameter [experts, ...], and put its dim 0 over the axis"


def weights_apart(product: fx.Node) -> list[fx.Node]:
    """The parameters that the weight of an `expert_mm` is joined of, one of each expert; none of a stacked one."""
    value = operands(product)[1]
    while value.op == "call_function" and value.target not in _JOINS and len(value.all_input_nodes) == 1:
        value = value.all_input_nodes[0]
    if value.target not in _JOINS:
        return []
    leaves: list[fx.Node] = []
    for leaf in operands(value):
        while leaf.op == "call_function" and len(leaf.all_input_nodes) == 1:
            leaf = leaf.all_input_nodes[0]
        leaves.append(leaf)
    return leaves if len(leaves) > 1 and all(leaf.op == "placeholder" for leaf in leaves) else []


def refused_axes(graph: Graph) -> Iterable[Diagnostic]:
    """A warning (SC231) for each axis that lies over dim 0 of all weights of such experts."""
    products = [node for node in graph.calls() if node.target is EXPERT_MM and info(node).phase == "fwd"]
    by_layer: dict[str, list[list[fx.Node]]] = {}
    for product in products:
        if leaves := weights_apart(product):
            by_layer.setdefault(info(product).fqn, []).append(leaves)
    said: set[str] = set()
    for of_layer in by_layer.values():
        leading = [{axis for atom in type_of(leaf).dims[0] for axis in atom.axes} for one in of_layer for leaf in one]
        for axis in sorted(set[str].intersection(*leading)) if len(of_layer) > 1 else ():
            if axis in said:
                continue
            said.add(axis)
            first = of_layer[0][0]
            yield Diagnostic(
                "SC231",
                f"axis '{axis}' lies over dim 0 of all weights of experts that are modules: it splits the width of each"
                " expert, not their number",
                "warning",
                tensor=info(first).name,
                hint=f"{STACK}; for the width, put it over dim 0 of the first weights, and dim 1 of the last",
            )
