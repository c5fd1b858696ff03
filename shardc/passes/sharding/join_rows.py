"""Rows that are put behind others, along a sequence that ranks have parts of, as moves (`shardc.ir.ops.shift`).

cat([zeros, x[:, :-1]], 1)          shift by -1 of x[:, :-1], filled with 0
cat([x[:, 3:], x[:, :3]], 1)        shift by 3 of x, in a circle
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from shardc.ir.graph import Graph, type_of
from shardc.ir.ops.shift import SHIFT
from shardc.ir.schema import given
from shardc.passes.sharding.row_moves import MOVES, Move, of_whole

aten = torch.ops.aten


def join_rows(graph: Graph, lengths: Collection[int]) -> None:
    """Rows behind others that all have one value, or before those, and a circle that is cut and joined, as moves."""
    for node in list(graph.calls()):
        if node.target in MOVES and not type_of(node).ragged:
            move = of_whole(node, lengths.__contains__)
            if move is not None and move.length in lengths and move.x not in node.all_input_nodes:
                node.target, node.args, node.kwargs = SHIFT, move.args, {}
        if node.target is not aten.cat.default or type_of(node).ragged:
            continue
        args, ndim = given(node), type_of(node).ndim
        parts, dim = list(args["tensors"]), args.get("dim", 0) % max(1, ndim)
        if type_of(node).shape[dim] not in lengths or any(type_of(p).dtype != type_of(node).dtype for p in parts):
            continue
        filled = [given(p)["fill_value"] for p in parts if p.target is aten.full.default]
        rows = [(i, p) for i, p in enumerate(parts) if p.target is not aten.full.default]
        if any(isinstance(fill, int) and int(float(fill)) != fill for fill in filled):
            continue  # a move's fill is a float
        if len(rows) == 1 and len(set(filled)) == 1:
            ((i, x),) = rows
            first = sum(type_of(p).shape[dim] for p in parts[:i])
            move = Move(x, dim, -first, type_of(node).shape[dim], float(filled[0]))
        elif len(rows) == len(parts) == 2 and all(p.target is aten.slice.Tensor for p in parts):
            behind, before = (MOVES[aten.slice.Tensor](p) for p in parts)
            if behind is None or before is None or behind.x is not before.x or {behind.dim, before.dim} != {dim}:
                continue
            size = type_of(behind.x).shape[dim]
            if before.offset or before.length != behind.offset or behind.offset + behind.length != size:
                continue
            move = Move(behind.x, dim, behind.offset, size, wrap=True)
        else:
            continue
        node.target, node.args, node.kwargs = SHIFT, move.args, {}
