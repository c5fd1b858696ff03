"""overlap: independent products of a layer run while rows are under way to their experts, and back, or while queries,
keys and values are on their way to attention, and their gradients back.

    %a = linear(%x, %shared.up)                 %rows = dispatch_rows(...)         begin
    %b = linear(silu(%a), %shared.down)         %a = linear(%x, %shared.up)
    %rows = dispatch_rows(...)            ->    %b = linear(silu(%a), %shared.down)
    %y = expert_mm(%rows, ...)                  %y = expert_mm(%rows, ...)         wait, run
    ...                                         ...

A rank begins a collective where it stands, and waits where its result is read first (`ir.overlap_schedule`). So what
stands in between runs meanwhile. Libraries write shared experts before the routed ones, or after them; autograd runs
backward in the reverse order; and the gradients of weights may be computed at any time.

Needs a localized body, or a part of one. Ensures the same calls, each after what it reads. For each exchange of rows,
in the order of the program, and then for each transfer of attention, the last one first: products of its layer and
phase that neither need it nor are needed for it move behind it, with the calls between them, until they take as long
as the exchange. What covers one exchange is taken by the next only if enough remains. A call moves within its layer
alone, so values live hardly longer. Collectives of these products, such as gathers of their weights and reductions of
their gradients, move along; exchanges, transfers and attention stay in their order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardc.cost.flops import COUNTS, node_flops
from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, op_name, operands, producer, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops import collectives
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_rows import NEXT_KEYS, SDPA_ROWS, SDPA_ROWS_BWD
from shardc.ir.ops.exchange import EXCHANGES, ROW_MOVES
from shardc.passes.base import Pass

aten = torch.ops.aten
ATTENTION = (SDPA, SDPA_BWD, SDPA_ROWS, SDPA_ROWS_BWD)
TRANSFERS = (
    collectives.all_to_all,
    collectives.all_gather,
    collectives.gather_blocks,
    collectives.reduce_scatter,
    NEXT_KEYS,
)
VIEWS = (aten.view.default, aten.transpose.int, aten.permute.default)


@dataclass(frozen=True)
class Overlap(Pass):
    """Place products behind the exchanges of their layer."""

    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        if not _exchanges(graph):
            return graph
        graph = graph.copy()
        regions: dict[tuple[str, str], list[fx.Node]] = {}
        for node in _exchanges(graph):
            regions.setdefault(_region(node), []).append(node)
        for region, exchanges in regions.items():
            calls = list(graph.calls())  # a layer that is computed again stands among the calls of others, which moved
            members = [index for index, node in enumerate(calls) if _region(node) == region]
            span = calls[members[0] : members[-1] + 1]
            _Layer(graph, self.hardware.on(graph.mesh), region, span, exchanges).cover(exchanges)
        return graph


def _exchanges(graph: Graph) -> list[fx.Node]:
    """The calls that products are to cover, in the order in which they take them."""
    calls = list(graph.calls())
    return [node for node in calls if node.target in ROW_MOVES] + [node for node in reversed(calls) if _attends(node)]


def _attends(node: fx.Node) -> bool:
    """Whether a call brings something to attention or away from it that has not been there for long: what backward
    sends of forward's values begins early by itself."""
    if node.target not in TRANSFERS or info(node).phase != info(operands(node)[0]).phase:
        return False
    source = producer(operands(node)[0])[0]
    while source.target in VIEWS:
        source = producer(operands(source)[0])[0]
    readers = list(_readers(node))
    while readers:
        reader = readers.pop()
        if reader.target in ATTENTION:
            return True
        if reader.target in VIEWS:
            readers += _readers(reader)
    return source.target in ATTENTION


def _region(node: fx.Node) -> tuple[str, str]:
    about = info(node)
    return about.layer, about.phase


class _Layer:
    """The calls from the first to the last one of a layer, in one phase."""

    def __init__(
        self, graph: Graph, hardware: Hardware, region: tuple[str, str], span: Sequence[fx.Node],
        exchanges: Sequence[fx.Node],
    ) -> None:  # fmt: skip
        self.graph, self.hardware, self.region = graph, hardware, region
        self.order, self.exchanges = list(span), set(exchanges)
        self.covers: dict[fx.Node, fx.Node] = {}  # a call -> the exchange that it was placed behind
        self.missing: dict[fx.Node, float] = {}  # of an exchange, the FLOPs that it could take still

    def cover(self, exchanges: Sequence[fx.Node]) -> None:
        for exchange in exchanges:
            self.missing[exchange] = self._flops_meanwhile(exchange) - self._already(exchange)
            taken: list[fx.Node] = []
            for chain in (*self._later(exchange), *self._earlier(exchange)):
                new = [call for call in chain if call not in taken]
                if self.missing[exchange] <= 0:
                    break
                if self._may_take(new):
                    self._take(new, exchange)
                    taken += new
            if taken:
                self._place(exchange, set(taken))

    # ------------------------------------------------------------------ what takes how long
    def _flops_meanwhile(self, exchange: fx.Node) -> float:
        """FLOPs of 16-bit products in the time that an exchange takes."""
        sent = collective(self.graph, exchange)
        assert sent is not None
        group = self.hardware.group_of(self.graph.mesh, sent.axes)
        seconds = self.hardware.collective_seconds(sent.kind, sent.payload_bytes, group)
        return seconds * self.hardware.bf16_flops_per_second

    def _already(self, exchange: fx.Node) -> float:
        """Of the products that stand between an exchange and its first reader."""
        between: list[fx.Node] = []
        for call in self.order[self.order.index(exchange) + 1 :]:
            if exchange in _sources(call):
                break
            between.append(call)
        for call in between:
            self.covers.setdefault(call, exchange)
        return sum(map(self._flops, between))

    def _flops(self, call: fx.Node) -> float:
        flops = node_flops(self.graph, call)
        return self.hardware.bf16_flops(flops, type_of(operands(call)[0]).dtype) if flops else 0

    def _may_take(self, calls: Sequence[fx.Node]) -> bool:
        """Whether the exchanges that these calls cover by now have enough without them."""
        given: dict[fx.Node, float] = {}
        for call in calls:
            if call in self.covers:
                given[self.covers[call]] = given.get(self.covers[call], 0) + self._flops(call)
        return all(self.missing[exchange] + flops <= 0 for exchange, flops in given.items() if flops)

    def _take(self, calls: Sequence[fx.Node], exchange: fx.Node) -> None:
        for call in calls:
            flops = self._flops(call)
            if call in self.covers:
                self.missing[self.covers[call]] += flops
            self.covers[call] = exchange
            self.missing[exchange] -= flops

    # ------------------------------------------------------------------ what may move
    def _moves(self, call: fx.Node) -> bool:
        return call.target not in (*EXCHANGES, *ATTENTION) and call not in self.exchanges

    def _is_wanted(self, call: fx.Node) -> bool:
        return op_name(call.target) in COUNTS and _region(call) == self.region

    def _later(self, exchange: fx.Node) -> list[list[fx.Node]]:
        """For each product behind an exchange that does not need it: the calls that have to move for it to move."""
        behind = self.order[self.order.index(exchange) + 1 :]
        inside, needs, free = set(behind), {exchange}, dict[fx.Node, list[fx.Node]]()
        chains: list[list[fx.Node]] = []
        for call in behind:
            sources = _sources(call)
            if not needs.isdisjoint(sources):
                needs.add(call)
            elif self._moves(call) and all(source in free for source in sources if source in inside):
                before = {one for source in sources if source in free for one in free[source]}
                free[call] = [one for one in behind if one in before] + [call]
                if self._is_wanted(call):
                    chains.append(free[call])
        return [chain for chain in chains if self.covers.get(chain[-1]) is not exchange]

    def _earlier(self, exchange: fx.Node) -> list[list[fx.Node]]:
        """The same for each product before an exchange that is not needed for it."""
        before = self.order[: self.order.index(exchange)]
        inside, needed = set(before), {exchange}
        free: dict[fx.Node, list[fx.Node]] = {}
        chains: list[list[fx.Node]] = []
        for call in reversed([*before, exchange]):
            if call in needed:
                needed.update(_sources(call))
                continue
            readers = [reader for reader in _readers(call) if reader in inside]
            if self._moves(call) and all(reader in free for reader in readers):
                after = {one for reader in readers for one in free[reader]}
                free[call] = [call] + [one for one in before if one in after]
                if self._is_wanted(call):
                    chains.append(free[call])
        return chains

    # ------------------------------------------------------------------ moving
    def _place(self, exchange: fx.Node, taken: set[fx.Node]) -> None:
        at = self.order.index(exchange)
        moved = [call for call in self.order if call in taken]
        before = [call for call in self.order[: at + 1] if call not in taken]
        self.order = [*before, *moved, *(call for call in self.order[at + 1 :] if call not in taken)]
        place = exchange
        for call in moved:
            items = [v for v in call.all_input_nodes if v.target is operator.getitem and place < v]
            items += [call, *(user for user in call.users if user.target is operator.getitem)]
            for node in items:
                place.append(node)
                place = node


def _sources(call: fx.Node) -> set[fx.Node]:
    return {producer(value)[0] for value in call.all_input_nodes}


def _readers(call: fx.Node) -> Iterable[fx.Node]:
    for user in call.users:
        if user.target is operator.getitem:
            yield from _readers(user)
        elif user.op != "output":
            yield user
