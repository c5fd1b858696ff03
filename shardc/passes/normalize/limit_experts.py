"""limit_experts: experts take so many rows as a capacity says; what was routed, and what dropped, is counted.

    perm, offs = group_rows(ids)      kept = limit_rows(ids, factor=1.25)
                                 ->   perm, offs = group_rows(kept)
                                      output "experts:load.<module>" = count_rows(ids, kept)

A dropped row is of no expert, as padding is: it lies in the tail, products leave it out, and it comes back as zeros,
forward and backward. Needs: groupings (`group_experts`) of a step that trains. Ensures: a count of each grouping's rows
is an output of a microbatch, until `join_loads` makes one of the step's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Port, info, operands, replace_operands, type_of
from shardc.ir.ops.expert_capacity import COUNT_ROWS, LIMIT_ROWS, layout_of
from shardc.ir.ops.experts import GROUP_ROWS
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

LOAD = (
    "experts:load"  # the output of a step: for each grouping a line, of an entry an expert and one of what was dropped
)
OF_LAYER = f"{LOAD}."  # prefix of the outputs of a microbatch


@dataclass(frozen=True)
class LimitExperts(Pass):
    """Limit what experts take to `factor` times their even part, if there is one; count rows if they are to be."""

    factor: float | None = None
    counts: bool = False

    def run(self, graph: Graph) -> Graph:
        if self.factor is None and not self.counts:
            return graph
        groupings = [node for node in graph.calls() if node.target is GROUP_ROWS]
        if not groupings:
            graph.diagnostics.append(_without_groupings(self.factor))
        width = max((given(grouping)["experts"] for grouping in groupings), default=0)
        loads = [self._limited(graph, grouping, width) for grouping in groupings]
        names = [f"{OF_LAYER}{i}.{info(grouping).fqn}".rstrip(".") for i, grouping in enumerate(groupings)]
        graph.outputs = (*graph.outputs, *(Port("output", name) for name in names))
        graph.output_node.args = ((*graph.output_values, *loads),)
        return graph

    def _limited(self, graph: Graph, grouping: fx.Node, width: int) -> fx.Node:
        ids, experts = operands(grouping)[0], given(grouping)["experts"]
        kept = ids
        prefix = info(grouping).name
        with graph.fx.inserting_before(grouping):
            if self.factor is not None:
                args = (ids, experts, self.factor, [])
                kept = graph.call(LIMIT_ROWS, args, like=grouping, type=type_of(ids), name=f"{prefix}.limit")
                replace_operands(grouping, [kept])
            type = TensorType.plain(torch.int64, (width + 1,))
            return graph.call(COUNT_ROWS, (ids, kept, experts, width), like=grouping, type=type, name=f"{prefix}.load")


def group_as_ranks(reference: Graph, body: Graph) -> None:
    """Tell a step on one device which rows are one rank's: what a capacity drops goes by the rows of a rank."""
    limits = {info(node).name: node for node in body.calls() if node.target is LIMIT_ROWS}
    for node in reference.calls():
        if node.target is LIMIT_ROWS:
            rows = type_of(limits[info(node).name])
            node.args = (*node.args[:3], layout_of(rows, body.mesh))


def limits_differ(reference: Graph, body: Graph) -> list[str]:
    """Whether a rank limits other rows than one device does in its place: a line each."""
    limits = {info(node).name: node for node in body.calls() if node.target is LIMIT_ROWS}
    faults: list[str] = []
    for node in (node for node in reference.calls() if node.target is LIMIT_ROWS):
        name, twin = info(node).name, limits.pop(info(node).name, None)
        if twin is None:
            faults.append(f"{name} limits rows on one device, and no rank does")
        elif (
            node.args[1:3] != twin.args[1:3]
            or twin.args[3]
            or list(given(node)["layout"]) != layout_of(type_of(twin), body.mesh)
        ):
            faults.append(f"{name} limits rows on one device otherwise than ranks do")
    faults += [f"{name} limits rows, and not on one device" for name, n in limits.items() if info(n).origin is None]
    return faults


def _without_groupings(factor: float | None) -> Diagnostic:
    said = f"a capacity of {factor:g} is" if factor is not None else "the load of experts is"
    message = f"{said} without effect: no rows are grouped by expert"
    hint = "leave it out; experts are seen where rows are sorted, and multiplied in groups"
    return Diagnostic("SC230", message, "warning", hint=hint)
