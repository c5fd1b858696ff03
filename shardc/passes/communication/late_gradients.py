"""late_gradients: products that make gradients of weights run behind the collectives that backward waits for.

    %dw = linear_wgrad(%g, %x)                %dx = linear_dgrad(%g, %w)
    %dx = linear_dgrad(%g, %w)                %dx.sum = all_reduce(%dx, tp)        begin
    %dx.sum = all_reduce(%dx, tp)      ->     %dw = linear_wgrad(%g, %x)
    %h = mul(%dx.sum, %y)                     %h = mul(%dx.sum, %y)                wait, run

Nothing reads the gradient of a weight before its own reduction or the optimizer, so its product may run at any later
time. Autograd writes it beside the product of the same operand, before the sum that is reduced next, and that reduction
then has nothing to run beside it. Zero-bubble schedules put off the same products (Qi et al. 2023, arXiv:2401.10241).

Needs a localized body, or a part of one. Ensures the same calls, each after what it reads, and the calls on the result
of such a product (casts, sums over microbatches, reductions of gradients) behind it. Casts and views of reduced
gradients run where the optimizer reads them, or last. In the order of the program, products are put off. Behind each
collective that backward waits for, as many run as take as long as it has nothing else to run beside it
(`cost.call_seconds`), of its layer or the one before it in backward (`late_products`). The others stay.

A product that is put off holds its operands. They are bounded: at the peak, a body may hold `growth` of it more. An
order that is predicted to take no less time (`cost.streams`) is not taken: later products begin the reductions of their
gradients later.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.cost.call_seconds import NOTHING, CallCost, call_costs
from shardc.cost.flops import COUNTS
from shardc.cost.memory import memory
from shardc.cost.streams import device_seconds
from shardc.ir.call_slots import SlottedCalls, slotted_calls
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, op_name
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.microbatch import sections
from shardc.ir.overlap_schedule import PASS_ON, sums_gradients
from shardc.ir.storages import Storage, layouts
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass
from shardc.passes.communication.late_products import Assignment, Movable

# Parts of a step: what two orders of the same calls may differ by, and what those of few layers have to.
ROUNDED, CLEAR = 1e-9, 1e-3


@dataclass(frozen=True)
class LateGradients(Pass):
    """Run gradients of weights behind the collectives of backward, unless not `enabled`.

    Where the order must not depend on sizes, it is not found `by_time`: each collective has the last product before it.
    """

    enabled: bool = True
    hardware: Hardware = DEFAULT
    growth: float = 0.05
    by_time: bool = True

    def run(self, graph: Graph) -> Graph:
        if not self.enabled:
            return graph
        order = _casts_late(graph)
        return self._behind_collectives(graph if order is None else _copied(graph, order), copied=order is not None)

    def _behind_collectives(self, graph: Graph, *, copied: bool) -> Graph:
        """The graph with products put off, or as it is where that takes no less time. A graph that is `copied` is
        reordered in place; of another a copy is returned."""
        early, inside, _ = sections(graph)
        nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
        order = sorted(nodes, key=lambda node: 0 if node in early else 1 if node in inside else 2)
        movable = Movable.of([node for node in order if node in inside])
        if not movable.products or not movable.awaited:
            return graph
        if self.by_time:
            known, listed = layouts(graph), slotted_calls(graph)
            costs = call_costs(graph, self.hardware, known=known)
            room = _room(graph, order, self.growth, known.storages, listed)
            read = _read_alone(graph, order, movable, known.storages)
        else:
            listed = None
            costs = {node: _counted(graph, node) for node in order}
            room, read = [math.inf] * len(order), dict.fromkeys(movable.products, ())
        assigned = Assignment(order, movable, costs, room, read, bool(graph.units))
        placed = _placed(order, movable, assigned.behind())
        if placed == order:
            return graph
        if not self.by_time:
            return _reordered(graph, placed) if copied else _copied(graph, placed)
        before = device_seconds(graph, costs, self.hardware, listed)
        if copied:
            later = device_seconds(_reordered(graph, placed), costs, self.hardware)
            return graph if _is_less(graph, later, before) else _reordered(graph, nodes)
        table: dict[fx.Node, fx.Node] = {}
        moved = _copied(graph, placed, table)
        later = device_seconds(moved, {table[node]: cost for node, cost in costs.items()}, self.hardware)
        return moved if _is_less(graph, later, before) else graph


def _is_less(graph: Graph, later: float, before: float) -> bool:
    """Does an order take less time, by more than is rounded? Raises UnequalError where few layers hardly tell what all
    of them take."""
    gain = (before - later) / before
    if graph.units and ROUNDED < abs(gain) < CLEAR:
        raise UnequalError("with few layers one order takes about as long as the other")
    return gain > ROUNDED


def _counted(graph: Graph, node: fx.Node) -> CallCost:
    """A collective takes as long as a product, and all else no time."""
    if collective(graph, node) is not None:
        return CallCost("collective", 1.0)
    return CallCost("product", 1.0) if op_name(node.target) in COUNTS else NOTHING


def _casts_late(graph: Graph) -> list[fx.Node] | None:
    """The calls in the order in which casts and views of reduced gradients run where the optimizer reads them, or last:
    backward waits for none. None if that is their order already."""
    waiting = {node for node in graph.calls() if sums_gradients(node)}
    casts = set[fx.Node]()
    for node in graph.fx.nodes:
        if node.target in PASS_ON and any(value in casts or value in waiting for value in node.all_input_nodes):
            casts.add(node)
    if all(node.target is operator.getitem for node in casts):
        return None
    nodes = [node for node in graph.fx.nodes if node.op == "call_function"]
    placed: list[fx.Node] = []

    def place(node: fx.Node) -> None:
        """Behind all that is placed, and what is held of what it reads before it."""
        for source in node.all_input_nodes:
            if source in casts:
                place(source)
        casts.discard(node)
        placed.append(node)

    for node in nodes:
        if node not in casts:
            place(node)
    for node in nodes:
        if node in casts:
            place(node)
    return None if placed == nodes else placed


def _copied(graph: Graph, order: Sequence[fx.Node], table: dict[fx.Node, fx.Node] | None = None) -> Graph:
    """A copy with its calls in an order. `table` is given the copy of each node."""
    table = {} if table is None else table
    return _reordered(graph.copy(table), [table[node] for node in order])


def _reordered(graph: Graph, order: Sequence[fx.Node]) -> Graph:
    """The same graph, its calls put in an order."""
    for node in order:
        graph.output_node.prepend(node)
    return graph


def _room(
    graph: Graph, order: Sequence[fx.Node], growth: float, storage_of: dict[fx.Node, Storage], listed: SlottedCalls
) -> list[float]:
    """How many bytes more than it does a body may hold at each place of the order."""
    report = memory(graph, listed=False, storage_of=storage_of)
    allowed = (1 + growth) * report.peak - report.stored
    held = {call.node: report.timeline[index] for index, call in enumerate(listed.calls)}
    room, last = list[float](), 0
    for node in order:
        last = held.get(node, last)
        room.append(allowed - last)
    return room


def _read_alone(
    graph: Graph, order: Sequence[fx.Node], movable: Movable, storage_of: dict[fx.Node, Storage]
) -> dict[fx.Node, list[tuple[int, int]]]:
    """Of each product, the storages that it reads: the place behind which no other call does, and the bytes."""
    last: dict[fx.Node, int] = {}
    for index, node in enumerate(order):
        for value in node.all_input_nodes if node not in movable.products else ():
            if value in storage_of:
                last[storage_of[value].value] = index
    stored = set(graph.placeholders)
    read: dict[fx.Node, list[tuple[int, int]]] = {}
    for product in movable.products:
        storages = {storage_of[v].value: storage_of[v].bytes for v in product.all_input_nodes if v in storage_of}
        read[product] = [(last.get(value, -1) + 1, size) for value, size in storages.items() if value not in stored]
    return read


def _placed(order: Sequence[fx.Node], movable: Movable, behind: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """The order with each product behind its collective, and the calls on its result behind it."""
    held: dict[fx.Node, None] = {}
    placed: list[fx.Node] = []
    products: dict[fx.Node, list[fx.Node]] = {}
    for product, awaited in behind.items():
        products.setdefault(awaited, []).append(product)
    rank = {node: index for index, node in enumerate(order)}

    def place(node: fx.Node) -> None:
        held.pop(node, None)
        placed.append(node)
        for follower in list(held):
            if follower not in behind and not any(source in held for source in follower.all_input_nodes):
                place(follower)

    for node in order:
        sources = [source for source in node.all_input_nodes if source in held]
        if node in behind:
            held[node] = None
        elif sources:
            assert node in movable.followers or node.target is operator.getitem, f"{node} reads a product too early"
            held[node] = None
        else:
            placed.append(node)
            for product in sorted(products.get(node, ()), key=rank.__getitem__):
                place(product)
    assert not held
    return placed
