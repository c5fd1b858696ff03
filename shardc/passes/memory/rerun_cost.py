"""What running a forward call again takes, before a graph is localized: in FLOPs of 16-bit products that take as long.

    product      its shapes on a rank, by `Hardware.product_seconds`, and no less than what it reads and writes
    attention    the FLOPs of keys that rows see
    collective   its bytes in its group
    others       the bytes that are read and written

Whole numbers, so that cuts are exact.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.cost.call_seconds import ATTENTION
from shardc.cost.flops import node_flops
from shardc.cost.product_shapes import PRODUCT_SHAPES
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, op_name, operands, results, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.ops.attention_rows import SDPA_RING
from shardc.ir.schema import given


def rerun_cost(graph: Graph, call: fx.Node, hardware: Hardware) -> int:
    """At least 1: nothing runs again for nothing."""
    return max(1, round(_seconds(graph, call, hardware) * hardware.bf16_flops_per_second))


def attention_is_light(graph: Graph, call: fx.Node, hardware: Hardware) -> bool:
    """Whether a product of activations is computed in the time that its results are written in."""
    written = sum(type_of(v).local_bytes(graph.mesh) for v in results(call) if v is not None)
    return _arithmetic(graph, call, hardware) <= hardware.memory_seconds(written)


def _seconds(graph: Graph, call: fx.Node, hardware: Hardware) -> float:
    if (sent := collective(graph, call)) is not None:
        group = hardware.group_of(graph.mesh, sent.axes)
        return hardware.collective_seconds(sent.kind, sent.payload_bytes, group, graph=True)
    moved = dict.fromkeys([*operands(call), *(v for v in results(call) if v is not None)])
    memory = hardware.memory_seconds(sum(type_of(v).local_bytes(graph.mesh) for v in moved))
    passing = _passing(graph, call, hardware) if call.target is SDPA_RING else 0.0
    return max(memory, _arithmetic(graph, call, hardware)) + passing


def _arithmetic(graph: Graph, call: fx.Node, hardware: Hardware) -> float:
    """Seconds of a call's FLOPs."""
    name, flops = op_name(call.target), node_flops(graph, call)
    made = next((v for v in results(call) if v is not None), None)
    if not flops or made is None:
        return 0.0
    dtype, shape = type_of(made).dtype, type_of(made).local_shape(graph.mesh)
    if name in PRODUCT_SHAPES:
        told = {key: _shapes(graph, value) for key, value in given(call).items()}
        batch, rows, columns, depth = PRODUCT_SHAPES[name](told, shape)
        if 2 * batch * rows * columns * depth == flops:
            return hardware.product_seconds(batch, rows, columns, depth, dtype)
    elif name in ATTENTION:
        q, k = (type_of(given(call)[key]).local_shape(graph.mesh) for key in ("q", "k"))
        return hardware.attention_seconds(flops, type_of(given(call)["q"]).dtype, sequence=k[-2], width=q[-1])
    return hardware.bf16_flops(flops, dtype) / hardware.bf16_flops_per_second


def _passing(graph: Graph, call: fx.Node, hardware: Hardware) -> float:
    """Seconds of passing the keys and values of a ring to all of its ranks."""
    keys, values = (type_of(given(call)[name]) for name in ("k", "v"))
    axes = tuple(axis for atom in keys.dims[-2] for axis in atom.axes)
    group, steps = hardware.group_of(graph.mesh, axes), graph.mesh.size(axes) - 1
    sizes = (keys.local_bytes(graph.mesh), values.local_bytes(graph.mesh))
    return steps * sum(hardware.collective_seconds("permute", size, group, graph=True) for size in sizes)


def _shapes(graph: Graph, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_shapes(graph, item) for item in value]
    return type_of(value).local_shape(graph.mesh) if isinstance(value, fx.Node) else value
