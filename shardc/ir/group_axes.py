"""The axes along which a graph's process groups lie.

Collectives along the same axes share a group and run one after another. Sums of gradients, which nothing reads before
the optimizer, have a second group where other collectives run meanwhile.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import fx

from shardc.ir.graph import Graph
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.overlap_schedule import sums_gradients


def axes_used(graph: Graph) -> list[tuple[str, ...]]:
    """The sets of axes that the collectives of a graph run along, each in its first order, in program order."""
    return list(_by_set(graph, graph.calls()).values())


def axes_used_twice(graph: Graph) -> list[tuple[str, ...]]:
    """Those along which gradients are summed while other collectives run."""
    calls = [node for node in graph.calls() if node.target in COLLECTIVES]
    late = [node for node in calls if sums_gradients(node)]
    if not late:
        return []
    others = _by_set(graph, calls[calls.index(late[0]) :], but=set(late))
    return [axes for names, axes in _by_set(graph, late).items() if names in others]


def _by_set(
    graph: Graph, calls: Iterable[fx.Node], but: Container[fx.Node] = ()
) -> dict[frozenset[str], tuple[str, ...]]:
    axes_by_set: dict[frozenset[str], tuple[str, ...]] = {}
    for node in calls:
        if node.target in COLLECTIVES and node not in but:
            names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
            position = names.index("axes")
            axes: Any = node.args[position] if position < len(node.args) else node.kwargs["axes"]
            axes = graph.mesh.resolve(list(axes))
            axes_by_set.setdefault(frozenset(axes), tuple(axes))
    return axes_by_set
