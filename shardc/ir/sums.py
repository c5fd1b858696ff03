"""What sums over microbatches move in memory."""

from __future__ import annotations

import math

from torch import fx

from shardc.ir.graph import Graph, type_of
from shardc.ir.schema import given


def row_bytes(graph: Graph, call: fx.Node) -> int:
    """The bytes of those rows of an embedding's sum that the tokens of a microbatch have, at most."""
    type, tokens = type_of(call), math.prod(type_of(given(call)["indices"]).local_shape(graph.mesh))
    rows, columns = type.local_shape(graph.mesh)
    return min(tokens, rows) * columns * type.dtype.itemsize
