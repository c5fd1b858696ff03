"""Memory traffic of a body: the kernels beside products, attention and communication, and the bytes that they move.

A kernel reads each element of an operand that it uses once, and writes each result once. A view is no kernel; a call of
a view op that copies is one, and so is a collective that copies what it sends, or what it has received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from kernels_triton.match.op import kernel_of
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name, operands, type_of
from shardc.ir.in_flight import copied_bytes
from shardc.ir.ops import local
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.decomposed import DECOMPOSED
from shardc.ir.storages import layouts, yields
from shardc.ir.sums import row_bytes

aten = torch.ops.aten
PRODUCTS = {  # as `op_name` spells them: aten's without a namespace, ours with it
    *("mm", "bmm", "mv", "dot", "addmm", "baddbmm", "convolution", "convolution_backward"),
    *("shardc.linear", "shardc.linear_bias", "shardc.linear_dgrad", "shardc.linear_wgrad", "shardc.accumulate_wgrad"),
    *("shardc.scaled_linear", "shardc.scaled_linear_dgrad", "shardc.scaled_linear_wgrad", "shardc.scaled_mm"),
    *("shardc.grouped_mm", "shardc.grouped_mm_wgrad", "shardc.sdpa", "shardc.sdpa_bwd"),
    *("shardc.expert_mm", "shardc.expert_wgrad"),
}


class Traffic(NamedTuple):
    """Kernels and bytes of one rank, for one run of each call."""

    kernels: int
    bytes: int

    def __str__(self) -> str:
        return f"{self.kernels} kernels move {self.bytes / 1e6:.1f} MB"


def traffic(graph: Graph) -> Traffic:
    """The traffic of a localized body."""
    sizes = bytes_by_call(graph).values()
    return Traffic(len(sizes), sum(sizes))


def bytes_by_call(graph: Graph) -> dict[fx.Node, int]:
    """The calls of a localized body that count as kernels, with the bytes of each."""
    storage_of, layout_of, _ = layouts(graph)
    bytes_moved: dict[fx.Node, int] = {}
    for node in graph.calls():
        name = op_name(node.target)
        if name in KINDS:
            overlaps = node.target in COLLECTIVES and node.target not in DECOMPOSED
            if overlaps and (copied := sum(copied_bytes(graph, node, layout_of))):
                bytes_moved[node] = 2 * copied
            continue
        if name in PRODUCTS or node.target is local.axis_offset:
            continue
        written = [value for value, _ in yields(node) if storage_of[value].value is value]
        if written or node.target is ACCUMULATE_MORE_ROWS:
            bytes_moved[node] = node_bytes(graph, node, written)
    return bytes_moved


def node_bytes(graph: Graph, node: fx.Node, results: list[fx.Node]) -> int:
    """The bytes that one call reads and writes."""
    written = sum(type_of(value).local_bytes(graph.mesh) for value in results)
    if (kernel := kernel_of(node.target, node.args)) is not None:
        return kernel.bytes_moved
    if node.target is aten.embedding.default:  # it reads the selected rows of the table only
        index = operands(node)[1]
        return 2 * written + type_of(index).local_bytes(graph.mesh)
    read_whole = operands(node)
    if node.target in (ACCUMULATE_ROWS, ACCUMULATE_MORE_ROWS):  # they add to the rows of their tokens only
        written, read_whole = 2 * row_bytes(graph, node), read_whole[-2:]
    read = 0
    for value in dict.fromkeys(read_whole):
        size = type_of(value).local_bytes(graph.mesh)
        # Of a slice's operand, only the slice is read.
        is_slice = node.target in (aten.slice.Tensor, aten.select.int, aten.view.default, local.shard_slice)
        read += min(size, written) if is_slice else size
    return read + written
