"""What moving data costs a body: the kernels beside products, attention and communication, and the bytes they move.

A kernel reads what it reads of each operand once, and writes each result once. A view is no kernel; a "view" that
copies is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from kernels_triton.templates.op import kernel_of
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name, operands, type_of
from shardc.ir.ops import local
from shardc.ir.storages import storages, yields

aten = torch.ops.aten
PRODUCTS = {  # as `op_name` has them: aten's without their namespace, ours with it
    *("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "convolution", "convolution_backward"),
    *("shardc.linear", "shardc.linear_dgrad", "shardc.linear_wgrad"),
    *("shardc.grouped_mm", "shardc.grouped_mm_wgrad", "shardc.sdpa", "shardc.sdpa_bwd"),
}


class Traffic(NamedTuple):
    """Kernels and bytes of one rank and one run of each call."""

    kernels: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.kernels} kernels move {self.bytes / 1e6:.1f} MB"


def traffic(graph: Graph) -> Traffic:
    """Count a localized body."""
    sizes = moved(graph).values()
    return Traffic(len(sizes), sum(sizes))


def moved(graph: Graph) -> dict[fx.Node, int]:
    """The calls of a localized body that are counted, and the bytes of each."""
    of = storages(graph)
    found: dict[fx.Node, int] = {}
    for node in graph.calls():
        name = op_name(node.target)
        if name in PRODUCTS or name in KINDS or node.target is local.axis_offset:
            continue
        made = [value for value, _ in yields(node) if of[value].value is value]
        if made:
            found[node] = node_bytes(graph, node, made)
    return found


def node_bytes(graph: Graph, node: fx.Node, made: list[fx.Node]) -> int:
    """What one call reads and writes."""
    written = sum(type_of(value).local_bytes(graph.mesh) for value in made)
    if (kernel := kernel_of(node.target, node.args)) is not None:
        return kernel.bytes_moved
    if node.target is aten.embedding.default:  # of the table, the rows that it picks
        index = operands(node)[1]
        return 2 * written + type_of(index).local_bytes(graph.mesh)
    read = 0
    for value in dict.fromkeys(operands(node)):
        size = type_of(value).local_bytes(graph.mesh)
        # Of what is cut out, no more is read than is made.
        cut = node.target in (aten.slice.Tensor, aten.select.int, aten.view.default, local.shard_slice)
        read += min(size, written) if cut else size
    return read + written
