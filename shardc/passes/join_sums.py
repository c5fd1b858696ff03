"""join_sums: small sums over microbatches are one flat tensor, which each microbatch adds to by one call.

    %d.a.b.sum = accumulate(%d.a.b)              %flat = pack([%d.a.b, %d.c.b])
    %d.c.b.sum = accumulate(%d.c.b)      ->      %sum = accumulate(%flat)
    %b.new = sub(%b, %d.a.b.sum)                 %d.a.b.sum, %d.c.b.sum = unpack(%sum)
                                                 %b.new = sub(%b, %d.a.b.sum)

Gradients of biases and norms are small and many, as is the loss, and each had a call of its own in every microbatch.
Kernels, casts and reductions write their terms into the flat tensor (`ir/buckets.pieces`); the first microbatch's
becomes the sum. The flat tensor is there from its first term to its last, so it is bounded (`ir/small_sums`).

What is unpacked are views, so what is returned and held for longer than its sum, such as the loss, is copied, once a
step. So is what buckets of reductions take: they lie in one piece.

Needs a localized body, and runs behind the kernels, which say in which dtype terms are made. Ensures the same sums, to
the bit, under the same names.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import fx

from kernels_triton.base.buckets import starts, unit_of
from shardc.ir.graph import Graph, info, insert, operands, set_info, type_of, update
from shardc.ir.microbatch import Sections, sections
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed
from shardc.ir.small_sums import is_small, joined
from shardc.ir.storages import Storage, storages
from shardc.ir.types import Atom, TensorType
from shardc.passes.base import Pass

CLONE = torch.ops.aten.clone.default


@dataclass(frozen=True)
class JoinSums(Pass):
    """Join the small sums of a body of several microbatches."""

    def run(self, graph: Graph) -> Graph:
        if graph.microbatches == 1 or len(graph.calls_of(ACCUMULATE)) < 2:
            return graph
        copied = graph.copy()
        run, of = sections(copied), storages(copied)
        groups = _groups(copied, run, of)
        if not groups:
            return graph
        after = [n for n in copied.fx.nodes if n.op == "call_function" and not any(n in when for when in run)]
        for node in after:
            copied.output_node.prepend(node)  # in the order that they run in
        for group in groups:
            _join(copied, group, after[0] if after else copied.output_node)
        return copied


def separate_sums(graph: Graph) -> None:
    """Undo the pass, in place: stages are cut from bodies whose sums are apart."""
    for unpacked in graph.calls_of(UNPACK):
        (summed,) = operands(unpacked)
        if summed.target is not ACCUMULATE:
            continue
        (packed,) = operands(summed)
        for view in list(unpacked.users):
            copies = [user for user in view.users if user.target is CLONE]
            result = copies[0] if len(copies) == len(view.users) == 1 else view
            with graph.fx.inserting_before(packed):
                term = operands(packed)[int(view.args[1])]  # type: ignore[arg-type]
                alone = graph.call(ACCUMULATE, (term,), like=result, type=type_of(result))
            graph.replace_value(result, alone)
            set_info(alone, info(result))
    graph.erase_dead()


def _groups(graph: Graph, run: Sections, of: dict[fx.Node, Storage]) -> list[list[fx.Node]]:
    """The sums that are joined, in the order of their terms. Each term is of one microbatch."""
    outputs = zip(graph.outputs, graph.output_values, strict=True)
    returned = {of[value] for port, value in outputs if port.role != "grad" and value.target is not ACCUMULATE}
    index_of = {node: index for index, node in enumerate(graph.fx.nodes)}

    def term(call: fx.Node) -> fx.Node:
        return operands(call)[0]

    sums = sorted(graph.calls_of(ACCUMULATE), key=lambda call: index_of[term(call)])
    small = [
        call
        for call in sums
        if term(call).op == "call_function"
        and term(call) in run.microbatch
        and not type_of(call).ragged
        and is_small(graph, term(call), of)
        and of[call] not in returned  # through a view, which would keep all
    ]
    groups = joined(small, lambda call: (type_of(call).dtype, type_of(call).partial), lambda call: of[term(call)].bytes)
    return [group for group in groups if len(group) > 1]


def _join(graph: Graph, sums: list[fx.Node], once: fx.Node) -> None:
    """`accumulate` calls, whose own nodes become results of the `unpack`, or copies of them. `once` is the first node
    that runs once a step."""
    mesh, terms = graph.mesh, [operands(call)[0] for call in sums]
    like, last = sums[-1], terms[-1]
    shapes = [type_of(call).local_shape(mesh) for call in sums]
    numels, ones = [math.prod(shape) for shape in shapes], [1] * len(sums)
    unit = unit_of(type_of(like).dtype)
    type = _flat_type(graph, sums, starts(columns_packed(numels, numels, 1), unit)[-1])
    name = f"{info(like).name}.joined"
    with graph.fx.inserting_after(last):
        packed = graph.call(PACK, (terms, ones, numels, 1, unit), like=like, type=type, name=f"{name}.pack")
    with graph.fx.inserting_after(packed):
        summed = graph.call(ACCUMULATE, (packed,), like=like, type=type, name=name)
    layout = (ones, numels, 1, unit, numels, [n for shape in shapes for n in shape], [len(shape) for shape in shapes])
    with graph.fx.inserting_before(once):
        types = tuple(type_of(call) for call in sums)
        unpacked = graph.call(UNPACK, (summed, *layout), like=like, type=None, name=f"{name}.unpack", results=types)
    outputs = zip(graph.outputs, graph.output_values, strict=True)
    kept = {value for port, value in outputs if port.role != "grad"}
    place = unpacked
    for index, call in enumerate(sums):
        view = call
        if call in kept:
            with graph.fx.inserting_after(place):
                view = insert(graph.fx, operator.getitem, (unpacked, index))
                about = info(call)
                set_info(view, about)
                update(view, name=graph.unique(f"{about.name}.view"))
            call.target, call.args = CLONE, (view,)
            place = view
        else:
            call.target, call.args = operator.getitem, (unpacked, index)
        place.append(call)
        place = call


def _flat_type(graph: Graph, sums: list[fx.Node], width: int) -> TensorType:
    """Ranks along the sums' own axes have a flat tensor each."""
    mesh, first = graph.mesh, type_of(sums[0])
    along = dict.fromkeys(axis for call in sums for axis in mesh.resolve(sorted(type_of(call).axes)))
    atoms = [*(Atom(mesh.size(axis), (axis,)) for axis in along), Atom(width)]
    return TensorType(first.dtype, (tuple(atom for atom in atoms if atom.size > 1),), first.partial)
