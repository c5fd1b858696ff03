"""What each pass ensures and preserves, as checks on graphs: V1 to V5 of the verifier (V6 runs the program).

Every check derives the property anew from the ops' rules and the types, trusting nothing that a pass
kept, and returns one line a violation. A violation is our bug, so the compiler asserts on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from weakref import WeakKeyDictionary

from torch import fx

from kernels_triton.base.buckets import starts
from shardc.cost.memory import memory
from shardc.ir.collectives import collectives as all_collectives
from shardc.ir.graph import Graph, Port, info, operands, producer, results, type_of
from shardc.ir.ops import collectives, local
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed, shapes_of
from shardc.ir.ops.exchange import COMBINE_ROWS, EXCHANGE_COUNTS, EXCHANGES, ROW_MOVES
from shardc.ir.ops.expert_capacity import LIMIT_ROWS
from shardc.ir.ops.experts import GATHER_ROWS, GROUP_ROWS, UNGROUP_ROWS
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.base import Check, split_of
from shardc.passes.fusion.clustering.memory_budget import allowed_peak
from shardc.passes.normalize.normalize import only_core_ops
from shardc.passes.sharding.insert_reshards import operand_types, output_types
from shardc.passes.sharding.settle_partials import produced
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule

MOVES = (*collectives.COLLECTIVES, collectives.reshard, local.shard_slice, local.slice_blocks)
Comparison = Callable[[Graph, Graph], list[str]]  # of a graph before a pass and after it


# Of a call the projection that its atoms agree with. As long as `project` gives the same, the call, its rule and the
# atoms of its tensors are the same too.
_nested: WeakKeyDictionary[fx.Node, Projection] = WeakKeyDictionary()


def no_axis_twice(graph: Graph) -> list[str]:
    """V1: in one value an axis of the mesh shards at most one atom, once, and is not pending as well."""
    axes = frozenset(graph.mesh.names)
    return [f"V1 {info(value).name}: {type_of(value)}" for value in graph.values() if _misused(type_of(value), axes)]


@lru_cache(maxsize=65536)
def _misused(type: TensorType, axes: frozenset[str]) -> bool:
    """Few types fill a graph of thousands of values, so each is looked at once."""
    used = [a for atom in type.atoms for a in atom.axes] + [a for a, _ in type.partial]
    return len(used) != len(set(used)) or not axes.issuperset(used)


def atoms_nest(graph: Graph) -> list[str]:
    """V2: the atoms of every operand and result agree with the factors of the rule, or it keeps them whole."""
    faults: list[str] = []
    for node in _ruled(graph):
        projection = project(node)
        if _nested.get(node) is projection:
            continue
        wrong: list[str] = []
        for value, pieces in zip(
            (*operands(node), *results(node)), (*projection.operands, *projection.results), strict=True
        ):
            if value is None:
                continue
            sizes = tuple(projection.sizes[p] for p in pieces)
            atoms = type_of(value).atoms
            fits = len(sizes) == len(atoms) and all(
                size == a.size or p in projection.tied | projection.followed
                for size, a, p in zip(sizes, atoms, pieces, strict=True)
            )
            if not fits:
                wrong.append(f"V2 {info(node).name}: {info(value).name} is {type_of(value)}, pieces {sizes}")
        if not wrong:
            _nested[node] = projection
        faults += wrong
    return faults


def results_follow_rules(graph: Graph) -> list[str]:
    """V3: every result is what the rule yields from the assignment; no blocked piece is split."""
    faults: list[str] = []
    for node in _ruled(graph):
        projection = project(node)
        split = split_of(node, projection)
        if set(split) & projection.blocked:
            faults.append(f"V3 {info(node).name} splits a piece that it needs whole")
        for k, value in enumerate(results(node)):
            if value is None:
                continue
            want = produced(type_of(value), projection, split, info(node).passes, k)
            if want != type_of(value):
                faults.append(f"V3 {info(value).name} is {type_of(value)}, its rule yields {want}")
    return faults


def operands_match(graph: Graph) -> list[str]:
    """V4: operands are as their op demands; pending sums reach linear operands, a sum's all or a product's one."""
    faults: list[str] = []
    for node in _ruled(graph):
        for value, need in zip(operands(node), operand_types(node), strict=True):
            if type_of(value) != need:
                faults.append(f"V4 {info(node).name} reads {info(value).name} as {type_of(value)}, needs {need}")
        projection = project(node)
        for axis in info(node).passes:
            pending = [i for i, v in enumerate(operands(node)) if axis in type_of(v).partial_axes]
            joint = projection.linear == "joint" and len(pending) == len(operands(node))
            single_operand = projection.linear != "joint" and len(pending) == 1 and pending[0] in projection.linear
            if not (joint or single_operand):
                faults.append(f"V4 {info(node).name} is not linear in what is pending over {axis}")
    return faults


def outputs_as_asked(graph: Graph) -> list[str]:
    """V5: outputs are placed as their parameter, buffer or annotation, none pending; no constant is communicated."""
    faults: list[str] = []
    for port, value, want in zip(graph.outputs, graph.output_values, output_types(graph), strict=True):
        if type_of(value) != want:
            faults.append(f"V5 {port.name} is {type_of(value)}, asked for {want}")
    for node in graph.calls():
        if node.target in collectives.COLLECTIVES and info(node).constant:
            faults.append(f"V5 {info(node).name} communicates a constant")
    return faults


def buckets_match(graph: Graph) -> list[str]:
    """Each packed tensor goes through one collective and is unpacked once, completely, in the layout of the pack."""
    faults: list[str] = []
    for pack in graph.calls():
        if pack.target is not PACK:
            continue
        args, name = given(pack), info(pack).name
        readers = list(pack.users)
        moved = readers[0] if len(readers) == 1 else None
        if moved is None or moved.target not in collectives.COLLECTIVES or [u.target for u in moved.users] != [UNPACK]:
            faults.append(f"{name} is not packed for one collective, unpacked once")
            continue
        (unpack,) = moved.users
        layout, mesh = given(unpack), graph.mesh
        group = mesh.size(given(moved)["axes"])
        scatters, gathers = moved.target is collectives.reduce_scatter, moved.target is collectives.all_gather
        if (args["rows"], layout["rows"]) != (group if scatters else 1, group if gathers else 1):
            faults.append(f"{name} has {args['rows']} rows, and {layout['rows']} when it is unpacked")
        mids = [-(-mid // args["rows"]) for mid in args["mids"]]
        if (args["leads"], mids, args["unit"]) != (layout["leads"], layout["mids"], layout["unit"]):
            faults.append(f"{name} is not unpacked as it was packed")
        shapes = shapes_of(layout["shapes"], layout["ranks"])
        for i, (x, lead, mid) in enumerate(zip(args["xs"], args["leads"], args["mids"], strict=True)):
            member_type, unpacked_numel = type_of(x), math.prod(shapes[i])
            numel = math.prod(member_type.local_shape(mesh))
            if member_type.dtype != type_of(pack).dtype or numel % (lead * mid):
                faults.append(f"{name} packs {info(x).name}, {member_type}, as {lead} x {mid}")
            elif unpacked_numel * mid != numel * layout["sizes"][i]:
                faults.append(f"{name} packs {numel} elements of {info(x).name}, and {unpacked_numel} are unpacked")
        for value in unpack.users:
            if type_of(value).local_shape(mesh) != tuple(shapes[value.args[1]]):  # type: ignore[index]
                faults.append(f"{info(value).name} is {type_of(value)}, unpacked as {shapes[value.args[1]]}")  # type: ignore[index]
        numels = [math.prod(type_of(x).local_shape(mesh)) for x in args["xs"]]
        width = starts(columns_packed(numels, args["mids"], args["rows"]), args["unit"])[-1]
        if math.prod(type_of(pack).local_shape(mesh)) != width * args["rows"]:
            faults.append(f"{name} is {type_of(pack)}, of {args['rows']} rows of {width}")
    return faults


def groups_agree(graph: Graph) -> list[str]:
    """Rows in the order of their experts meet rows of the same grouping alone, and stay where it has put them, or are
    sent to their experts by the counts of that grouping. What was sent comes back before it is ungrouped.

    Of a stage's inputs it is not known which grouping they are of, nor where they are.
    """
    faults: list[str] = []
    grouping: dict[fx.Node, str] = {}  # value -> the name of its grouping; "" if it is not known
    at_experts: dict[fx.Node, bool] = {}  # value -> whether it lies by the ranks of experts; nothing if it is not known
    for node in graph.placeholders:
        if type_of(node).ragged:
            grouping[node] = ""
    for node in graph.calls():
        name, rows = info(node).name, [v for v in operands(node) if type_of(v).ragged]
        origin = info(node).origin
        if node.target is GROUP_ROWS:  # recomputed, it yields the same
            of = origin.of if origin is not None and origin.kind == "recomputed" else name
        else:
            known = {grouping.get(v, "") for v in rows} - {""}
            if len(known) > 1:
                faults.append(f"{name} reads rows of {' and '.join(sorted(known))}")
            of = next(iter(known), "")
        if node.target is LIMIT_ROWS and given(node)["layout"] and type_of(node).is_sharded:
            faults.append(f"{name} limits a rank's rows in groups")
        where, wrong = _where(node, rows, at_experts)
        faults += wrong
        for value in results(node):
            if value is None or not type_of(value).ragged:
                continue
            if where is not None:
                at_experts[value] = where
            if not rows and node.target is not GROUP_ROWS:
                faults.append(f"{info(value).name} is {type_of(value)}, of rows that nothing has grouped")
            grouping[value] = of
        if node.target in MOVES and rows and node.target not in EXCHANGES and not _is_exchange(node, rows):
            before, after = type_of(rows[0]), type_of(node)
            moved = any(before.placement[i] != after.placement[i] for i in before.bound_atoms)
            if before.ragged != after.ragged or moved:
                faults.append(f"{name} moves rows that lie as {before}, to {after}")
    for port, value in _ports(graph, "outputs"):
        if type_of(value).ragged and port.role not in ("value", "sum"):
            faults.append(f"{port.role} {port.name} is {type_of(value)}, in an order of each rank's own")
    return faults


def _is_exchange(node: fx.Node, rows: list[fx.Node]) -> bool:
    """A reshard that becomes an exchange: axes go from dim 0 to the ragged dim, or the other way."""
    if node.target is not collectives.reshard or not rows:
        return False
    before, after = type_of(rows[0]), type_of(node)
    ends = [[type.placement[i] for i in sorted(type.bound_atoms)] for type in (before, after)]
    axes = [{axis for placed in end for axis in placed} for end in ends]
    return ends[0] != ends[1] and axes[0] == axes[1]


def _where(node: fx.Node, rows: list[fx.Node], at_experts: Mapping[fx.Node, bool]) -> tuple[bool | None, list[str]]:
    """Whether the rows that a call yields lie by the ranks of experts, None if it is not known; and what is wrong."""
    name = info(node).name
    known = {at_experts[v] for v in rows if v in at_experts}
    if node.target is GROUP_ROWS:
        return False, []
    if node.target in EXCHANGES:
        moved, *notes = rows
        offs = moved if node.target is EXCHANGE_COUNTS else notes[0]
        faults: list[str] = []
        if producer(offs)[0].target is not GROUP_ROWS and offs.op != "placeholder":
            faults.append(f"{name} sends rows whose groups end at {info(offs).name}, which no grouping yields")
        if node.target in ROW_MOVES and producer(notes[1])[0].target is not EXCHANGE_COUNTS:
            faults += [] if notes[1].op == "placeholder" else [f"{name} goes by {info(notes[1]).name}, no counts"]
        if at_experts.get(moved, node.target is COMBINE_ROWS) != (node.target is COMBINE_ROWS):
            faults.append(f"{name} moves {info(moved).name}, which is there already")
        return node.target is not COMBINE_ROWS, faults
    if len(known) > 1:
        return None, [f"{name} reads rows at their tokens and rows at their experts"]
    where = next(iter(known), None)
    if where and node.target in (GATHER_ROWS, UNGROUP_ROWS):
        return None, [f"{name} reads rows that have not come back from their experts"]
    return (not where if where is not None else None) if _is_exchange(node, rows) else where, []


def microbatches_summed(graph: Graph) -> list[str]:
    """Of a step of several microbatches, the loss and each gradient is a sum over them, or a cast of one."""
    if graph.microbatches == 1:
        return []
    faults: list[str] = []
    for port, value in _ports(graph, "outputs"):
        sum_of = value if value.target is ACCUMULATE else value.args[0] if value.args else None
        if port.role in ("loss", "grad") and getattr(sum_of, "target", None) is not ACCUMULATE:
            faults.append(f"{port.role} {port.name} is no sum over microbatches")
    return faults


def updates_have_inputs(graph: Graph) -> list[str]:
    """What a step updates it has read: a new parameter, buffer or state of the type of the old one."""
    input_types = {(port.role, port.name): type_of(value) for port, value in _ports(graph, "inputs")}
    faults: list[str] = []
    for port, value in _ports(graph, "outputs"):
        if port.role not in ("param", "state", "buffer"):
            continue
        old, new = input_types.get((port.role, port.name)), type_of(value)
        if old is None:
            faults.append(f"{port.role} {port.name} is updated and never read")
        elif (old.dtype, old.shape) != (new.dtype, new.shape):
            faults.append(f"{port.role} {port.name} was {old} and becomes {new}")
    return faults


def same_interface(before: Graph, after: Graph) -> list[str]:
    """A pass over a rank's graph keeps its inputs and outputs: names, roles, order and types."""
    faults: list[str] = []
    for side in ("inputs", "outputs"):
        ports = [(port, type_of(value)) for port, value in _ports(before, side)]
        others = [(port, type_of(value)) for port, value in _ports(after, side)]
        if ports != others:
            changed = [f"{a[0].name}: {a[1]} -> {b[1]}" for a, b in zip(ports, others, strict=False) if a != b]
            faults.append(f"{side} changed: {changed or f'{len(ports)} -> {len(others)}'}")
    return faults


def collectives_in_order(before: Graph, after: Graph) -> list[str]:
    """A pass that only makes kernels adds no collective and moves none past another: ranks meet as they did. One whose
    result nothing reads any more may go (a gather for a call that a kernel makes of what it has already)."""
    was, now = (
        [(c.kind, c.axes, c.op, c.payload_bytes, c.times) for c in all_collectives(graph)] for graph in (before, after)
    )
    remaining = iter(was)
    if all(collective in remaining for collective in now):
        return []
    return [f"{len(now)} collectives are not {len(was)} of before in their order"]


def same_calls(before: Graph, after: Graph) -> list[str]:
    """A pass that moves calls keeps each as it is."""
    was, now = ({info(node).name: (node.target, repr(node.args)) for node in g.calls()} for g in (before, after))
    changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"not the same calls: {', '.join(sorted(changed)[:5])}"] if changed else []


def same_but_for_copies(before: Graph, after: Graph) -> list[str]:
    """A pass that copies values keeps each call on what it read, or on a copy of that; views may be made again."""
    was, returned = _but_for_copies(before, {})
    now, returned_now = _but_for_copies(after, {text: name for name, text in was.items()}, was)
    faults = [f"{name} is not the call that it was" for name, text in now.items() if was.get(name) != text]
    return faults + ["other outputs"] * (returned != returned_now)


def _but_for_copies(
    graph: Graph, repeats: Mapping[str, str], known: Mapping[str, str] | None = None
) -> tuple[dict[str, str], list[str]]:
    """The text of each call by its name, and the names of outputs, where a copy counts as what it is a copy of; and a
    call that is not `known` as the one that it repeats."""
    stands_for, texts = dict[fx.Node, str](), dict[str, str]()
    name_of = lambda value: stands_for.get(value, info(value).name)  # noqa: E731
    for node in graph.fx.nodes:
        if node.op == "call_function":
            name = info(node).name
            text = f"{node.target} {fx.map_arg((node.args, node.kwargs), lambda value: f'%{name_of(value)}')}"
            if node.target in HOST_COPIES:
                stands_for[node] = name_of(operands(node)[0])
            elif known is not None and name not in known and text in repeats:
                stands_for[node] = repeats[text]
            else:
                texts[name] = text
    return texts, [name_of(value) for value in graph.output_values]


def peak_within_bound(before: Graph, after: Graph) -> list[str]:
    """Kernels may hold at most 1/1024 more at the peak than the calls that they replace."""
    was, now = memory(before).peak, memory(after).peak
    return [] if now <= allowed_peak(was) else [f"the peak rises from {was} to {now} bytes"]


def _ports(graph: Graph, side: str) -> list[tuple[Port, fx.Node]]:
    if side == "inputs":
        return list(zip(graph.inputs, graph.placeholders, strict=True))
    return list(zip(graph.outputs, graph.output_values, strict=True))


def _ruled(graph: Graph) -> list[fx.Node]:
    """Calls with a rule that do not run replicated on constants."""
    return [
        n
        for n in graph.calls()
        if find_rule(n.target) is not None and not all(info(v).constant and not type_of(v).axes for v in operands(n))
    ]


ENSURES: dict[str, tuple[Check, ...]] = {
    "normalize": (only_core_ops,),
    "group_experts": (only_core_ops, groups_agree),
    "sum_parts": (only_core_ops,),
    "accumulate": (microbatches_summed,),
    "append_updates": (updates_have_inputs,),
    "atomize": (atoms_nest,),
    "find_sequences": (atoms_nest,),
    "seed": (atoms_nest,),
    "propagate": (no_axis_twice, atoms_nest),
    "split_softmax": (no_axis_twice, atoms_nest),
    "store": (no_axis_twice, atoms_nest),
    "assign": (no_axis_twice,),
    "group_sums": (no_axis_twice,),
    "settle_partials": (no_axis_twice, results_follow_rules),
    "insert_reshards": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "lower_reshards": (no_axis_twice, operands_match, outputs_as_asked, groups_agree),
    "combine": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "recompute": (no_axis_twice, results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "localize": (no_axis_twice, outputs_as_asked, groups_agree),
    "split_batch": (no_axis_twice, outputs_as_asked, groups_agree),
    "align": (no_axis_twice, outputs_as_asked),
    **dict.fromkeys(("overlap", "late_gradients"), (no_axis_twice, outputs_as_asked, groups_agree)),
    "decompose": (no_axis_twice, outputs_as_asked),
    **dict.fromkeys(
        ("bucket", "prefetch", "offload", "offload_states"), (no_axis_twice, outputs_as_asked, buckets_match)
    ),
    "online_softmax": (no_axis_twice, outputs_as_asked),
}

# Of passes that leave the graph they are given as it is: checks of what must be the same before and after.
PRESERVES: dict[str, tuple[Comparison, ...]] = {
    "align": (same_interface, collectives_in_order),
    "overlap": (same_interface, same_calls),
    "late_gradients": (same_interface, same_calls),
    "decompose": (same_interface,),
    "bucket": (same_interface,),
    "prefetch": (same_interface, same_calls, collectives_in_order),
    "pick_columns": (same_interface, collectives_in_order),
    "merge_updates": (same_interface, collectives_in_order),
    "fuse": (same_interface, collectives_in_order, peak_within_bound),
    "offload": (same_interface, same_but_for_copies, collectives_in_order),
    "offload_states": (same_interface, same_but_for_copies, collectives_in_order),
}
