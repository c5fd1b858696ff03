"""offload: what backward reads lies on the host meanwhile.

    %x = gelu(%u)                                %x = gelu(%u)
    %y = linear(%x, %w)                          %x.out = begin_offload(%x)
    ...                                          %y = linear(%x, %w)
    %dw = linear_wgrad(%dy, %x)           ->     %x.host = end_offload(%x.out, %x)
                                                 ...
                                                 %x.back = begin_fetch(%x.host)
                                                 ...
                                                 %x.here = end_fetch(%x.back, %x.host)
                                                 %dw = linear_wgrad(%dy, %x.here)

Needs a body as ranks run it, with its kernels: of that it is known to the byte which memory forward leaves for backward
(`ir.storages`). Ensures the same calls on the same values, and copies. Memory moves as a whole, under the value that it
was allocated for; views that backward reads are made anew of what came back.

Moved are activations that recomputation has left, up to `activations` bytes, or all: first what backward reads last,
since it lies longest. What is smaller than `least` stays, since a copy takes as long to begin as such a one to end; and
so does what is not free in between: what backward reads before it comes to its second layer. Parameters and what is
made of them alone, outputs, what is written over, and members of buckets are never moved.

`copy_schedule` says when copies are waited for and begun. Those under way, of each direction, hold no more than two
layers of what is moved. The method: Rhu et al. 2016, "vDNN", which moves layers' inputs; here any saved value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx
from torch._ops import OpOverload

from shardc.cost.call_seconds import call_costs
from shardc.ir.buckets import pieces, with_buckets
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, Phase, info, keep_atoms, operands, producer, results, set_info, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.in_place import writes
from shardc.ir.microbatch import calls_as_run, in_microbatch
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, END_FETCH, END_OFFLOAD, LEAST
from shardc.ir.schema import schema_of
from shardc.ir.storages import Layouts, Storage, layouts
from shardc.passes.base import Pass
from shardc.passes.memory.copy_schedule import Clock, Copy, begins_of_fetches, ends_of_offloads

LAYERS_UNDER_WAY = 2

Place = tuple[int, int, fx.Node]  # the call before which a copy is put, its rank among those before that call, itself


@dataclass(frozen=True)
class Offload(Pass):
    """Move up to `activations` bytes a rank to the host."""

    activations: int | Literal["all"] = 0
    least: int = LEAST
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        if self.activations == 0 or graph.is_forward_only:
            return graph
        graph = graph.copy()
        calls = calls_as_run(graph)
        saved = saved_values(graph, calls, self.least)
        last = read_last({each.value: (each.read, each.bytes) for each in saved}, self.activations)
        chosen = [each for each in saved if each.value in last]
        if not chosen:
            graph.diagnostics.append(self._nothing(graph, calls))
            return graph
        seconds = seconds_of(graph, calls, self.hardware)
        _move(graph, calls, chosen, Clock.of(seconds, self.hardware.host_bytes_per_second))
        return graph

    def _nothing(self, graph: Graph, calls: Sequence[fx.Node]) -> Diagnostic:
        movable = saved_values(graph, calls, 1)
        if not movable:
            why = "backward reads no activation, or each within the first layer that it comes to"
            hint = "leave 'offload' out"
        else:
            size = human_bytes(max(each.bytes for each in movable))
            why = f"the largest that backward reads late has {size} a rank, and those of {human_bytes(self.least)}"
            why += " or more are moved"
            why += "" if self.activations == "all" else f", up to {human_bytes(self.activations)} in all"
            hint = f"write offload: {{activations: all, least: {size}}}, or leave it out"
        return Diagnostic("SC234", f"no activation lies on the host: {why}", "warning", hint=hint)


@dataclass(frozen=True)
class Saved:
    """Memory that forward leaves for backward. Calls are numbered as they run."""

    value: fx.Node  # that it was allocated for
    bytes: int
    made: int  # the call behind which a copy may begin
    read: int  # the first call of backward that reads it
    turn: int  # the first call of backward
    views: frozenset[fx.Node] = field(default=frozenset(), compare=False)  # all values that lie in it


def saved_values(graph: Graph, calls: Sequence[fx.Node], least: int) -> list[Saved]:
    """What may be moved of a localized graph, in the order in which it is made."""
    known: Layouts = layouts(graph)
    of = with_buckets(graph, known.storages)
    inside = in_microbatch(graph)
    index_of = {call: index for index, call in enumerate(calls)}
    weights = made_of_weights(graph)
    backward = [
        index
        for index, call in enumerate(calls)
        if call in inside and info(call).phase == "bwd" and call not in weights  # which may be gathered early
    ]
    if not backward:
        return []
    turn, second = backward[0], second_layer(calls, backward)
    kept = {of[value] for value in (*graph.output_values, *graph.placeholders, *weights) if value in of}
    kept |= {of[value] for value in (*pieces(graph), *(write.value for write in writes(graph)))}
    values_of: dict[Storage, list[fx.Node]] = {}
    for value, storage in of.items():
        values_of.setdefault(storage, []).append(value)
    saved: list[Saved] = []
    for storage, values in values_of.items():
        call = producer(storage.value)[0]
        if storage in kept or storage.bytes < least or info(call).phase != "fwd" or call not in inside:
            continue
        readers = [user for value in values for user in value.users if user.target is not operator.getitem]
        early = [index_of[user] for user in readers if info(user).phase == "fwd"]
        late = [index_of[user] for user in readers if info(user).phase != "fwd"]
        ready = max((index_of[call], *early[:1])) if call.target in COLLECTIVES else index_of[call]
        if (
            late
            and max((index_of[call], *early)) < turn
            and min(late) >= second
            and all(user in inside and not schema_of(user.target).is_mutable for user in readers)
            and is_dense(known, storage)
        ):
            saved.append(Saved(storage.value, storage.bytes, ready, min(late), turn, frozenset(values)))
    return sorted(saved, key=lambda each: each.made)


def made_of_weights(graph: Graph) -> set[fx.Node]:
    """Calls and values that are made of parameters alone, gathered or not."""
    made = {node for port, node in zip(graph.inputs, graph.placeholders, strict=True) if port.role == "param"}
    for node in graph.fx.nodes:
        if node.op == "call_function" and node.all_input_nodes and made.issuperset(node.all_input_nodes):
            made.add(node)
    return made


def second_layer(calls: Sequence[fx.Node], backward: Sequence[int]) -> int:
    """The first call of backward that belongs to another layer than those before it; without layers, the third call."""
    first = ""
    for index in backward:
        layer = info(calls[index]).layer
        if layer and first and layer != first:
            return index
        first = first or layer
    return backward[min(2, len(backward) - 1)]


def is_dense(known: Layouts, storage: Storage) -> bool:
    """Does the value that memory was allocated for fill it, so that its copy has the same strides?"""
    layout = known.operands[storage.value]
    like = torch.empty_like(torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype, device="meta"))
    return like.stride() == layout.strides and like.numel() * layout.dtype.itemsize == storage.bytes


def read_last(sizes: Mapping[fx.Node, tuple[int, int]], most: int | Literal["all"]) -> set[fx.Node]:
    """Of values with the calls that read them first in backward and their bytes: those that are read last, of no more
    bytes in all."""
    left, chosen = math.inf if most == "all" else most, set[fx.Node]()
    for value, (_, size) in sorted(sizes.items(), key=lambda item: -item[1][0]):
        if size <= left:
            chosen.add(value)
            left -= size
    return chosen


def _move(graph: Graph, calls: Sequence[fx.Node], chosen: Sequence[Saved], clock: Clock) -> None:
    """Insert the copies of what is chosen, and let backward read what comes back."""
    turn, bound = chosen[0].turn, bound_of([(each.value, each.bytes) for each in chosen])
    on_host, places = copies_to_host(graph, chosen, clock, bound, turn)
    back = sorted(chosen, key=lambda each: each.read)
    begins = begins_of_fetches([Copy(each.bytes, each.read) for each in back], clock, bound, turn)
    with graph.fx.inserting_before(graph.output_node):
        for each, begin in zip(back, begins, strict=True):
            x, host, at = each.value, on_host[each.value], each.read
            phase, name = info(calls[at]).phase, info(x).name
            fetched = copy_call(graph, BEGIN_FETCH, (host,), x, f"{name}.back", phase)
            here = copy_call(graph, END_FETCH, (fetched, host), x, f"{name}.here", phase)
            places += [(begin, 3 if begin == at else 5, fetched), (at, 4, here)]
            places += [(at, 4, node) for node in _read_from(graph, each, here, phase)]
    put(graph, calls, places)
    _erase_unread(graph, {value for each in chosen for value in each.views})


def _erase_unread(graph: Graph, views: set[fx.Node]) -> None:
    """Erase views of forward's that only backward read, which has views of what came back: once nothing reads them,
    they are no calls of a microbatch."""
    for node in reversed(list(graph.fx.nodes)):
        if node in views and not node.users:
            if node.target is operator.getitem:
                keep_atoms(producer(node)[0], node)
            graph.fx.erase_node(node)


def copies_to_host(
    graph: Graph, chosen: Sequence[Saved], clock: Clock, bound: int, last: int
) -> tuple[dict[fx.Node, fx.Node], list[Place]]:
    """Calls that copy to the host what is chosen, in the order in which it is made, and are waited for before call
    `last` at the latest. Returns what lies there, by value, and where `put` is to put the calls."""
    places: list[Place] = []
    on_host: dict[fx.Node, fx.Node] = {}
    ends = ends_of_offloads([Copy(each.bytes, each.made + 1) for each in chosen], clock, bound, last)
    with graph.fx.inserting_before(graph.output_node):
        for each, end in zip(chosen, ends, strict=True):
            x, name, at = each.value, info(each.value).name, each.made + 1
            if x.target is operator.getitem:
                producer(x)[0].append(x)
            out = copy_call(graph, BEGIN_OFFLOAD, (x,), x, f"{name}.out")
            on_host[x] = host = copy_call(graph, END_OFFLOAD, (out, x), x, f"{name}.host")
            places += [(at, 1, out), (end, 2 if end == at else 0, host)]
    return on_host, places


def bound_of(moved: Sequence[tuple[fx.Node, int]]) -> int:
    """The bytes of the layers that may be under way, of values with their bytes."""
    of_layer: dict[str, int] = {}
    for value, size in moved:
        layer = info(value).layer or info(value).name
        of_layer[layer] = of_layer.get(layer, 0) + size
    return LAYERS_UNDER_WAY * max(of_layer.values())


def seconds_of(graph: Graph, calls: Sequence[fx.Node], hardware: Hardware) -> list[float]:
    """How long each call keeps the accelerator busy. Collectives run beside others."""
    costs = call_costs(graph, hardware)
    return [0.0 if call.target in COLLECTIVES else costs[call].seconds for call in calls]


def put(graph: Graph, calls: Sequence[fx.Node], places: Sequence[Place]) -> None:
    """Put copies before calls. Of those before one call the order is: of copies to the host what ends (0), begins (1),
    and ends at once (2); of copies back what begins late (3), ends (4), and begins (5)."""
    for at, _, node in sorted(places, key=lambda place: place[:2]):
        (calls[at] if at < len(calls) else graph.output_node).prepend(node)


def copy_call(
    graph: Graph, target: OpOverload, args: tuple[fx.Node | bool, ...], x: fx.Node, name: str, phase: Phase = "fwd"
) -> fx.Node:
    """A copy of `x`, or the end of one, under a name of its own."""
    return graph.call(target, args, like=x, type=type_of(x), name=name, phase=phase)


def _read_from(graph: Graph, saved: Saved, here: fx.Node, phase: Phase) -> list[fx.Node]:
    """Let calls of backward read `here` and views of it. Returns the calls that make these views."""
    renewed = Renewed(graph, saved.value, here, phase)
    of_forward = [value for value in saved.views if info(value).phase == "fwd"]
    for value in sorted(of_forward, key=lambda value: info(value).name):
        for user in list(value.users):
            if info(user).phase != "fwd" and user.target is not operator.getitem:
                user.replace_input_with(value, renewed.value(value))
    return renewed.calls


class Renewed:
    """Views of `x`, made anew of its copy `here` in `graph`, at the graph's insertion point. `calls` make them."""

    def __init__(self, graph: Graph, x: fx.Node, here: fx.Node, phase: Phase) -> None:
        self.graph, self.phase, self.calls = graph, phase, list[fx.Node]()
        self._new = {x: here}

    def value(self, view: fx.Node) -> fx.Node:
        if view not in self._new:
            call = producer(view)[0]
            for operand in operands(call):
                self.value(operand)
            for node in (call, *(v for v in results(call) if v is not None and v is not call)):
                self._new[node] = again = self.graph.fx.node_copy(node, lambda read: self._new[read])
                about = info(node)
                name = self.graph.unique(f"{about.name}.here")
                set_info(again, replace(about, name=name, phase=self.phase, origin=None))
                self.calls.append(again)
        return self._new[view]
