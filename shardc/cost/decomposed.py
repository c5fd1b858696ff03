"""What a product takes that gathers its operand, or scatters its result, piece by piece (`ir.ops.decomposed`).

With a piece for each of n ranks, of which each takes p to multiply, and c to send the n - 1 that are not a rank's own:

    gathered      p + max((n - 1) p, c)     its own rows first, while the others are on their way
    scattered     p + max((n - 1) p, c)     its own rows last, and then the n terms are added up

Each piece is begun anew, and beside a collective a product takes longer. Rows of several sequences do not lie one after
another where a sequence is divided: they are copied on both sides of a gather, and before a product that is scattered.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx

from shardc.ir.collectives import Collective
from shardc.ir.graph import Graph, info, type_of
from shardc.ir.hardware import Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.decomposed import DECOMPOSED, GATHER_LINEAR
from shardc.ir.schema import given


class Decomposed(NamedTuple):
    seconds: float
    launches: int


def decomposed_cost(
    graph: Graph, node: fx.Node, moved: Collective, hardware: Hardware, mesh: Mesh
) -> Decomposed | None:
    """Of a collective of a localized graph, if it is a decomposed product; `mesh` is that of the whole job."""
    if node.target not in DECOMPOSED:
        return None
    args, members = given(node), moved.group_size
    group = hardware.group_of(mesh, graph.mesh.resolve(args["axes"]))
    x = type_of(args["x"])
    *_, depth = x.local_shape(graph.mesh)
    weights = [
        type_of(w).local_shape(graph.mesh) for w in (args["ws"] if node.target is GATHER_LINEAR else [args["w"]])
    ]
    gathers = node.target is GATHER_LINEAR
    rows = math.prod(args["shape"] if gathers else x.local_shape(graph.mesh)) // max(1, depth)
    piece = sum(
        hardware.product_seconds(1, -(-rows // members), math.prod(w) // max(1, depth), depth, x.dtype, contended=True)
        for w in weights
    )
    begun = hardware.collective_seconds(moved.kind, 1, group, graph=True)
    sending = hardware.collective_seconds(moved.kind, moved.payload_bytes, group, graph=True) + (members - 2) * begun
    seconds, launches = piece + max((members - 1) * piece, sending), members * (len(weights) + 1)
    copied = [x.local_bytes(graph.mesh)]
    if gathers:
        copied += [t.local_bytes(graph.mesh) for t in info(node).results if t is not None]
    else:
        seconds += hardware.memory_seconds(moved.payload_bytes + moved.payload_bytes // members)
        launches += 1
    if math.prod(args["atoms"][: args["pos"]]) > 1:
        seconds += sum(hardware.memory_seconds(2 * size) for size in copied)
        launches += len(copied)
    return Decomposed(seconds, launches)
