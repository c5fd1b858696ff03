"""Plans the arena of a coordinate's graphs: they run one after another, and so share one arena.

A part runs many times, with several microbatches in flight, so only values that live and die within one run are placed
in the arena. The arena exists during the whole step, also while another part is at its peak. It is therefore limited to
a hundredth (1 / SPARE) of the memory that the ranks store. The only graph of a list, the body, has no such limit.
"""

from __future__ import annotations

from shardc.ir.arena import SPARE, Plan, planned
from shardc.ir.graph import Graph, type_of
from shardc.partition.program_counter import graphs_of
from shardc.partition.staged_program import StagedProgram


def arena_plans(program: StagedProgram, c: int) -> dict[Graph, Plan]:
    """The arena plan of each graph that a coordinate's ranks run."""
    graphs = dict.fromkeys(graph for i in program.lists.ranks[c] for graph in graphs_of(program, c, i))
    if len(graphs) == 1:
        return {graph: planned(graph) for graph in graphs}
    stored: dict[str, int] = {}
    for graph in graphs:
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role in ("param", "state", "buffer"):
                stored[port.name] = type_of(node).local_bytes(graph.mesh)
    limit = sum(stored.values()) // SPARE
    return {graph: planned(graph, limit) for graph in graphs}
