"""What of a coordinate's graphs has places in memory: they share one arena, since they run in turn.

A part runs many times, with several microbatches under way, so only what lives and dies within one run has a place. The
arena is there all step long, whatever part the peak is in: so it has no more than a hundredth of what the ranks store.
"""

from __future__ import annotations

from shardc.ir.arena import SPARE, Plan, planned
from shardc.ir.graph import Graph, type_of
from shardc.stages.places import graphs_of
from shardc.stages.program import Pipelined


def plans(program: Pipelined, c: int) -> dict[Graph, Plan]:
    """By graph that a coordinate's ranks run."""
    graphs = dict.fromkeys(graph for i in program.lists.ranks[c] for graph in graphs_of(program, c, i))
    stored: dict[str, int] = {}
    for graph in graphs:
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role in ("param", "state", "buffer"):
                stored[port.name] = type_of(node).local_bytes(graph.mesh)
    most = sum(stored.values()) // SPARE
    return {graph: planned(graph, most) for graph in graphs}
