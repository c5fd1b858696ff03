"""Why keys travel round a ring, or ranks merge log-sums: the attention of a sharded sequence, and what sharded it.

Both are put in by `localize`, behind the graph that other collectives are explained by; there the call is found by
name.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.explain.provenance import Trail, step
from shardc.ir.attention_rings import SO_FAR
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.attention_keys import MERGE_LSE, MERGE_PARTS, SPLIT_PARTS, WEIGH_PART
from shardc.ir.ops.attention_rows import NEXT_KEYS, REACH_ROWS, REACH_SUM, SDPA_ROWS_BWD, SUM_KEYS
from shardc.ir.ops.attention_window import window_of
from shardc.ir.schema import given
from shardc.passes.communication.causes import Causes, as_named
from shardc.passes.communication.split_batch import calls_by_name

INHERENT = "each row attends to the keys of all ranks; another strategy of `context` sends them, or heads, otherwise"
MERGED = "each row attends to the keys of all ranks: `context: {keys: all_gather}` sends them instead"
MOVED = (NEXT_KEYS, REACH_ROWS, REACH_SUM)
MERGES: dict[Any, Any] = {MERGE_LSE: WEIGH_PART, MERGE_PARTS: SPLIT_PARTS}  # and what reads them
PUT_IN = (*MOVED, *MERGES)  # the collectives explained here
BETWEEN = (*MOVED, SUM_KEYS)  # what stands between two steps of a ring
RING = (*SO_FAR, *BETWEEN)


def attention_of(moved: fx.Node) -> fx.Node:
    """The last step of the ring that reads what has moved a place, or the merge that reads log-sums."""
    if moved.target in MERGES:
        return next(user for user in moved.users if user.target is MERGES[moved.target])
    node = moved
    while node.target in BETWEEN:
        node = next(iter(node.users))
    while not given(node)["last"]:
        result = next(value for value in node.users if any(user.target in RING for user in value.users))
        node = next(user for user in result.users if user.target in RING)
        while node.target in BETWEEN:
            node = next(iter(node.users))
    return node


def ring_trails(graph: Graph, moved: fx.Node) -> list[Trail]:
    """A trail for each axis of a ring or a merge; none where the graph has not its attention."""
    last = attention_of(moved)
    nodes = calls_by_name(graph)
    about = info(last)
    call = nodes.get(about.name) or (nodes.get(about.origin.of) if about.origin is not None else None)
    if call is None:
        return []
    merges = moved.target in MERGES
    causes, key, gradient = Causes(graph), given(call)["k"], last.target is SDPA_ROWS_BWD
    dim = type_of(key).ndim - 2
    first = sum(map(len, type_of(key).dims[:dim]))
    atoms = range(first, first + len(type_of(key).dims[dim]))
    trails: list[Trail] = []
    for axis in given(moved)["axes"]:
        shown = as_named(graph, axis)
        starts = [(key, atom) for atom in atoms if axis in type_of(key).placement[atom]]
        way = causes.way(starts, axis)
        cause = str(graph.seeds[way[0][0][0]].cause) if way else ""
        window = window_of(given(call).get("window", ()))
        seen = f"to {window}" if window else "to all of it"
        why = f"dim {dim} of %{info(key).name} is sharded over {shown}, and rows attend {seen}"
        reads = "merges the softmax over each rank's keys" if merges else "reads the keys of one rank after another"
        reads = "reads those of other ranks that its window reaches" if window else reads
        needed = f"%{info(call).name} ({op_name(call.target)}) {reads}"
        steps = tuple(step(through, value) for (value, _), through in way if through is not None)
        roots = (way[0][0],) if way else ()
        trails.append(Trail(shown, why, needed, cause, False, gradient, steps, roots, (call,)))
    return list({(t.why, t.cause): t for t in trails}.values())
