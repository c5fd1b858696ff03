"""split_batch: two microbatches of a step run as halves of one, interleaved from one collective to the next.

    microbatches(2)                            %x = view, select of the pair      %x/2 = ...
    %y = linear(%x, %w)                        %y = linear(%x, %w)
    %y.sum = all_reduce(%y, tp)                %y.sum = all_reduce(%y, tp)        begin
    %z = gelu(%y.sum)                    ->    %y/2 = linear(%x/2, %w)            meanwhile
    ...                                        %y.sum/2 = all_reduce(%y/2, tp)    begin
    %d.w = linear_wgrad(%dy, %x)               %z = gelu(%y.sum)                  wait, run: beside the second
    %d.w.sum = accumulate(%d.w)                ...

An all-reduce of tensor parallelism stands between two products that depend on each other, so a rank has nothing to run
meanwhile. A second half of the batch has: it depends on none of the first. (Wang et al. 2023, "Domino", and earlier
Jangda et al. 2022, run parts of a batch so.)

Needs a localized body of an even number of microbatches. Ensures half as many, and that `halves` says so. What is fed
to each of the two comes in one tensor: an input of [4@dp, 8] as one of [(2 4@dp), 8], a key of [] as [2]. What a model
returns of each is stacked: [4@dp, 8] as [2, 4@dp, 8]. What depends on no half, such as gathers of weights, is made once
for both. What each adds to the step (the loss, gradients, loads of experts) is added up as soon as both are there, and
gradients are reduced there if the step has no other microbatches. The second half starts from the buffers that the
first leaves, as microbatches do.

The order is that of a rank with a stream for compute and one a process group: of the two halves' next calls, each in
the order of the program, the one that can start first, and of two that can, the one with less to compute until its next
collective. Products, attention and scans count: all else is short, and in a kernel it may take no time of its own.
A half is at most one gathered weight ahead of the other, so that no weight is held for long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from shardc.cost.call_seconds import NOTHING, CallCost, Kind, call_costs
from shardc.cost.flops import COUNTS
from shardc.ir.graph import Graph, Port, ValueInfo, info, op_name, set_info, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.microbatch import GIVEN, HALVES, sections
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.provenance import Derivation
from shardc.ir.types import Atom
from shardc.passes.base import Pass

aten = torch.ops.aten
COUNTED: tuple[Kind, ...] = ("product", "attention", "scan", "collective")
SECOND = "/2"  # ends the names of the second half's values


@dataclass(frozen=True)
class SplitBatch(Pass):
    """Interleave pairs of microbatches if `enabled`. `inputs` are those that are split into microbatches.

    Where the order must not depend on sizes, it is not found `by_time`: all products and collectives take alike.
    """

    enabled: bool = False
    inputs: frozenset[str] = frozenset()
    hardware: Hardware = DEFAULT
    by_time: bool = True

    def run(self, graph: Graph) -> Graph:
        if not self.enabled:
            return graph
        assert graph.microbatches % HALVES == 0, f"{graph.microbatches} microbatches are no pairs"
        counted = {node: _counted(node) for node in graph.calls()}
        costs = call_costs(graph, self.hardware) if self.by_time else counted
        costs = {node: cost if cost.kind in COUNTED else NOTHING for node, cost in costs.items()}
        return _Pairs(graph, self.inputs, costs).interleaved()


def _counted(node: fx.Node) -> CallCost:
    if node.target in COLLECTIVES:
        return CallCost("collective", 1.0, stream="all")
    return CallCost("product", 1.0) if op_name(node.target) in COUNTS else NOTHING


def calls_by_name(graph: Graph) -> dict[str, fx.Node]:
    """The calls of a graph that is not split, by their names, and by those that their copies have in second halves."""
    calls = {info(node).name: node for node in graph.calls()}
    return {f"{name}{SECOND}": node for name, node in calls.items()} | calls


class _Pairs:
    """`after` is the graph that is made. `copies` has those of a node in it: the first half's and the second's."""

    def __init__(self, graph: Graph, inputs: frozenset[str], costs: Mapping[fx.Node, CallCost]) -> None:
        self.graph, self.split, self.costs = graph, inputs, costs
        self.alone = graph.microbatches == HALVES  # no other microbatches
        early, self.inside, _ = sections(graph)
        nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
        self.carried = self._carried_in_buffers()
        self.of_each: dict[fx.Node, None] = {}  # the calls that each half has of its own
        of_half = {node for port, node in self._inputs() if self._is_fed(port) or node in self.carried}
        for node in nodes:
            if node in self.inside and node.target is not ACCUMULATE and not of_half.isdisjoint(node.all_input_nodes):
                self.of_each[node] = None
                of_half.add(node)
        self.sums = [node for node in nodes if node.target is ACCUMULATE]
        self.early = [node for node in nodes if node in early and not self.alone]
        self.once = [node for node in nodes if node not in self.inside and node not in early]
        self.shared = {node for node in nodes if node in self.inside | early} - {*self.of_each, *self.sums, *self.early}
        self.after, self.inputs = graph.emptied()
        self.copies = {node: (copy, copy) for node, copy in self.inputs.items()}
        self.done = set(self.inputs)  # of which all copies are there

    def _inputs(self) -> Iterable[tuple[Port, fx.Node]]:
        return zip(self.graph.inputs, self.graph.placeholders, strict=True)

    def _outputs(self) -> Iterable[tuple[Port, fx.Node]]:
        return zip(self.graph.outputs, self.graph.output_values, strict=True)

    def _is_fed(self, port: Port) -> bool:
        return port.role in GIVEN and (port.role != "input" or port.name in self.split)

    def _carried_in_buffers(self) -> dict[fx.Node, fx.Node]:
        """By buffer, what a microbatch leaves in it: the next one starts from that."""
        inputs = self.graph.input_nodes()
        carried = {inputs[port.name]: value for port, value in self._outputs() if port.role == "buffer"}
        return {node: value for node, value in carried.items() if value is not node}

    # ------------------------------------------------------------------ the graph
    def interleaved(self) -> Graph:
        for node in self.early:
            self._append(node)
        for port, node in self._inputs():
            if self._is_fed(port):
                self._divide(node)
        reduced = [node for node in self.once if self.alone and info(node).phase != "opt"]
        waiting = {*self.sums, *reduced}
        for node, half in order_of(list(self.of_each), self.shared, self.carried, self.costs):
            self._append(node, half)
            if half:
                self._append_ready(node, waiting)
        for node in (*self.sums, *self.once):
            if node not in self.done:
                self._append(node)
        self._return()
        self.after.erase_dead()
        return self.after

    def _append_ready(self, node: fx.Node, waiting: set[fx.Node]) -> None:
        """What is made once of both halves, where all that it reads is there."""
        for user in node.users:
            if user in waiting and user not in self.done and self.done.issuperset(user.all_input_nodes):
                self._append(user)
                self._append_ready(user, waiting)

    def _append(self, node: fx.Node, half: int = 0) -> None:
        """A copy of a node, of a half or for both, behind what it reads of what both share."""
        table = {source: self._read(source, half) for source in node.all_input_nodes}
        copy = self._sum(node) if node.target is ACCUMULATE else self.after.append_copy(node, table)
        if half:
            set_info(copy, self._of_second(info(node)))
        self.copies[node] = (self.copies[node][0] if half else copy, copy)
        if half or node not in self.of_each:
            self.done.add(node)

    def _read(self, source: fx.Node, half: int) -> fx.Node:
        """What a half reads where the graph of a microbatch reads `source`."""
        if half and source in self.carried:
            source, half = self.carried[source], 0
        if source in self.shared and source not in self.done:
            self._append(source)
        return self.copies[source][half]

    def _divide(self, node: fx.Node) -> None:
        """An input of a microbatch as one of two, and each half's part of it."""
        pair, type, name = self.inputs[node], type_of(node), info(node).name
        stacked = replace(type, dims=((Atom(HALVES),), *type.dims))
        rows = ((Atom(HALVES), *type.dims[0]), *type.dims[1:]) if type.ndim else stacked.dims
        update(pair, type=replace(type, dims=rows))
        self.after.seeds.pop(pair, None)
        whole = pair
        if type.ndim:
            shape = [HALVES, *type.local_shape(self.graph.mesh)]
            whole = self.after.call(aten.view.default, (pair, shape), like=pair, type=stacked, name=f"{name}.halves")
        first, second = (
            self.after.call(aten.select.int, (whole, 0, half), like=pair, type=type, name=f"{name}.half")
            for half in range(HALVES)
        )
        set_info(second, replace(info(second), name=f"{info(first).name}{SECOND}"))
        self.copies[node] = (first, second)

    def _of_second(self, about: ValueInfo) -> ValueInfo:
        """The info of a call of the second half; what it computes again is the second half's."""
        origin = about.origin
        if origin is None:
            origin = Derivation("half", about.name)
        elif origin.kind == "recomputed":
            origin = replace(origin, of=f"{origin.of}{SECOND}")
        return replace(about, name=self.after.unique(f"{about.name}{SECOND}"), origin=origin)

    def _sum(self, node: fx.Node) -> fx.Node:
        """The sum of both halves' terms; of several pairs, of that the sum over microbatches."""
        (term,) = node.all_input_nodes
        about, terms = info(node), tuple(self._read(term, half) for half in range(HALVES))
        name = f"{info(term).name}.halves"
        total = self.after.call(aten.add.Tensor, terms, like=terms[0], type=about.type, name=name)
        set_info(total, replace(about, name=about.name if self.alone else info(total).name))
        return total if self.alone else self.after.append_copy(node, {term: total})

    def _return(self) -> None:
        """Return each microbatch's outputs stacked, and buffers as the second half leaves them."""
        returned: list[fx.Node] = []
        for port, value in self._outputs():
            each = value in self.inside and port.role == "output"
            read = [self._read(value, half) for half in range(HALVES)]
            returned.append(self._stack(value, read) if each else read[1] if port.role == "buffer" else read[0])
        table = {node: copies[0] for node, copies in self.copies.items()} | self.inputs
        self.after.finish_copy(self.graph, table)
        self.after.output_node.args = (tuple(returned),)
        self.after.microbatches, self.after.halves = self.graph.microbatches // HALVES, HALVES

    def _stack(self, value: fx.Node, halves: Sequence[fx.Node]) -> fx.Node:
        type, name = type_of(value), info(value).name
        shape, row = [1, *type.local_shape(self.graph.mesh)], replace(type, dims=((), *type.dims))
        rows = [
            self.after.call(aten.view.default, (half, shape), like=half, type=row, name=f"{name}.row{end}")
            for half, end in zip(halves, ("", SECOND), strict=True)
        ]
        pair = replace(type, dims=((Atom(HALVES),), *type.dims))
        return self.after.call(aten.cat.default, (rows, 0), like=halves[0], type=pair, name=f"{name}.stack")


# ---------------------------------------------------------------------- the order
def order_of(
    calls: Sequence[fx.Node],
    shared: set[fx.Node],
    carried: Mapping[fx.Node, fx.Node],
    costs: Mapping[fx.Node, CallCost],
) -> Iterator[tuple[fx.Node, int]]:
    """Each half's calls, `calls` in the order of the program, interleaved: calls with the half that runs them.

    `shared` are calls that both halves read, `carried` says what the second reads in the place of a buffer.
    """
    levels, until = _levels(calls, shared), _until_collective(calls, costs)
    at, now = [0] * HALVES, 0.0
    ready: dict[tuple[fx.Node, int], float] = {}
    free: dict[str, float] = {}

    def start(half: int) -> float:
        begins = now
        for source in calls[at[half]].all_input_nodes:
            key = (carried[source], 0) if half and source in carried else (source, half)
            begins = max(begins, ready.get(key, 0.0 if key[0] not in mine else math.inf))
        return begins

    mine = set(calls)
    while min(at) < len(calls):
        may = [h for h in range(HALVES) if at[h] < len(calls) and _may_go(levels, at[h], at[1 - h])]
        half = min(may, key=lambda h: (start(h), until[at[h]], h))
        node = calls[at[half]]
        begins, cost = start(half), costs.get(node, NOTHING)
        if node.target in COLLECTIVES:
            now += cost.before
            ready[node, half] = free[cost.stream] = max(begins, now, free.get(cost.stream, 0.0)) + cost.seconds
        else:
            ready[node, half] = now = begins + cost.seconds if cost.seconds else max(begins, now)
        at[half] += 1
        yield node, half


def _may_go(levels: Sequence[int], place: int, other: int) -> bool:
    """Whether the other half, at its place, is close enough behind."""
    return other == len(levels) or levels[place] <= levels[other] + 1


def _levels(calls: Sequence[fx.Node], shared: set[fx.Node]) -> list[int]:
    """By call, how many times it or one before it was the first to read what collectives bring for both halves."""
    levels, level, seen = list[int](), 0, set[fx.Node]()

    def brings(node: fx.Node) -> bool:
        if node not in shared or node in seen:
            return False
        seen.add(node)
        brought = [brings(source) for source in node.all_input_nodes]
        return node.target in COLLECTIVES or any(brought)

    for node in calls:
        brought = [brings(source) for source in node.all_input_nodes]
        level += any(brought)
        levels.append(level)
    return levels


def _until_collective(calls: Sequence[fx.Node], costs: Mapping[fx.Node, CallCost]) -> list[float]:
    """By call, the seconds of compute from it to the next collective."""
    until, seconds = [0.0] * len(calls), 0.0
    for place in reversed(range(len(calls))):
        node = calls[place]
        seconds = 0.0 if node.target in COLLECTIVES else seconds + costs.get(node, NOTHING).seconds
        until[place] = seconds
    return until
