"""Atoms tied together by the ops that they pass through: how far an axis that is put on one would travel.

    x: [s, k]   w: [n.0, n.1, k]   y = linear(x, w): [s, n.0, n.1]   softmax over n.1

ties w's n.0 to y's, and says that n.0 is clean, while an op keeps n.1 whole. Two classes are rivals where an op could
split either but not both: attention keeps a key's head_dim whole, and its query heads may be split.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.passes.sharding.atomize import linked_gradients
from shardc.passes.sharding.casts import narrows
from shardc.passes.softmax.split_softmax import opened
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule
from shardc.rules.section import SECTION_OPS

aten = torch.ops.aten
Place = tuple[fx.Node, int]  # a value and one of its flat atoms


class Classes:
    """The classes of a graph's atoms, found in one walk over its calls."""

    def __init__(self, graph: Graph, without_sections: bool = False) -> None:
        """`without_sections`: as if no op took sections of a dim, which keeps whole what it takes unequal ones of."""
        self._parent: dict[Place, Place] = {}
        self._uses: dict[fx.Node, list[tuple[fx.Node, int]]] = {}  # value -> the calls that read it, as which operand
        blocked: list[Place] = []
        selectors: list[Place] = []
        rivals: list[tuple[Place, Place]] = []
        for node in graph.calls():
            if find_rule(node.target) is None or info(node).constant:  # every rank can cut a constant as it likes
                continue
            if without_sections and node.target in SECTION_OPS:
                continue
            projection = project(node)
            keys = keys_of(node, projection)
            first: dict[int, Place] = {}
            values = [*operands(node), *results(node)]
            for k, value in enumerate(operands(node)):
                self._uses.setdefault(value, []).append((node, k))
            for value, pieces in zip(values, (*projection.operands, *projection.results), strict=True):
                if value is None:
                    continue
                for i, piece in enumerate(pieces):
                    key = (value, i)
                    if piece in first:
                        self._union(first[piece], key)
                    else:
                        first[piece] = key
                        if piece in projection.blocked and piece not in keys:
                            blocked.append(key)
                            if projection.names[piece].isdigit():
                                selectors.append(key)
            rivals += [(first[a], first[b]) for a, b in _rivals(node, projection) if a in first and b in first]
        for value, twin in linked_gradients(graph):
            for i in range(min(len(type_of(value).atoms), len(type_of(twin).atoms))):
                self._union((value, i), (twin, i))
        self._blocked = {self.of(key) for key in blocked}
        self._selectors = {self.of(key) for key in selectors}
        self._rivals: dict[Place, set[Place]] = {}
        for a, b in rivals:
            self._rivals.setdefault(self.of(a), set()).add(self.of(b))

    def of(self, key: Place) -> Place:
        """The atom that stands for the class of this one."""
        root = key
        while (up := self._parent.get(root, root)) != root:
            root = up
        while self._parent.get(key, key) != root:
            self._parent[key], key = root, self._parent.get(key, key)
        return root

    def _union(self, a: Place, b: Place) -> None:
        ra, rb = self.of(a), self.of(b)
        if ra != rb:
            self._parent[rb] = ra

    def clean(self, value: fx.Node, atom: int) -> bool:
        """No op that the atom reaches keeps it whole."""
        return self.of((value, atom)) not in self._blocked

    def selector(self, value: fx.Node, atom: int) -> bool:
        """Some op takes equal sections along it, as a split into q, k and v does."""
        return self.of((value, atom)) in self._selectors

    def rivals(self, value: fx.Node, atom: int) -> set[Place]:
        """Classes that an op could split in this one's stead: where it does, this atom is better copied to it."""
        return self._rivals.get(self.of((value, atom)), set())

    def needing_whole(self, value: fx.Node, atom: int) -> list[fx.Node]:
        """The calls that read the value, if each of them needs this atom whole; else none."""
        uses: list[tuple[fx.Node, int, int]] = []  # a call, which operand of it, and which atom of that
        for node, k in self._uses.get(value, []):
            if info(node).phase == "opt":  # a parameter is updated piece by piece
                continue
            piece, cast = project(node).operands[k][atom], project(node).results[0]
            if narrows(node) and piece in cast:  # and computed with through its cast
                uses += [(reader, i, cast.index(piece)) for reader, i in self._uses.get(node, [])]
            else:  # a cast too, where the atoms of the two do not nest
                uses.append((node, k, atom))
        always_whole = all(
            project(n).operands[k][i] in project(n).blocked - opened(n, project(n)).keys() for n, k, i in uses
        )
        return [node for node, _, _ in uses] if always_whole else []


def keys_of(node: fx.Node, projection: Projection) -> set[int]:
    """The pieces of attention's keys, which are sent where rows lie over an axis: an axis may be put on them."""
    if node.target not in (SDPA, SDPA_BWD):
        return set()
    return {piece for piece, name in enumerate(projection.names) if name == "t" or name.startswith("t.")}


def _rivals(node: fx.Node, projection: Projection) -> Iterator[tuple[int, int]]:
    """(a, b): pieces such that the op leaves an operand with `a` whole where it splits `b`, which that has not.

    Either the op never splits `a`, or it repeats the operand along `b`.
    """
    repeats = node.target is aten.expand.default
    for pieces in projection.operands:
        stuck = [p for p in pieces if repeats or p in projection.blocked]
        if stuck:
            others = {p for tensor in (*projection.operands, *projection.results) for p in tensor}
            for other in sorted(others - set(pieces) - projection.blocked):
                yield from ((p, other) for p in stuck)
