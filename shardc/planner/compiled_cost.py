"""Seconds of a step as it is compiled: what ranks candidates. Calls and collectives one after the other, from the local
shapes of one rank's body; each class of equal layers by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardc.cost.call_seconds import call_costs
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.layers import layer_of, list_and_index
from shardc.ir.microbatch import in_microbatch

UPDATE_BYTES = 28  # read and written an element by an optimizer with two moments, all in float32


@dataclass(frozen=True)
class LayerCost:
    """One of equal layers of a step: how many there are, and the seconds of one, its parameters' update included."""

    pattern: str  # "transformer.h.*"; "" for all that is in no layer
    count: int
    seconds: float
    communication: float  # of these seconds, those in collectives
    update: float = 0.0  # and those of an optimizer with two moments, on weights as they are placed


def layer_costs(graph: Graph, hardware: Hardware) -> list[LayerCost]:
    """The costs of a body by layer: each list of layers as one entry, of the mean of its elements; the rest as one."""
    spent: dict[str, dict[str, list[float]]] = {}
    microbatch = in_microbatch(graph)
    for node, cost in call_costs(graph, hardware).items():
        times = graph.microbatches if node in microbatch else 1
        seconds, communication = times * cost.total, times * cost.seconds if cost.moved is not None else 0.0
        layer = layer_of(info(node).fqn)
        pattern = f"{list_and_index(layer)[0]}.*" if layer else ""
        entry = spent.setdefault(pattern, {}).setdefault(layer, [0.0, 0.0, 0.0])
        entry[0] += seconds
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
