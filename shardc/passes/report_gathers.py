"""report_gathers: say where an annotation was not honoured, so that replication is never silent.

Needs: lowered collectives. Changes nothing. A parameter or input that was annotated as sharded and is
gathered before use is computed with whole: a warning (SC209) names the op that needed it so, and what
the gather costs. Under strict that is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.ops import collectives
from shardc.passes.base import Pass
from shardc.rules.registry import find_rule

_GATHERS = (collectives.all_gather, collectives.all_to_all)


@dataclass(frozen=True)
class ReportGathers(Pass):
    """Add a diagnostic for every annotated input that is gathered."""

    def run(self, graph: Graph) -> Graph:
        for node in graph.calls():
            if node.target not in _GATHERS:
                continue
            root = _root(node)
            seed = graph.seeds.get(root)
            if root.op != "placeholder" or seed is None:
                continue
            annotated = {axis for axes in seed.placement for axis in axes}
            if not annotated & set(node.args[1]):  # type: ignore[arg-type]
                continue  # gathered from where it is stored
            reader = next(iter(node.users))
            about = info(reader)
            moved = type_of(node).local_bytes(graph.mesh)
            axes = ".".join(node.args[1])  # type: ignore[arg-type]
            graph.diagnostics.append(
                Diagnostic(
                    "SC209",
                    f"{info(root).name} is sharded over '{axes}', but {about.name} needs it whole: "
                    f"gathered, {human_bytes(moved)} a rank, {'backward' if about.phase == 'bwd' else 'forward'}",
                    "warning",
                    location=about.source or None,
                    source_text=about.source_text or None,
                    fqn=about.fqn or None,
                    tensor=info(root).name,
                    placement=str(type_of(root)),
                    cause=seed.cause,
                    hint="shard a dim that the op can split, or leave this tensor unsharded",
                )
            )
        return graph


def _root(node: fx.Node) -> fx.Node:
    """The value that a chain of views and moves starts from."""
    while node.op == "call_function":
        entry = find_rule(node.target)
        sources = operands(node)
        if len(sources) != 1 or (entry is not None and entry.kind != "view"):
            return node
        node = sources[0]
    return node
