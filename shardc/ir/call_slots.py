"""The calls of a graph in the order in which a rank runs them, their values in numbered slots.

    %y = linear(%x, %w)      reads slots 0 and 1, fills slot 2, and frees 0: nothing reads %x after it

Calls of single microbatches come after what is made for all of them, and before those of the whole step. A `getitem`
is part of the call whose result it picks. A slot is freed after the last call that reads it or fills it; of what all
microbatches read, after the first call behind them. Some calls among those of a microbatch run in the first one alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import cast

from torch import fx

from shardc.ir.graph import Graph, info, operands
from shardc.ir.microbatch import sections


@dataclass(frozen=True)
class CallSlots:
    """A call. `yields` lists, for each result in use, its value, position (None for a call's only one) and slot."""

    node: fx.Node
    reads: tuple[int, ...]
    yields: tuple[tuple[fx.Node, int | None, int], ...]
    free: tuple[int, ...]


@dataclass(frozen=True)
class SlottedCalls:
    """The calls of a graph, the slot of each value, and which of the calls run once a microbatch: all in `repeated`,
    but those of `first` only in the first of them."""

    calls: tuple[CallSlots, ...]
    slots: dict[fx.Node, int]
    repeated: range
    first: frozenset[int] = frozenset()  # indices of calls

    @property
    def sections(self) -> tuple[range, range, range]:
        """The calls before the microbatches, those of one, and those behind them."""
        return range(self.repeated.start), self.repeated, range(self.repeated.stop, len(self.calls))


def slotted_calls(graph: Graph) -> SlottedCalls:
    """Outputs live to the end, and so do inputs where there are several microbatches."""
    slots: dict[fx.Node, int] = {}
    placeholders = graph.placeholders
    for node in placeholders:
        slots[node] = len(slots)
    run = sections(graph)
    early, once, nodes = run.before, run.first, run.in_order(graph)
    microbatch_nodes = run.microbatch | once
    repeated = range(len(early), len(early) + sum(1 for node in nodes if node in microbatch_nodes))
    first = frozenset(index for index in repeated if nodes[index] in once) if once else frozenset[int]()
    yields = [_yields(node) for node in nodes]
    for results in yields:
        for value, _ in results:
            slots[value] = len(slots)
    live_to_end = [slots[node] for node in graph.output_values]
    live_to_end += range(len(placeholders)) if graph.microbatches > 1 else ()
    last_use = dict.fromkeys(live_to_end, len(nodes))
    for index, node in enumerate(nodes):
        for slot in [*(slots[v] for v in operands(node)), *(slots[v] for v, _ in yields[index])]:
            last_use[slot] = max(last_use.get(slot, 0), index)
    for index in (*range(repeated.start), *sorted(first)):  # what later microbatches read, too, is kept for them
        for value, _ in yields[index]:
            if last_use[slots[value]] >= repeated.start and not (value.users and once.issuperset(value.users)):
                last_use[slots[value]] = max(last_use[slots[value]], repeated.stop)
    freed_after: dict[int, list[int]] = {}
    for slot, index in last_use.items():
        freed_after.setdefault(index, []).append(slot)
    calls = tuple(
        CallSlots(
            node,
            tuple(slots[v] for v in operands(node)),
            tuple((value, position, slots[value]) for value, position in results),
            tuple(freed_after.get(index, ())),
        )
        for index, (node, results) in enumerate(zip(nodes, yields, strict=True))
    )
    return SlottedCalls(calls, slots, repeated, first)


def _yields(node: fx.Node) -> list[tuple[fx.Node, int | None]]:
    if info(node).type is not None:
        return [(node, None)]
    return [(user, cast(int, user.args[1])) for user in node.users if user.target is operator.getitem]
