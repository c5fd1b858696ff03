"""What each pass ensures and preserves, as checks on graphs: V1 to V5 of the verifier (V6 runs the program).

Every check derives the property anew from the ops' rules and the types, trusting nothing that a pass
kept, and returns one line a violation. A violation is our bug, so the compiler asserts on it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import fx

from kernels_triton.base.buckets import starts
from shardc.cost.memory import memory
from shardc.ir.collectives import what_moves
from shardc.ir.graph import Graph, Port, info, operands, results, type_of
from shardc.ir.ops import collectives
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed, shapes_of
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.ir.schema import given
from shardc.passes.base import Check, split_of
from shardc.passes.fusion.clustering.memory_budget import allowed_peak
from shardc.passes.normalize.normalize import only_core_ops
from shardc.passes.sharding.insert_reshards import operand_types, output_types
from shardc.passes.sharding.settle_partials import produced
from shardc.passes.verify_groups import groups_agree
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule
from shardc.torch_compat import args_of, inputs_of, kwargs_of

Comparison = Callable[[Graph, Graph], list[str]]  # of a graph before a pass and after it
MOVES = (ACCUMULATE, *collectives.COLLECTIVES)  # what a flat tensor is packed for


# Of a call the projection that its atoms agree with. As long as `project` gives the same, all of it is the same.
_nested: WeakKeyDictionary[fx.Node, Projection] = WeakKeyDictionary()


@dataclass
class _Held:
    """What a check has read of each call of a graph for which it held, and the contents of those calls. A call is
    checked again only where something that was read has changed, and its contents are new: equal layers have few."""

    read: dict[fx.Node, list[object]] = field(default_factory=dict[fx.Node, list[object]])
    contents: set[object] = field(default_factory=set[object])

    def add(self, node: fx.Node, read: list[object], content: object) -> None:
        self.read[node] = read
        self.contents.add(content)


# By graphs and not by nodes, which what is read would keep.
_results_held: WeakKeyDictionary[Graph, _Held] = WeakKeyDictionary()
_operands_held: WeakKeyDictionary[Graph, _Held] = WeakKeyDictionary()


def atoms_nest(graph: Graph) -> list[str]:
    """V2: the atoms of every operand and result agree with the factors of the rule, or it keeps them whole. A sum over
    microbatches has those of its term: the two are one tensor in memory, which may be read in other graphs."""
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
        if node.target is ACCUMULATE and projection.operands != projection.results:
            (term,) = operands(node)
            wrong.append(f"V2 {info(node).name} is {type_of(node)}, its term {info(term).name} {type_of(term)}")
        if not wrong:
            _nested[node] = projection
        faults += wrong
    return faults


def results_follow_rules(graph: Graph) -> list[str]:
    """V3: every result is what the rule yields from the assignment; no blocked piece is split."""
    faults: list[str] = []
    held = _results_held.setdefault(graph, _Held())
    for node, read, content in _changed(graph, held):
        projection = project(node)
        split = split_of(node, projection)
        wrong: list[str] = []
        if set(split) & projection.blocked:
            wrong.append(f"V3 {info(node).name} splits a piece that it needs whole")
        for k, value in enumerate(results(node)):
            if value is None:
                continue
            want = produced(type_of(value), projection, split, info(node).passes, k)
            if want != type_of(value):
                wrong.append(f"V3 {info(value).name} is {type_of(value)}, its rule yields {want}")
        if not wrong:
            held.add(node, read, content)
        faults += wrong
    return faults


def operands_match(graph: Graph) -> list[str]:
    """V4: operands are as their op demands; pending sums reach linear operands, a sum's all or a product's one."""
    faults: list[str] = []
    held = _operands_held.setdefault(graph, _Held())
    for node, read, content in _changed(graph, held):
        wrong: list[str] = []
        for value, need in zip(operands(node), operand_types(node), strict=True):
            if type_of(value) != need:
                wrong.append(f"V4 {info(node).name} reads {info(value).name} as {type_of(value)}, needs {need}")
        projection = project(node)
        for axis in info(node).passes:
            pending = [i for i, v in enumerate(operands(node)) if axis in type_of(v).partial_axes]
            joint = projection.linear == "joint" and len(pending) == len(operands(node))
            single_operand = projection.linear != "joint" and len(pending) == 1 and pending[0] in projection.linear
            if not (joint or single_operand):
                wrong.append(f"V4 {info(node).name} is not linear in what is pending over {axis}")
        if not wrong:
            held.add(node, read, content)
        faults += wrong
    return faults


def outputs_as_asked(graph: Graph) -> list[str]:
    """V5: outputs are placed as their parameter, buffer or annotation, none pending; no constant is communicated."""
    faults: list[str] = []
    for port, value, want in zip(graph.outputs, graph.output_values, output_types(graph), strict=True):
        if type_of(value) != want:
            faults.append(f"V5 {port.name} is {type_of(value)}, asked for {want}")
    for target in collectives.COLLECTIVES:
        for node in graph.calls_of(target):
            if info(node).constant:
                faults.append(f"V5 {info(node).name} communicates a constant")
    return faults


def buckets_match(graph: Graph) -> list[str]:
    """Each packed tensor goes through one collective or sum, and is unpacked once, whole, in the layout of the pack."""
    faults: list[str] = []
    for pack in graph.calls_of(PACK):
        args, name = given(pack), info(pack).name
        readers = list(pack.users)
        moved = readers[0] if len(readers) == 1 else None
        if moved is None or moved.target not in MOVES or [u.target for u in moved.users] != [UNPACK]:
            faults.append(f"{name} is not packed for one collective, unpacked once")
            continue
        (unpack,) = moved.users
        layout, mesh = given(unpack), graph.mesh
        group = mesh.size(given(moved).get("axes", ()))
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
    was, now = map(what_moves, (before, after))
    if was == now:
        return []
    remaining = iter(was)
    if all(collective in remaining for collective in now):
        return []
    return [f"{len(now)} collectives are not {len(was)} of before in their order"]


def same_calls(before: Graph, after: Graph) -> list[str]:
    """A pass that moves calls keeps each as it is."""
    was, now = ({info(node).name: node for node in graph.calls()} for graph in (before, after))
    changed = [name for name in {**was, **now} if name not in was or name not in now or not _same(was[name], now[name])]
    return [f"not the same calls: {', '.join(sorted(changed)[:5])}"] if changed else []


def _same(call: fx.Node, other: fx.Node) -> bool:
    """Do two calls of graphs do the same with values of the same names?"""
    return (
        call.target is other.target
        and _alike(args_of(call), args_of(other))
        and _alike(kwargs_of(call), kwargs_of(other))
    )


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is fx.Node:
        return info(a).name == info(b).name
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    return repr(a) == repr(b) if isinstance(a, float | complex) else bool(a == b)  # nan is nan, and -0.0 is not 0.0


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
        if find_rule(n.target) is not None
        and not all(info(v).constant and not type_of(v).is_sharded for v in operands(n))
    ]


def _changed(graph: Graph, held: _Held) -> Iterator[tuple[fx.Node, list[object], object]]:
    """The calls with a rule that are not known to hold, each with what is read of it and with its contents: what the
    caller adds to `held` of a call that holds. Nothing of it is changed in place: another value is another object."""
    for node in _ruled(graph):
        read: list[object] = [node.target, args_of(node), kwargs_of(node), *map(info, inputs_of(node)), info(node)]
        for value in node.users:
            if value.target is operator.getitem:
                read += (args_of(value), info(value))
        known = held.read.get(node)
        if known is not None and len(known) == len(read) and all(map(operator.is_, known, read)):
            continue
        content = _content(node)
        if content in held.contents:  # asked for late: the caller adds contents between two calls
            held.read[node] = read
        else:
            yield node, read, content


def _content(node: fx.Node) -> object:
    """A key of all that V3 and V4 depend on. It holds no names, and no readers."""
    about = info(node)
    tensors = {value: (k, info(value).type, info(value).constant) for k, value in enumerate(inputs_of(node))}

    def frozen(argument: Any) -> object:
        if type(argument) is fx.Node:
            return tensors[argument]
        if isinstance(argument, list | tuple):
            return tuple(map(frozen, argument))
        if isinstance(argument, dict):
            return tuple((name, frozen(item)) for name, item in argument.items())
        return type(argument), argument  # 1, 1.0 and True are equal

    result_types = tuple(None if value is None else type_of(value) for value in results(node))
    called = id(node.target), frozen(args_of(node)), frozen(kwargs_of(node))
    return called, about.results, about.assignment, about.passes, result_types


ENSURES: dict[str, tuple[Check, ...]] = {
    "normalize": (only_core_ops,),
    "group_experts": (only_core_ops, groups_agree),
    "sum_parts": (only_core_ops,),
    "accumulate": (microbatches_summed,),
    "append_updates": (updates_have_inputs,),
    "atomize": (atoms_nest,),
    "find_sequences": (atoms_nest,),
    "seed": (atoms_nest,),
    "propagate": (atoms_nest,),
    "split_softmax": (atoms_nest,),
    "store": (atoms_nest,),
    "settle_partials": (results_follow_rules,),
    "insert_reshards": (results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "lower_reshards": (operands_match, outputs_as_asked, groups_agree),
    "combine": (results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "recompute": (results_follow_rules, operands_match, outputs_as_asked, groups_agree),
    "localize": (outputs_as_asked, groups_agree),
    "split_batch": (outputs_as_asked, groups_agree),
    **dict.fromkeys(("align", "decompose", "online_softmax"), (outputs_as_asked,)),
    **dict.fromkeys(("overlap", "late_gradients"), (outputs_as_asked, groups_agree)),
    **dict.fromkeys(("bucket", "prefetch", "join_sums"), (outputs_as_asked, buckets_match)),
    **dict.fromkeys(("offload", "offload_states"), (outputs_as_asked, buckets_match)),
}

# Of passes that leave the graph they are given as it is: checks of what must be the same before and after.
PRESERVES: dict[str, tuple[Comparison, ...]] = {
    "align": (same_interface, collectives_in_order),
    "overlap": (same_interface, same_calls),
    "late_gradients": (same_interface, same_calls),
    "join_squares": (same_interface,),
    "sum_products": (same_interface,),
    "decompose": (same_interface,),
    "bucket": (same_interface,),
    "prefetch": (same_interface, same_calls, collectives_in_order),
    "bias_products": (same_interface,),
    "pick_columns": (same_interface, collectives_in_order),
    "cheaper_calls": (same_interface, collectives_in_order),
    "merge_updates": (same_interface, collectives_in_order),
    "fuse": (same_interface, collectives_in_order, peak_within_bound),
    "join_sums": (same_interface, collectives_in_order),
    "offload": (same_interface, same_but_for_copies, collectives_in_order),
    "offload_states": (same_interface, same_but_for_copies, collectives_in_order),
}
