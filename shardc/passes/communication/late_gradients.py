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
(`cost.call_seconds`): the latest before it, from the last collective to the first. The others stay.

A product that is put off holds its operands. They are bounded: at the peak, a body may hold `growth` of it more. An
order that is predicted to take no less time (`cost.streams`) is not taken: later products begin the reductions of their
gradients later.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice

from torch import fx

from shardc.cost.call_seconds import NOTHING, CallCost, call_costs
from shardc.cost.flops import COUNTS
from shardc.cost.memory import memory
from shardc.cost.streams import device_seconds
from shardc.ir.call_slots import SlottedCalls, slotted_calls
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, op_name, operands, producer
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.microbatch import sections
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.exchange import EXCHANGES
from shardc.ir.overlap_schedule import PASS_ON, sums_gradients
from shardc.ir.storages import Storage, layouts
from shardc.passes.base import Pass


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
        assigned = _Assignment(order, movable, costs, room, read)
        placed = _placed(order, movable, assigned.behind())
        if placed == order:
            return graph
        if not self.by_time:
            return _reordered(graph, placed) if copied else _copied(graph, placed)
        before = device_seconds(graph, costs, self.hardware, listed)
        if copied:
            later = device_seconds(_reordered(graph, placed), costs, self.hardware)
            return graph if later < before else _reordered(graph, nodes)
        table: dict[fx.Node, fx.Node] = {}
        moved = _copied(graph, placed, table)
        later = device_seconds(moved, {table[node]: cost for node, cost in costs.items()}, self.hardware)
        return moved if later < before else graph


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


@dataclass(frozen=True)
class Movable:
    """`products` may be put off, and the calls that may follow them: nothing else in backward reads either. Backward
    waits for the `awaited` collectives."""

    products: frozenset[fx.Node]
    followers: frozenset[fx.Node]
    awaited: tuple[fx.Node, ...]

    @classmethod
    def of(cls, order: Sequence[fx.Node]) -> Movable:
        products, followers = set[fx.Node](), set[fx.Node]()
        for node in reversed(order):
            if info(node).phase != "bwd" or not node.users:
                continue
            if not all(u.op == "output" or u in followers or info(u).phase == "opt" for u in node.users):
                continue
            if op_name(node.target) in COUNTS and node.target not in EXCHANGES:
                products.add(node)
            elif node.target not in COLLECTIVES or sums_gradients(node):
                followers.add(node)
        return cls(frozenset(products), frozenset(followers), tuple(node for node in order if _is_awaited(node)))


def _is_awaited(node: fx.Node) -> bool:
    """Does backward wait for this collective, which can begin no earlier than backward has made its operand?"""
    if node.target not in COLLECTIVES or info(node).phase != "bwd" or sums_gradients(node):
        return False
    return any(info(producer(value)[0]).phase == "bwd" for value in operands(node) if value.op == "call_function")


@dataclass
class _Assignment:
    """Which product runs behind which collective. `room` is how many bytes more may be held at each place of the order,
    `read` the bytes that a product holds by itself from a place on."""

    order: Sequence[fx.Node]
    movable: Movable
    costs: Mapping[fx.Node, CallCost]
    room: list[float]
    read: Mapping[fx.Node, Sequence[tuple[int, int]]]
    taken: dict[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    def behind(self) -> dict[fx.Node, fx.Node]:
        """A collective for each product that is put off.

        From the last collective to the first, each takes the latest products before it. What a product takes longer
        than its collective needs may be lacking elsewhere: `slack` is how much all collectives can do without.
        """
        self.place = {node: index for index, node in enumerate(self.order)}
        missing = self._lacking()
        lacking, spent = list(missing), dict(missing)
        made, needed = self._made(lacking), list(accumulate(spent.values()))
        places = [self.place[product] for product in self.products]
        for most, wasteful in ((1, False), (len(self.products), False), (len(self.products), True)):
            for index in reversed(range(len(lacking))):
                awaited = lacking[index]
                taken = 0
                for product in reversed(self.products[: bisect_right(places, self.place[awaited])]):
                    if missing[awaited] <= 0 or taken == most:
                        break
                    if product in self.taken:
                        continue
                    seconds = self._seconds(product)
                    waste = max(0.0, seconds - missing[awaited])
                    # How much longer this collective could compute without one behind it lacking any.
                    slack = min(map(operator.sub, made[index:], needed[index:])) if waste else 0.0
                    lost = max(0.0, waste - max(0.0, slack))
                    if (not wasteful and lost > missing[awaited]) or not self._hold(product, awaited):
                        continue
                    self.taken[product] = awaited
                    missing[awaited] -= seconds
                    taken += 1
                    if waste:
                        spent[awaited] += waste
                        needed = list(accumulate(spent.values()))
        return self.taken

    @cached_property
    def products(self) -> list[fx.Node]:
        return [node for node in self.order if node in self.movable.products and self._seconds(node)]

    def _seconds(self, node: fx.Node) -> float:
        cost = self.costs.get(node)
        return 0.0 if cost is None or cost.kind == "collective" else cost.seconds

    def _lacking(self) -> dict[fx.Node, float]:
        """Of each collective that is waited for, how long it has nothing to run beside it but products put off."""
        lacking: dict[fx.Node, float] = {}
        for node in self.movable.awaited:
            begins = max(self.place[value] for value in node.all_input_nodes if value in self.place)
            missing = self.costs[node].seconds
            for call in islice(self.order, begins + 1, None):
                if call in node.users or missing <= 0:
                    break
                if call not in self.movable.products:
                    missing -= self._seconds(call)
            if missing > 0:
                lacking[node] = missing
        return lacking

    def _made(self, lacking: Sequence[fx.Node]) -> list[float]:
        """How many seconds the products take that lie before each collective."""
        made, before, products = 0.0, list[float](), iter(self.products)
        product = next(products, None)
        for awaited in lacking:
            while product is not None and self.place[product] < self.place[awaited]:
                made += self._seconds(product)
                product = next(products, None)
            before.append(made)
        return before

    def _hold(self, product: fx.Node, awaited: fx.Node) -> bool:
        """Whether there is room for what a product reads until then; it is taken."""
        start, until = self.place[product], self.place[awaited] + 1
        spans = sorted((max(first, start), size) for first, size in self.read[product])
        ends = [*(first for first, _ in spans[1:]), until][: len(spans)]
        held, needed = 0, list[tuple[int, int, int]]()
        for (first, size), end in zip(spans, ends, strict=True):
            held += size
            if first < min(end, until):
                needed.append((first, min(end, until), held))
        if min(self.room[start:until], default=0.0) < 0.0 or any(
            bytes > min(self.room[first:end]) for first, end, bytes in needed
        ):
            return False
        for first, end, bytes in needed:
            self.room[first:end] = [room - bytes for room in self.room[first:end]]
        return True


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
