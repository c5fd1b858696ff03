"""Sums over microbatches that several calls add to, in one place in memory, and what they move.

    %head = accumulate_wgrad(%g, %x, f32)                  the product of a head that is tied to an embedding
    %w = accumulate_more_rows(%head, %dy, %ids, -1)        is %head's memory, with the rows of the embedding

Nothing else reads `%head`, whose memory has the sum of the microbatches before: of both.
"""

from __future__ import annotations

import math

from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, ADDS
from shardc.ir.schema import given


def whole_sum(call: fx.Node) -> fx.Node:
    """The last call that adds to the sum that a call makes: it itself, but where others add to its memory."""
    while (user := next(iter(call.users), None)) is not None and _base(user) is call:
        call = user
    return call


def parts_of(call: fx.Node) -> list[fx.Node]:
    """The calls that make a sum, in order: the one that makes its memory, and those that add to it."""
    calls = [call]
    while (base := _base(calls[0])) is not None:
        calls.insert(0, base)
    return calls


def _base(call: fx.Node) -> fx.Node | None:
    return operands(call)[0] if call.target is ACCUMULATE_MORE_ROWS else None


def shared_sums(graph: Graph) -> list[str]:
    """Sums whose memory another sum takes, and that something else reads, or that are none: a line each."""
    faults: list[str] = []
    for call in graph.calls_of(ACCUMULATE_MORE_ROWS):
        base = operands(call)[0]
        if base.target not in (*ADDS, ACCUMULATE_MORE_ROWS):
            faults.append(f"{info(call).name} adds to {info(base).name}, which is no sum that a call makes")
        elif len(base.users) > 1 or sum(value is base for value in call.args) > 1:
            faults.append(f"{info(call).name} adds to {info(base).name}, which something else reads")
    return faults


def row_bytes(graph: Graph, call: fx.Node) -> int:
    """The bytes of those rows of an embedding's sum that the tokens of a microbatch have, at most."""
    type, tokens = type_of(call), math.prod(type_of(given(call)["indices"]).local_shape(graph.mesh))
    rows, columns = type.local_shape(graph.mesh)
    return min(tokens, rows) * columns * type.dtype.itemsize
