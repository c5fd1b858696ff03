"""join_loads: the counts of all groupings of a step become one output, which is summed over ranks at once.

    output "experts:load.0.layers.0.mlp" = %load                    %total = %load padded + %load_1 padded
    output "experts:load.1.layers.1.mlp" = %load_1          ->      output "experts:load" = %total

Needs: counts that are summed over microbatches (`accumulate`). Each becomes a line of the whole, and all are added:
that is linear, so a pending sum is reduced once, and the stages of a pipeline add up what they have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardc.frontend.append import Append
from shardc.ir.graph import Graph, Port, type_of
from shardc.passes.base import Pass
from shardc.passes.normalize.limit_experts import LOAD, OF_LAYER

aten = torch.ops.aten


@dataclass(frozen=True)
class JoinLoads(Pass):
    """Make one output of the loads of all groupings, a line each."""

    def run(self, graph: Graph) -> Graph:
        outputs = list(zip(graph.outputs, graph.output_values, strict=True))
        loads = [value for port, value in outputs if port.name.startswith(OF_LAYER)]
        if not loads:
            return graph
        append = Append(graph)
        width = type_of(loads[0]).shape[0]
        total = None
        for i, load in enumerate(loads):
            whole = [len(loads) * width], 0, i * width, (i + 1) * width, 1
            line = append.call(LOAD, "", aten.slice_backward.default, load, *whole)
            total = line if total is None else append.call(LOAD, "", aten.add.Tensor, total, line)
        assert total is not None
        table = append.call(LOAD, "", aten.view.default, total, [len(loads), width])
        kept = [(port, value) for port, value in outputs if not port.name.startswith(OF_LAYER)]
        kept.append((Port("output", LOAD), table))
        graph.outputs = tuple(port for port, _ in kept)
        graph.output_node.args = (tuple(value for _, value in kept),)
        return graph
