"""Seconds of a step as it is compiled: what ranks candidates. Calls and collectives one after the other, from the local
shapes of one rank's body; each class of equal layers by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from shardc.cost.flops import node_flops
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, op_name, operands, results, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.layers import layer_of, list_and_index
from shardc.rules.registry import find_rule


@dataclass(frozen=True)
class LayerCost:
    """One of equal layers of a step: how many there are, and the seconds and the activations' bytes of one."""

    pattern: str  # "transformer.h.*"; "" for all that is in no layer
    count: int
    seconds: float
    communication: float  # of these seconds, those in collectives


def compiled_seconds(graph: Graph, hardware: Hardware, node: fx.Node) -> tuple[float, float]:
    """Seconds of a call of a body: of computing, and of communicating."""
    moved = collective(graph, node)
    if moved is not None:
        group = hardware.group_of(graph.mesh, graph.mesh.resolve(moved.axes))
        return 0.0, hardware.collective_seconds(moved.kind, float(moved.payload_bytes), group) * moved.times
    rule = find_rule(node.target)
    if info(node).constant or (rule is not None and rule.kind == "view"):
        return 0.0, 0.0
    outs = [v for v in results(node) if v is not None]
    count = node_flops(graph, node)
    if count and outs:
        shape = type_of(outs[0]).local_shape(graph.mesh)
        dtype, op = type_of(outs[0]).dtype, op_name(node.target)
        if op.startswith("shardc.sdpa"):
            return hardware.attention_seconds(count, dtype, backward=info(node).phase == "bwd"), 0.0
        batch = shape[0] if op in ("bmm", "baddbmm") else 1
        columns = shape[1] if op == "convolution" else shape[-1] if shape else 1
        rows = max(1, math.prod(shape) // max(1, columns * batch))
        depth = max(1, count // max(1, 2 * batch * rows * columns))
        return hardware.product_seconds(batch, rows, columns, depth, dtype), 0.0
    values = [v for v in (*operands(node), *outs) if not info(v).constant]
    moved_bytes = sum(type_of(v).local_bytes(graph.mesh) for v in dict.fromkeys(values))
    return hardware.memory_seconds(moved_bytes), 0.0


def layer_costs(graph: Graph, hardware: Hardware, pattern_of: Mapping[str, str] | None = None) -> list[LayerCost]:
    """The costs of a body by layer: each list of layers as one entry, of the mean of its elements; the rest as one.

    `pattern_of` names the class of a layer where it is no list's.
    """
    spent: dict[str, dict[str, list[float]]] = {}
    for node in graph.calls():
        compute, communication = compiled_seconds(graph, hardware, node)
        layer = layer_of(info(node).fqn)
        base, _ = list_and_index(layer)
        pattern = (pattern_of or {}).get(layer) or (f"{base}.*" if layer else "")
        entry = spent.setdefault(pattern, {}).setdefault(layer, [0.0, 0.0])
        entry[0] += compute + communication
        entry[1] += communication
    costs: list[LayerCost] = []
    for pattern, layers in spent.items():
        total = [sum(entry[i] for entry in layers.values()) for i in (0, 1)]
        costs.append(LayerCost(pattern, len(layers), total[0] / len(layers), total[1] / len(layers)))
    return costs
