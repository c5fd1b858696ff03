"""Why keys travel round a ring: the attention whose rows lie over an axis, and what put them there.

Rings are put in by `localize`, behind the graph that other collectives are explained by; there the call is found by
name.
"""

from __future__ import annotations

from torch import fx

from shardc.explain.provenance import Trail, step
from shardc.ir.attention_rings import SO_FAR
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.attention_rows import NEXT_KEYS, SDPA_ROWS_BWD, SUM_KEYS
from shardc.ir.schema import given
from shardc.passes.communication.causes import Causes, as_named

INHERENT = "each row attends to the keys of all ranks; another strategy of `context` sends them, or heads, otherwise"


RING = (*SO_FAR, NEXT_KEYS, SUM_KEYS)  # what a ring is made of


def attention_of(moved: fx.Node) -> fx.Node:
    """The last step of the ring that reads what has moved a place."""
    node = moved
    while node.target in (NEXT_KEYS, SUM_KEYS):
        node = next(iter(node.users))
    while not given(node)["last"]:
        result = next(value for value in node.users if any(user.target in RING for user in value.users))
        node = next(user for user in result.users if user.target in RING)
        while node.target in (NEXT_KEYS, SUM_KEYS):
            node = next(iter(node.users))
    return node


def ring_trails(graph: Graph, moved: fx.Node) -> list[Trail]:
    """A trail for each axis of a ring; none where the graph has not its attention."""
    last = attention_of(moved)
    nodes = {info(node).name: node for node in graph.calls()}
    about = info(last)
    call = nodes.get(about.name) or (nodes.get(about.origin.of) if about.origin is not None else None)
    if call is None:
        return []
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
        why = f"dim {dim} of %{info(key).name} is sharded over {shown}, and rows attend to all of it"
        needed = f"%{info(call).name} ({op_name(call.target)}) reads the keys of one rank after another"
        steps = tuple(step(through, value) for (value, _), through in way if through is not None)
        roots = (way[0][0],) if way else ()
        trails.append(Trail(shown, why, needed, cause, False, gradient, steps, roots, (call,)))
    return list({(t.why, t.cause): t for t in trails}.values())
