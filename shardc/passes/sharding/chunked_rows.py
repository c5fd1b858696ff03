"""Where a sequence is cut into chunks, its rows are grouped anew (`shardc.ir.ops.shift.REGROUP`).

    view(x, [4, 4, 8, 6])           x: f32[4, 32, 6]     regroup(x), of (4 8) rows, and the view of that
    view(pad(x, [0, 0, 0, 6]), ..)  x: f32[4, 50, 6]     regroup(x), of (7 8) rows, the last 6 of which are 0
    view(y, [4, 32, 6])             y: f32[4, 4, 8, 6]   the view, and regroup of it, of 32 rows

A chunk lies with one rank, a sequence as its other readers want it: in zigzag, in parts that are no whole chunks. Only
the rows that do not lie with their chunk travel. Without this the sequence would be one of chunks for all readers.

Where nothing else asks how rows lie, a sequence stays one of chunks, which is free in any length. It is rewritten where
states go from chunk to chunk, where rows of it move (a shift, a running sum, a row that is picked), where causal
attention may make it a zigzag, and where attention reads keys of another length. Chunks of chunks are sequences too, as
in a pyramid of patches that are merged: of all levels, or of none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.carried_states import CARRIED_STATES
from shardc.ir.ops.shift import REGROUP
from shardc.ir.schema import given
from shardc.ir.types import TensorType
from shardc.passes.sharding.row_moves import MOVES
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
ALONG = (aten.cumsum.default, aten.flip.default, aten.select.int)  # beside `MOVES`
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
CUTS = (
    *VIEWS,
    aten.slice.Tensor,  # of every other row
    aten.slice_backward.default,
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
        self.along = {self._of(place) for place in self.roots}
        self.of_states = any(node.target is CARRIED_STATES for node in self.graph.calls())
        cuts = [(self._of(place), self._of(major), chunk) for _, place, major, chunk in self._cuts()]
        for place, _, chunk in cuts:
            self.chunks.setdefault(place, set()).add(chunk)
        count = 0
        while count != len(self.along) and not self.of_states:  # whose chunks are no sequences to cut again
            count = len(self.along)
            self.along |= {major for place, major, _ in cuts if place in self.along}
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

    def _cuts(self) -> Iterator[tuple[fx.Node, Place, Place, int]]:
        """Dims that views cut into chunks, or join of them; the dims of chunks; and how long a chunk is."""
        for node in self.graph.calls():
            if node.target in (VIEWS if self.of_states else CUTS):
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
                        if len(factors) > 1 and (factors[0] in alone or self.of_states):
                            chunk = type_of(value).shape[dim] // rule.sizes[factors[0]]
                            yield node, (value, dim), alone.get(factors[0], (value, dim)), chunk

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
        for node, (value, dim), _, chunk in cuts:
            joined = value not in operands(node)
            with self.graph.fx.inserting_after(value) if joined else self.graph.fx.inserting_before(node):
                found = None if joined else known.get(((value, dim), chunk))
                args = (value, dim, type_of(value).shape[dim], chunk, joined)
                found = found or self.graph.call(REGROUP, args, like=node, type=type_of(value))
            if joined and node.target is aten.slice_backward.default:
                self._spread(node, dim, chunk)
            if joined:
                self.graph.replace_value(value, found)
                continue
            known[(value, dim), chunk] = found
            if node.target is aten.slice.Tensor:
                self._select(node, found, dim, chunk)
            else:
                node.replace_input_with(value, found)

    def _spread(self, node: fx.Node, dim: int, chunk: int) -> None:
        """The gradient of every so many rows: each is that of one row of a chunk. It becomes a view."""
        args, shape = given(node), type_of(node).shape
        sizes = [*shape[:dim], shape[dim] // chunk, chunk, *shape[dim + 1 :]]
        with self.graph.fx.inserting_before(node):
            apart = self.graph.call(
                aten.select_backward.default, (args["grad_output"], sizes, dim + 1, args["start"]),
                like=node, type=TensorType.plain(type_of(node).dtype, sizes),
            )  # fmt: skip
        node.target, node.args, node.kwargs = aten.view.default, (apart, list(shape)), {}

    def _select(self, node: fx.Node, rows: fx.Node, dim: int, chunk: int) -> None:
        """Every so many rows, as one of each chunk."""
        shape = type_of(rows).shape
        sizes = [*shape[:dim], shape[dim] // chunk, chunk, *shape[dim + 1 :]]
        with self.graph.fx.inserting_before(node):
            cut = self.graph.call(
                aten.view.default, (rows, sizes), like=node, type=TensorType.plain(type_of(rows).dtype, sizes)
            )
            one = self.graph.call(
                aten.select.int, (cut, dim + 1, given(node).get("start") or 0), like=node, type=type_of(node)
            )
        self.graph.replace_value(node, one)
