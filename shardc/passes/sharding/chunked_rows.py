"""Where a sequence is cut into chunks, its rows are grouped anew (`shardc.ir.ops.shift.REGROUP`).

    view(x, [4, 4, 8, 6])           x: f32[4, 32, 6]     regroup(x), of (4 8) rows, and the view of that
    view(pad(x, [0, 0, 0, 6]), ..)  x: f32[4, 50, 6]     regroup(x), of (7 8) rows, the last 6 of which are 0
    view(y, [4, 32, 6])             y: f32[4, 4, 8, 6]   the view, and regroup of it, of 32 rows

A chunk lies with one rank, a sequence as its other readers want it: in zigzag, in parts that are no whole chunks. Only
the rows that do not lie with their chunk travel. Without this the sequence would be one of chunks for all readers.

Where nothing else asks how rows lie, a sequence stays one of chunks, which is free in any length. It is rewritten where
states go from chunk to chunk (Mamba2's, and those of gated delta rules, of which a loop over chunks is one scan), where
rows of it move (a shift, a running sum, a row that is picked), where causal attention may make it a zigzag, and where
attention reads keys of another length. Chunks of chunks are sequences too, as in a pyramid of patches that are merged:
of all levels, or of none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.carried_states import CARRIED_STATES
from shardc.ir.ops.scan import SCAN
from shardc.ir.ops.shift import REGROUP
from shardc.ir.schema import given
from shardc.passes.sharding.divide_scans import timed
from shardc.passes.sharding.pool_taps import SLICES, every_so_many
from shardc.passes.sharding.row_moves import MOVES, Move
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
ALONG = (aten.cumsum.default, aten.flip.default, aten.select.int)  # beside `MOVES`
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
CUTS = (
    *VIEWS,
    *SLICES,  # of every other row
    aten.convolution.default,  # whose windows tile the rows
    aten.convolution_backward.default,
)
Place = tuple[fx.Node, int]  # a dim of a value


def separate_chunks(graph: Graph, ports: Collection[tuple[str, int]], turned: bool) -> None:
    """Group rows anew where dims of these inputs, or what is padded of them, are cut into chunks or joined of such.
    `turned`: causal attention may make a zigzag of them."""
    nodes = {port.name: node for port, node in zip(graph.inputs, graph.placeholders, strict=True)}
    roots = [(nodes[name], dim) for name, dim in ports if name in nodes]
    sequences = _Sequences(graph, roots) if roots else None
    if sequences is not None:
        sequences.split_rolls()
        if sequences.concern(turned):
            sequences.write()


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
        self.of_states = self._carries_states()
        apart = {self._of((given(n)["self"], given(n).get("dim", 0) % type_of(given(n)["self"]).ndim))
                 for n in self.graph.calls() if n.target is aten.unbind.int}  # fmt: skip
        cuts = [(self._of(place), self._of(major), chunk) for _, place, major, chunk in self._cuts(self.of_states)]
        cuts = [cut for cut in cuts if self.of_states or cut[1] not in apart]
        for place, _, chunk in cuts:
            self.chunks.setdefault(place, set()).add(chunk)
        count = 0
        while count != len(self.along) and not self.of_states:  # whose chunks are no sequences to cut again
            count = len(self.along)
            grouped = {self._of(chunked) for rows, chunked in self._grouped() if self._of(rows) in self.along}
            self.along |= {major for place, major, _ in cuts if place in self.along | grouped}
            # Rows that are cut into chunks of other lengths than they are joined of.
            self.along |= {place for place, major, _ in cuts if major in self.along and len(self.chunks[place]) > 1}
            # Rows of an image that are joined with its columns, and cut apart again.
            joined = {(place, chunk) for place, major, chunk in cuts if major in self.along}
            self.along |= {major for place, major, chunk in cuts if (place, chunk) in joined}

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

    def _carries_states(self) -> bool:
        """Do states go from chunk to chunk?"""
        rows = self.along | {end for _, _, end in self._paddings()}
        cuts = {(place, chunk) for _, place, _, chunk in self._cuts(of_states=True) if self._of(place) in rows}
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

    def _cuts(self, of_states: bool) -> Iterator[tuple[fx.Node, Place, Place, int]]:
        """Dims that are cut into chunks, or joined of them; the dims of chunks; and how long a chunk is. Of chunks with
        states that are carried, those that views cut, also where no dim is one of chunks alone."""
        for node in self.graph.calls():
            if node.target in (VIEWS if of_states else CUTS):
                rule = rule_of(node)
                values = [*operands(node), *results(node)]
                tensors = [
                    (value, labels)
                    for value, labels in zip(values, (*rule.operands, *rule.results), strict=True)
                    if value is not None
                ]
                alone = {
                    factors[0]: (value, dim)
                    for value, labels in tensors
                    for dim, factors in enumerate(labels)
                    if len(factors) == 1
                }
                for value, labels in tensors:
                    for dim, factors in enumerate(labels):
                        if len(factors) > 1 and (factors[0] in alone or of_states):
                            chunk = type_of(value).shape[dim] // rule.sizes[factors[0]]
                            yield node, (value, dim), alone.get(factors[0], (value, dim)), chunk

    def _grouped(self) -> Iterator[tuple[Place, Place]]:
        """Rows that lie in chunks elsewhere, as those that windows read (`strided_taps`): both dims."""
        for node in self.graph.calls():
            if node.target is REGROUP:
                x, dim = given(node)["x"], given(node)["dim"]
                yield ((node, dim), (x, dim)) if given(node)["join"] else ((x, dim), (node, dim))

    def split_rolls(self) -> None:
        """A roll of rows and of something else, as one after the other."""
        for node in list(self.graph.calls()):
            if node.target is not aten.roll.default or len(dims := given(node).get("dims", ())) < 2:
                continue
            x, shifts = given(node)["self"], given(node)["shifts"]
            if not any(self._of((x, dim % type_of(x).ndim)) in self.along for dim in dims):
                continue
            value = x
            with self.graph.fx.inserting_before(node):
                for shift, dim in zip(shifts, dims, strict=True):
                    value = self.graph.call(aten.roll.default, (value, [shift], [dim]), like=node, type=type_of(node))
                    for d in range(type_of(x).ndim):
                        self._union((node, d), (value, d))
            self.graph.replace_value(node, value)
        self.graph.erase_dead()

    def concern(self, turned: bool) -> bool:
        """Does it matter to some call that a sequence which is cut into chunks is one run of rows?"""
        if self.of_states:
            return True
        if not any(place in self.along for place in self.chunks):
            return False
        return any(map(self._asks, self.graph.calls())) or turned

    def _asks(self, node: fx.Node) -> bool:
        if node.target in (SDPA, SDPA_BWD):
            ends = [(given(node)[name], type_of(given(node)[name]).ndim - 2) for name in ("q", "k")]
            lengths = {type_of(value).shape[dim] for value, dim in ends}
            return len(lengths) > 1 and all(self._of(end) in self.along for end in ends)
        if node.target in MOVES:
            move = MOVES[node.target](node)
            places = [] if move is None else [(move.x, move.dim), (node, move.dim)]
        elif node.target in ALONG:
            args = given(node)
            dims = [args["dim"]] if "dim" in args else args["dims"]
            places = [(value, dim % type_of(value).ndim) for value in operands(node)[:1] for dim in dims]
        else:
            return False
        return any(self._of(place) in self.along for place in places)

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
        cuts = [cut for cut in self._cuts(self.of_states) if self._of(cut[1]) in self.along]
        for node, move, padded in list(self._paddings()):
            if len(chunk := self.chunks.get(padded, ())) == 1:
                args = (move.x, move.dim, move.length, *chunk, padded == self._of((move.x, move.dim)))
                node.target, node.args, node.kwargs = REGROUP, args, {}
        known: dict[tuple[fx.Node, int, int], fx.Node] = {}
        rows: dict[fx.Node, fx.Node] = {}  # of values that are joined of chunks, what is read in their stead
        for node, (value, dim), _, chunk in cuts:
            length = type_of(value).shape[dim]
            if node.target in SLICES:
                every_so_many(self.graph, node, {length})
                continue
            x = rows.get(value, value)
            joined = x not in operands(node)
            if not joined and x.target is REGROUP and x.args[1:] == (dim, length, chunk, True):
                node.replace_input_with(x, x.args[0])  # type: ignore[arg-type]
                continue
            with self.graph.fx.inserting_after(x) if joined else self.graph.fx.inserting_before(node):
                found = None if joined else known.get((x, dim, chunk))
                args = (x, dim, length, chunk, joined)
                found = found or self.graph.call(REGROUP, args, like=node, type=type_of(value))
            if joined:
                self.graph.replace_value(x, found)
                rows[value] = found
                continue
            known[x, dim, chunk] = found
            node.replace_input_with(x, found)
