"""Where a sequence is cut into chunks, its rows are grouped anew (`shardc.ir.ops.shift.REGROUP`).

    view(x, [4, 4, 8, 6])           x: f32[4, 32, 6]     regroup(x), of (4 8) rows, and the view of that
    view(pad(x, [0, 0, 0, 6]), ..)  x: f32[4, 50, 6]     regroup(x), of (7 8) rows, the last 6 of which are 0
    view(y, [4, 32, 6])             y: f32[4, 4, 8, 6]   the view, and regroup of it, of 32 rows

A chunk lies with one rank, a sequence as its other readers want it: in zigzag, in parts that are no whole chunks. Only
the rows that do not lie with their chunk travel. Without this the sequence would be one of chunks for all readers.

Only graphs whose states go from chunk to chunk are rewritten.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.ops.carried_states import CARRIED_STATES
from shardc.ir.ops.shift import REGROUP
from shardc.passes.sharding.row_moves import MOVES
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
Place = tuple[fx.Node, int]  # a dim of a value


def separate_chunks(graph: Graph, ports: Collection[tuple[str, int]]) -> None:
    """Group rows anew where dims of these inputs, or what is padded of them, are cut into chunks or joined of such."""
    nodes = {port.name: node for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
    roots = [(nodes[name], dim) for name, dim in ports if name in nodes]
    if roots and any(node.target is CARRIED_STATES for node in graph.calls()):
        _Sequences(graph, roots).write()


@dataclass
class _Sequences:
    graph: Graph
    roots: list[Place]
    parent: dict[Place, Place] = field(default_factory=dict[Place, Place])
    chunks: dict[Place, set[int]] = field(default_factory=dict[Place, set[int]])  # of classes that are cut, how long

    def __post_init__(self) -> None:
        for node in self.graph.calls():
            if find_rule(node.target) is None:
                continue
            rule, first = rule_of(node), dict[str, Place]()
            values = [*operands(node), *results(node)]
            for value, labels in zip(values, (*rule.operands, *rule.results), strict=True):
                for dim, factors in enumerate(labels) if value is not None else ():
                    if len(factors) == 1:
                        self._union(first.setdefault(factors[0], (value, dim)), (value, dim))  # type: ignore[arg-type]
        self.along = {self._of(place) for place in self.roots}
        for _, place, chunk in self._cuts():
            self.chunks.setdefault(self._of(place), set()).add(chunk)

    def _of(self, place: Place) -> Place:
        root = place
        while (up := self.parent.get(root, root)) != root:
            root = up
        while self.parent.get(place, place) != root:
            self.parent[place], place = root, self.parent[place]
        return root

    def _union(self, a: Place, b: Place) -> None:
        first, other = self._of(a), self._of(b)
        if first != other:
            self.parent[other] = first

    def _cuts(self) -> Iterator[tuple[fx.Node, Place, int]]:
        """Dims that views cut into chunks, or join of them, and how long a chunk is."""
        for node in self.graph.calls():
            if node.target in VIEWS:
                rule, (x,) = rule_of(node), operands(node)
                for value, labels in ((x, rule.operands[0]), (node, rule.results[0])):
                    for dim, factors in enumerate(labels):
                        if len(factors) > 1:
                            yield node, (value, dim), type_of(value).shape[dim] // rule.sizes[factors[0]]

    def write(self) -> None:
        moves = [(node, MOVES[node.target](node)) for node in self.graph.calls() if node.target in MOVES]
        cuts = [cut for cut in self._cuts() if self._of(cut[1]) in self.along]
        for node, move in moves:
            if move is None or move.offset or move.wrap or move.fill:
                continue
            ends = self._of((move.x, move.dim)), self._of((node, move.dim))
            padded = [end for end in ends if end not in self.along]
            if len(padded) == 1 and len(chunk := self.chunks.get(padded[0], ())) == 1:
                args = (move.x, move.dim, move.length, *chunk, padded[0] == ends[0])
                node.target, node.args, node.kwargs = REGROUP, args, {}
        known: dict[tuple[Place, int], fx.Node] = {}
        for node, (value, dim), chunk in cuts:
            joined = value is node
            with self.graph.fx.inserting_after(node) if joined else self.graph.fx.inserting_before(node):
                found = None if joined else known.get(((value, dim), chunk))
                args = (value, dim, type_of(value).shape[dim], chunk, joined)
                found = found or self.graph.call(REGROUP, args, like=node, type=type_of(value))
            if not joined:
                known[(value, dim), chunk] = found
                node.replace_input_with(value, found)
                continue
            self.graph.replace_value(value, found)
