"""What each pass ensures, as checks on the graph: V1 to V5 of the verifier (V6 runs the program).

Every check derives the property anew from the ops' rules and the types, trusting nothing that a pass
kept, and returns one line a violation. A violation is our bug, so the compiler asserts on it.
"""

from __future__ import annotations

import math

from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.ir.ops import collectives
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed, shapes_of, starts
from shardc.ir.schema import given
from shardc.passes.base import Check, split_of
from shardc.passes.insert_reshards import operand_types, output_types
from shardc.passes.settle_partials import produced
from shardc.rules.projection import project
from shardc.rules.registry import find_rule


def no_axis_twice(graph: Graph) -> list[str]:
    """V1: in one value an axis of the mesh shards at most one atom, once, and is not pending as well."""
    found: list[str] = []
    for value in graph.values():
        type = type_of(value)
        axes = [a for atom in type.atoms for a in atom.axes] + [a for a, _ in type.partial]
        if len(axes) != len(set(axes)) or not set(axes) <= set(graph.mesh.names):
            found.append(f"V1 {info(value).name}: {type}")
    return found


def atoms_nest(graph: Graph) -> list[str]:
    """V2: the atoms of every operand and result agree with the factors of the rule, or it keeps them whole."""
    found: list[str] = []
    for node in _ruled(graph):
        projection = project(node)
        for value, pieces in zip(
            (*operands(node), *results(node)), (*projection.operands, *projection.results), strict=True
        ):
            if value is None:
                continue
            sizes = tuple(projection.sizes[p] for p in pieces)
            if sizes != tuple(a.size for a in type_of(value).atoms):
                found.append(f"V2 {info(node).name}: {info(value).name} is {type_of(value)}, pieces {sizes}")
    return found


def results_follow_rules(graph: Graph) -> list[str]:
    """V3: every result is what the rule yields from the assignment; no blocked piece is split."""
    found: list[str] = []
    for node in _ruled(graph):
        projection = project(node)
        split = split_of(node, projection)
        if set(split) & projection.blocked:
            found.append(f"V3 {info(node).name} splits a piece that it needs whole")
        for k, value in enumerate(results(node)):
            if value is None:
                continue
            want = produced(type_of(value), projection, split, info(node).passes, k)
            if want != type_of(value):
                found.append(f"V3 {info(value).name} is {type_of(value)}, its rule yields {want}")
    return found


def operands_match(graph: Graph) -> list[str]:
    """V4: operands are as their op demands; pending sums reach linear operands, a sum's all or a product's one."""
    found: list[str] = []
    for node in _ruled(graph):
        for value, need in zip(operands(node), operand_types(node), strict=True):
            if type_of(value) != need:
                found.append(f"V4 {info(node).name} reads {info(value).name} as {type_of(value)}, needs {need}")
        projection = project(node)
        for axis in info(node).passes:
            pending = [i for i, v in enumerate(operands(node)) if axis in type_of(v).partial_axes]
            joint = projection.linear == "joint" and len(pending) == len(operands(node))
            each = projection.linear != "joint" and len(pending) == 1 and pending[0] in projection.linear
            if not (joint or each):
                found.append(f"V4 {info(node).name} is not linear in what is pending over {axis}")
    return found


def outputs_as_asked(graph: Graph) -> list[str]:
    """V5: outputs are placed as their parameter, buffer or annotation, none pending; no constant is communicated."""
    found: list[str] = []
    for port, value, want in zip(graph.outputs, graph.output_values, output_types(graph), strict=True):
        if type_of(value) != want:
            found.append(f"V5 {port.name} is {type_of(value)}, asked for {want}")
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES and info(node).constant:
            found.append(f"V5 {info(node).name} communicates a constant")
    return found


def buckets_match(graph: Graph) -> list[str]:
    """What is packed goes through one collective and is unpacked as it was laid out, whole and once."""
    found: list[str] = []
    for pack in graph.calls():
        if pack.target is not PACK:
            continue
        args, name = given(pack), info(pack).name
        readers = list(pack.users)
        moved = readers[0] if len(readers) == 1 else None
        if moved is None or moved.target not in collectives.COLLECTIVES or [u.target for u in moved.users] != [UNPACK]:
            found.append(f"{name} is not packed for one collective, unpacked once")
            continue
        (back,) = moved.users
        after, mesh = given(back), graph.mesh
        group = mesh.size(given(moved)["axes"])
        scatters, gathers = moved.target is collectives.reduce_scatter, moved.target is collectives.all_gather
        if (args["rows"], after["rows"]) != (group if scatters else 1, group if gathers else 1):
            found.append(f"{name} has {args['rows']} rows, and {after['rows']} when it is unpacked")
        mids = [-(-mid // args["rows"]) for mid in args["mids"]]
        if (args["leads"], mids, args["unit"]) != (after["leads"], after["mids"], after["unit"]):
            found.append(f"{name} is not unpacked as it was packed")
        shapes = shapes_of(after["shapes"], after["ranks"])
        for i, (x, lead, mid) in enumerate(zip(args["xs"], args["leads"], args["mids"], strict=True)):
            own, made = type_of(x), math.prod(shapes[i])
            numel = math.prod(own.local_shape(mesh))
            if own.dtype != type_of(pack).dtype or numel % (lead * mid):
                found.append(f"{name} packs {info(x).name}, {own}, as {lead} x {mid}")
            elif made * mid != numel * after["sizes"][i]:
                found.append(f"{name} packs {numel} elements of {info(x).name}, and {made} are unpacked")
        for value in back.users:
            if type_of(value).local_shape(mesh) != tuple(shapes[value.args[1]]):  # type: ignore[index]
                found.append(f"{info(value).name} is {type_of(value)}, unpacked as {shapes[value.args[1]]}")  # type: ignore[index]
        numels = [math.prod(type_of(x).local_shape(mesh)) for x in args["xs"]]
        width = starts(columns_packed(numels, args["mids"], args["rows"]), args["unit"])[-1]
        if math.prod(type_of(pack).local_shape(mesh)) != width * args["rows"]:
            found.append(f"{name} is {type_of(pack)}, of {args['rows']} rows of {width}")
    return found


def _ruled(graph: Graph) -> list[fx.Node]:
    """Calls with a rule that do not run replicated on constants."""
    return [
        n
        for n in graph.calls()
        if find_rule(n.target) is not None and not all(info(v).constant and not type_of(v).axes for v in operands(n))
    ]


ENSURES: dict[str, tuple[Check, ...]] = {
    "atomize": (atoms_nest,),
    "seed": (atoms_nest,),
    "propagate": (no_axis_twice, atoms_nest),
    "split_softmax": (no_axis_twice, atoms_nest),
    "assign": (no_axis_twice,),
    "settle_partials": (no_axis_twice, results_follow_rules),
    "insert_reshards": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked),
    "lower_reshards": (no_axis_twice, operands_match, outputs_as_asked),
    "combine": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked),
    "recompute": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked),
    "localize": (no_axis_twice, outputs_as_asked),
    "align": (no_axis_twice, outputs_as_asked),
    "bucket": (no_axis_twice, outputs_as_asked, buckets_match),
    "online_softmax": (no_axis_twice, outputs_as_asked),
}
