"""Why rows are exchanged with other ranks: the convolution or pooling whose kernel reaches beyond a rank's own, or
what moves the rows of a sequence, or sums them up. And why the states of a recurrence travel.

They are put in by `localize`, behind the graph that other collectives are explained by; there the call is found by
name.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.explain.provenance import Trail, step
from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.carried_states import CARRIED_STATES, STATES_BEHIND
from shardc.ir.ops.cumulative import CUMULATIVE_PART
from shardc.ir.ops.cumulative_extremes import CUMULATIVE_EXTREME_PART, EXTREME_GRADIENT, EXTREME_GRADIENT_PART
from shardc.ir.ops.extreme import EXTREME_OF_RUNS
from shardc.ir.ops.halo import HALO, HALO_SUM, NEIGHBOUR_ROWS
from shardc.ir.ops.mirror import MIRROR, MIRROR_ROWS
from shardc.ir.ops.scan import SCAN, SCAN_BACKWARD
from shardc.ir.ops.scan_body import TIME, parse_body
from shardc.ir.ops.scan_parts import SCAN_PART, SCAN_PART_BACKWARD, SCAN_TURN, SCAN_TURN_BACKWARD
from shardc.ir.ops.shift import REGROUP, SHIFT_JOIN
from shardc.ir.schema import given
from shardc.passes.communication.causes import Causes, as_named
from shardc.passes.communication.split_batch import calls_by_name
from shardc.rules.window import WINDOWED

CUMULATIVE_PARTS = (CUMULATIVE_PART, CUMULATIVE_EXTREME_PART, EXTREME_GRADIENT_PART, EXTREME_OF_RUNS)
SCAN_PARTS = (SCAN_PART, SCAN_PART_BACKWARD, SCAN_TURN, SCAN_TURN_BACKWARD)
INHERENT = "a rank that has a part of a dim needs the rows about it; a gather would send all of them"


def explained_by_rows(node: fx.Node) -> bool:
    """Was the collective put in for rows of others, or for their sums?"""
    return node.target in (NEIGHBOUR_ROWS, MIRROR_ROWS) or any(
        user.target in (*CUMULATIVE_PARTS, STATES_BEHIND, *SCAN_PARTS) for user in node.users
    )


def reader_of(rows: fx.Node) -> fx.Node:
    """The call that reads the rows of a neighbour, or whose gradient they are."""
    if rows.target is MIRROR_ROWS:  # which are moved, where parts are unequal
        return next((user for user in rows.users if user.target is SHIFT_JOIN), rows)
    joined = next(iter(rows.users))
    if joined.target in (SCAN_TURN, SCAN_TURN_BACKWARD):  # what comes of a turn is read by the next one, and by all
        joined = next(user for user in rows.users if user.target in (SCAN_PART, SCAN_PART_BACKWARD))
    if joined.target in SCAN_PARTS:
        return joined
    if joined.target in (SHIFT_JOIN, *CUMULATIVE_PARTS, STATES_BEHIND):
        return joined
    node = joined
    while node.target is HALO:
        node = next(user for user in node.users if user.target is HALO or user.target in WINDOWED)
    while node.target not in WINDOWED:
        node = node.all_input_nodes[0]
    return node


def _state_trails(graph: Graph, causes: Causes, call: fx.Node, part: dict[str, Any], axes: list[str]) -> list[Trail]:
    """Why states of a recurrence travel, and how."""
    body, backward = parse_body(part["body"]), call.target is SCAN_BACKWARD
    timed = [(x, ls.index(TIME)) for (_, ls), x in zip(body.inputs, given(call)["inputs"], strict=True) if TIME in ls]
    what = "gradients of its states" if backward else "its states"
    how = f"{what} go from rank to rank, since a step is no factor and addend for each element"
    if part["affine"]:
        how = f"a factor and an addend for each element of {what} are gathered of all ranks"
    trails: list[Trail] = []
    for axis in axes:
        shown = as_named(graph, axis)
        starts = [(x, sum(map(len, type_of(x).dims[:dim]))) for x, dim in timed]
        starts = [(x, atom) for x, atom in starts if axis in type_of(x).placement[atom]]
        way = causes.way(starts, axis)
        cause = str(graph.seeds[way[0][0][0]].cause) if way else ""
        why = f"the steps of %{info(call).name} are sharded over {shown}: {how}"
        needed = f"%{info(call).name} ({op_name(call.target)}) continues where the ranks {_SIDE[backward]} end"
        steps = tuple(step(through, value) for (value, _), through in way if through is not None)
        roots = (way[0][0],) if way else ()
        trails.append(Trail(shown, why, needed, cause, False, backward, steps, roots, (call,)))
    return trails


_SIDE = ("before", "behind")
_CUMULATIVE = {"sum": "sum", "prod": "product", "logsumexp": "log-sum-exp"}


def halo_trails(graph: Graph, rows: fx.Node) -> list[Trail]:
    """A trail for each axis of an exchange of rows; none where the graph has not its call."""
    reader, args = reader_of(rows), given(rows)
    nodes = calls_by_name(graph)
    # Of a result that own rows are made of, these have the name.
    origins = [origin.of for node in (reader, *reader.users) if (origin := info(node).origin) is not None]
    call = next((nodes[name] for name in (info(reader).name, *origins) if name in nodes), None)
    if call is None:
        return []
    causes, said = Causes(graph), given(call)
    if call.target in (SCAN, SCAN_BACKWARD):
        return _state_trails(graph, causes, call, given(reader), given(rows)["axes"])
    moves = reader.target in (SHIFT_JOIN, *CUMULATIVE_PARTS, MIRROR_ROWS)
    if call.target is CARRIED_STATES:
        x, dim = said["addends"], type_of(said["decay"]).ndim - 1
    else:
        of = next(name for name in ("x", "g", "input", "self") if name in said)
        x, dim = said[of], said["dim"] if moves else args["dim"]
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
        lies = f"dim {dim} of %{info(x).name} is sharded over {shown}"
        needed = f"%{info(call).name} ({op_name(call.target)}) reads them"
        if call.target is EXTREME_GRADIENT:
            why = f"{lies}, and rows point to earlier ones: what those of a rank leave to another one comes as one sum"
        elif reader.target is EXTREME_OF_RUNS:
            why = f"{lies}, and its greatest or least row is found of one of each rank"
        elif reader.target in CUMULATIVE_PARTS:
            what = "extreme" if reader.target is CUMULATIVE_EXTREME_PART else _CUMULATIVE[given(reader)["kind"]]
            why = f"{lies}, and each {what} has all rows before it: those of other ranks come as one {what}"
        elif call.target is MIRROR:
            why = f"{lies}, and its rows are turned round: a rank's go to the one as far from the end"
        elif reader.target is STATES_BEHIND:
            why = f"{lies}, and each chunk's state has all chunks before it: those of other ranks come as one of a rank"
        elif call.target is REGROUP:
            why = f"{lies}, and rows go to their chunks, or back: a rank reads {args['length']} of another one"
        elif moves:
            why = f"{lies}, and its rows move by {abs(said['offset'])}: a rank reads {args['length']} of another one"
        else:
            side, length = "behind" if (args["shift"] == -1) != summed else "before", args["length"]
            why = f"{lies}, and kernels reach {length} element{'s' * (length > 1)} {side} a rank's own"
        if summed:
            needed = f"%{info(call).name} ({op_name(call.target)}) makes a part of them"
        if gradient:
            needed = f"%{info(call).name} ({op_name(call.target)}) leaves their gradient to the rank that has them"
        steps = tuple(step(through, value) for (value, _), through in way if through is not None)
        roots = (way[0][0],) if way else ()
        trails.append(Trail(shown, why, needed, cause, False, gradient, steps, roots, (call,)))
    return list({(t.why, t.cause): t for t in trails}.values())
