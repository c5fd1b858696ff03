"""Why rows are exchanged with neighbours: the convolution or pooling whose kernel reaches beyond a rank's own.

They are put in by `localize`, behind the graph that other collectives are explained by; there the call is found
by name.
"""

from __future__ import annotations

from torch import fx

from shardc.explain.provenance import Trail, step
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.halo import HALO, HALO_SUM
from shardc.ir.schema import given
from shardc.passes.communication.causes import Causes, as_named
from shardc.rules.window import WINDOWED

INHERENT = "a rank that has a part of a dim needs the rows about it; a gather would send all of them"


def windowed_call(rows: fx.Node) -> fx.Node:
    """The call that reads the rows of a neighbour, or whose gradient they are."""
    (joined,) = rows.users
    node = joined
    while node.target is HALO:
        node = next(user for user in node.users if user.target is HALO or user.target in WINDOWED)
    while node.target not in WINDOWED:
        node = node.all_input_nodes[0]
    return node


def halo_trails(graph: Graph, rows: fx.Node) -> list[Trail]:
    """A trail for each axis of an exchange of rows; none where the graph has not its call."""
    found, args = windowed_call(rows), given(rows)
    nodes = {info(node).name: node for node in graph.calls()}
    # Of a result that own rows are made of, these have the name.
    origins = [origin.of for node in (found, *found.users) if (origin := info(node).origin) is not None]
    call = next((nodes[name] for name in (info(found).name, *origins) if name in nodes), None)
    if call is None:
        return []
    arguments = given(call)
    causes, x, dim = Causes(graph), arguments.get("input", arguments.get("self")), args["dim"]
    first = sum(map(len, type_of(x).dims[:dim]))
    atoms = range(first, first + len(type_of(x).dims[dim]))
    summed = next(iter(rows.users)).target is HALO_SUM
    gradient = summed and info(call).phase == "bwd"
    trails: list[Trail] = []
    for axis in given(rows)["axes"]:
        shown = as_named(graph, axis)
        starts = [(x, atom) for atom in atoms if axis in type_of(x).placement[atom]]
        way = causes.way(starts, axis)
        cause = str(graph.seeds[way[0][0][0]].cause) if way else ""
        side, length = "behind" if (args["shift"] == -1) != summed else "before", args["length"]
        many = f"{length} element{'s' * (length > 1)} {side} a rank's own"
        why = f"dim {dim} of %{info(x).name} is sharded over {shown}, and kernels reach {many}"
        needed = f"%{info(call).name} ({op_name(call.target)}) reads them"
        if summed:
            needed = f"%{info(call).name} ({op_name(call.target)}) makes a part of them"
        if gradient:
            needed = f"%{info(call).name} ({op_name(call.target)}) leaves their gradient to the rank that has them"
        steps = tuple(step(through, value) for (value, _), through in way if through is not None)
        roots = (way[0][0],) if way else ()
        trails.append(Trail(shown, why, needed, cause, False, gradient, steps, roots, (call,)))
    return list({(t.why, t.cause): t for t in trails}.values())
