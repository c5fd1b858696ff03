"""Where a sequence is cut into chunks, its rows are grouped anew (`shardc.ir.ops.shift.REGROUP`).

    view(x, [4, 4, 8, 6])           x: f32[4, 32, 6]     regroup(x), of (4 8) rows, and the view of that
    view(pad(x, [0, 0, 0, 6]), ..)  x: f32[4, 50, 6]     regroup(x), of (7 8) rows, the last 6 of which are 0
    view(y, [4, 32, 6])             y: f32[4, 4, 8, 6]   the view, and regroup of it, of 32 rows

A chunk lies with one rank, a sequence as its other readers want it: in zigzag, in parts that are no whole chunks. Only
the rows that do not lie with their chunk travel. Without this the sequence would be one of chunks for all readers.

Only graphs whose states go from chunk to chunk are rewritten: Mamba2's, and gated delta rules, of which a loop over
chunks is one scan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.ops.carried_states import CARRIED_STATES
from shardc.ir.ops.scan import SCAN
from shardc.ir.ops.shift import REGROUP
from shardc.passes.sharding.divide_scans import timed
from shardc.passes.sharding.row_moves import MOVES, Move
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
Place = tuple[fx.Node, int]  # a dim of a value


def separate_chunks(graph: Graph, ports: Collection[tuple[str, int]]) -> None:
    """Group rows anew where dims of these inputs, or what is padded of them, are cut into chunks or joined of such."""
    nodes = {port.name: node for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
    roots = [(nodes[name], dim) for name, dim in ports if name in nodes]
    if roots and any(node.target in (CARRIED_STATES, SCAN) for node in graph.calls()):
        found = _Sequences(graph, roots)
        if found.carries_states():
            found.write()


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
        while self._joined():
            pass
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

    def _joined(self) -> bool:
        """Join dims that are the same part of one dim, as where a batch's rows are cut of what they were put into."""
        parts: dict[tuple[Place, int, int], Place] = {}
        before = len(self.parent)
        for whole, size, stride, part in self._parts():
            if size > 1:
                self._union(parts.setdefault((self._of(whole), size, stride), part), part)
        return len(self.parent) > before

    def carries_states(self) -> bool:
        """Do states go from chunk to chunk?"""
        rows = self.along | {end for _, _, end in self._paddings()}
        cuts = {(place, chunk) for _, place, chunk in self._cuts() if self._of(place) in rows}
        chunked = {self._of(part) for whole, _, stride, part in self._parts() if (whole, stride) in cuts}
        return any(
            node.target is CARRIED_STATES or (node.target is SCAN and any(self._of(p) in chunked for p in timed(node)))
            for node in self.graph.calls()
        )

    def _parts(self) -> Iterator[tuple[Place, int, int, Place]]:
        """Of dims that views cut, or join of others: the dim, and the size, the stride and the dim of each part."""
        for node in self.graph.calls():
            if node.target not in VIEWS:
                continue
            rule, (x,) = rule_of(node), operands(node)
            sides = (x, rule.operands[0]), (node, rule.results[0])
            for (value, labels), (other, names) in (sides, sides[::-1]):
                of_factor = {factors[0]: (other, dim) for dim, factors in enumerate(names) if len(factors) == 1}
                for dim, factors in enumerate(labels):
                    stride = type_of(value).shape[dim] if len(factors) > 1 else 0
                    for factor in factors if stride else ():
                        stride //= rule.sizes[factor]
                        if factor in of_factor:
                            yield (value, dim), rule.sizes[factor], stride, of_factor[factor]

    def _cuts(self) -> Iterator[tuple[fx.Node, Place, int]]:
        """Dims that views cut into chunks, or join of them, and how long a chunk is."""
        for node in self.graph.calls():
            if node.target in VIEWS:
                rule, (x,) = rule_of(node), operands(node)
                for value, labels in ((x, rule.operands[0]), (node, rule.results[0])):
                    for dim, factors in enumerate(labels):
                        if len(factors) > 1:
                            yield node, (value, dim), type_of(value).shape[dim] // rule.sizes[factors[0]]

    def _paddings(self) -> Iterator[tuple[fx.Node, Move, Place]]:
        """Where rows are padded behind, or cut of what is: the call, what it does, and the class of what is longer."""
        for node in self.graph.calls():
            move = MOVES[node.target](node) if node.target in MOVES else None
            if move is None or move.offset or move.wrap or move.fill:
                continue
            padded = [end for end in map(self._of, ((move.x, move.dim), (node, move.dim))) if end not in self.along]
            if len(padded) == 1:
                yield node, move, padded[0]

    def write(self) -> None:
        cuts = [cut for cut in self._cuts() if self._of(cut[1]) in self.along]
        for node, move, padded in list(self._paddings()):
            if len(chunk := self.chunks.get(padded, ())) == 1:
                args = (move.x, move.dim, move.length, *chunk, padded == self._of((move.x, move.dim)))
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
