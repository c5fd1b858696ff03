"""Seconds of a step as it is compiled: what ranks candidates. Calls and collectives one after the other, from the local
shapes of one rank's body; each class of equal layers by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from shardc.cost.flops import node_flops
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, op_name, operands, results, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.layers import layer_of, list_and_index
from shardc.rules.registry import find_rule

UPDATE_BYTES = 28  # read and written an element by an optimizer with two moments, all in float32


@dataclass(frozen=True)
class LayerCost:
    """One of equal layers of a step: how many there are, and the seconds of one, its parameters' update included."""

    pattern: str  # "transformer.h.*"; "" for all that is in no layer
    count: int
    seconds: float
    communication: float  # of these seconds, those in collectives
    update: float = 0.0  # and those of an optimizer with two moments, on weights as they are placed


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


def layer_costs(graph: Graph, hardware: Hardware) -> list[LayerCost]:
    """The costs of a body by layer: each list of layers as one entry, of the mean of its elements; the rest as one."""
    spent: dict[str, dict[str, list[float]]] = {}
    for node in graph.calls():
        compute, communication = compiled_seconds(graph, hardware, node)
        layer = layer_of(info(node).fqn)
        pattern = f"{list_and_index(layer)[0]}.*" if layer else ""
        entry = spent.setdefault(pattern, {}).setdefault(layer, [0.0, 0.0, 0.0])
        entry[0] += compute + communication
        entry[1] += communication
    for port, value in zip(graph.inputs, graph.placeholders, strict=True):
        layer = layer_of(port.name.rpartition(".")[0])
        pattern = f"{list_and_index(layer)[0]}.*" if layer else ""
        if port.role == "param" and port.trainable:
            size = UPDATE_BYTES * type_of(value).local_bytes(graph.mesh) // type_of(value).dtype.itemsize
            update = hardware.memory_seconds(size)
            entry = spent.setdefault(pattern, {}).setdefault(layer, [0.0, 0.0, 0.0])
            entry[0] += update
            entry[2] += update
    costs: list[LayerCost] = []
    for pattern, layers in spent.items():
        total = [sum(entry[i] for entry in layers.values()) / len(layers) for i in range(3)]
        costs.append(LayerCost(pattern, len(layers), *total))
    return costs
