"""prefetch: what a gather of a parameter sends is made when the gather may begin, not when its result is read.

    %y = linear(%x, %v.gather)                %w.cast = _to_copy(%w, bf16)
    %w.cast = _to_copy(%w, bf16)              %y = linear(%x, %v.gather)           begin: %w.gather
    %w.gather = all_gather(%w.cast, dp)  ->   %w.gather = all_gather(%w.cast, dp)
    %z = linear(%y, %w.gather)                %z = linear(%y, %w.gather)           wait, run

A gather begins some collectives early, but not before its operand is there (`ir.overlap_schedule`). Operands that are
made of parameters alone, casts of master weights and packed shards, could be made at any time, and stand where they are
read first.

Needs a localized body, or a part of one, with its buckets. Ensures the same calls, each after what it reads. Calls that
make the operand of a gather, of parameters alone, move to where the gather may begin at the earliest. They hold a
rank's shards until then. What is gathered stays bounded by the collectives that may be in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardc.ir.call_slots import slotted_calls
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, info, op_name, operands
from shardc.ir.overlap_schedule import earliest_places
from shardc.passes.base import Pass


@dataclass(frozen=True)
class Prefetch(Pass):
    """Make operands of gathers early, unless not `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        if not self.enabled or not any(KINDS.get(op_name(node.target)) == "all_gather" for node in graph.calls()):
            return graph
        graph = graph.copy()
        weights = weights_of(graph)
        listed = slotted_calls(graph)
        calls = [call.node for call in listed.calls]
        made_before: dict[fx.Node, list[fx.Node]] = {}
        for part in listed.sections:
            for index, place in earliest_places(listed.calls, part.start, part.stop).items():
                if KINDS.get(op_name(calls[index].target)) == "all_gather" and info(calls[index]).phase != "opt":
                    made_before.setdefault(calls[place], []).extend(v for v in operands(calls[index]) if v in weights)
        placed = set[fx.Node]()
        for node in [node for node in graph.fx.nodes if node.op == "call_function"]:
            for value in (*made_before.get(node, ()), node):
                _place(value, graph, placed)
        return graph


def _place(node: fx.Node, graph: Graph, placed: set[fx.Node]) -> None:
    """Behind all that is placed, what it reads before it."""
    if node.op == "call_function" and node not in placed:
        for source in node.all_input_nodes:
            _place(source, graph, placed)
        placed.add(node)
        graph.output_node.prepend(node)


def weights_of(graph: Graph) -> set[fx.Node]:
    """Parameters and what is made of parameters alone, but not by communication."""
    weights = {node for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role == "param"}
    for node in graph.calls():
        sources = node.all_input_nodes
        is_compute = info(node).type is not None and op_name(node.target) not in KINDS
        if is_compute and sources and weights.issuperset(sources) and info(node).phase != "opt":
            weights.add(node)
    return weights


def gathers_weights(graph: Graph) -> bool:
    """Does a microbatch gather parameters, which it may do ahead of their use?"""
    weights = weights_of(graph)
    gathers = (node for node in graph.calls() if KINDS.get(op_name(node.target)) == "all_gather")
    return any(info(node).phase != "opt" and not weights.isdisjoint(operands(node)) for node in gathers)
