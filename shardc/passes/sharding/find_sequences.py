"""find_sequences: what is done along a sequence that ranks have parts of, told as moves of its rows; and how it lies.

Needs: atomized types. Ensures: a dim that an input's annotation shards, and each dim that it is passed on to, is one
atom; sections of it and paddings are `shardc.shift`, whose results' atoms lie as it does; and where the plan asks for
it, or causal attention reads it, it is a zigzag (`ir.blocks`).

    labels[:, 1:]                  slice             ->  shift by 1, i64[4, 15/16]
    F.pad(labels, (0, 1))[:, 1:]   pad, slice        ->  shift by 1, i64[4, 16]; what is longer than the sequence goes
    logits[:, :-1]                 slice             ->  shift by 0, f32[4, 15/16, 100]
    their gradients                slice_backward    ->  shift by -1, by 0, with zeros
    roll(x, 1, 1)                  roll              ->  shift by -1, in a circle
    cumsum(x, 1), cummax(x, 1)     cumsum            ->  cumulative, and the other way in backward (`prefixes`)
    flip(x, [1])                   flip              ->  mirror
    scan(h, [x, ...], "h:...")     scan              ->  one in segments, of the steps that ranks have

Atoms that ops pass on are one class; a move ties two classes. Of those that are shorter by less than half, each
element lies where the sequence has it; others stay as they are, and are gathered where they are read. Of a zigzag whose
rows are grouped in chunks, chunks are in zigzag too: then hardly a row has to go to its chunk. Longer than 400
lines: moves, sums, picks and the choice of a layout are steps of one walk over classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from shardc.ir.blocks import Blocks, truncated, zigzag
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, operands, results, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.scan import SCAN
from shardc.ir.ops.shift import REGROUP, SHIFT
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.passes.base import Pass
from shardc.passes.sharding.atomize import linked_gradients
from shardc.passes.sharding.balance import worth_a_zigzag
from shardc.passes.sharding.divide_scans import divide_scans, scans_along
from shardc.passes.sharding.named_rows import NAMED, write_named
from shardc.passes.sharding.prefixes import PREFIXES, unify_prefixes, write_prefixes
from shardc.passes.sharding.row_moves import (
    GRADIENTS_OF_PICKS,
    MOVES,
    Move,
    of_whole,
    picked_rows,
    shifted,
    write_pick,
)
from shardc.plan.context import Balance
from shardc.rules.projection import overlay, project, result_types
from shardc.rules.registry import find_rule, rule_of

aten = torch.ops.aten
Slot = fx.Node | tuple[fx.Node, int]  # a value, or a result that nothing uses
Place = tuple[Slot, int]  # one of its flat atoms


@dataclass(frozen=True)
class ShardedSequence:
    """A dim of an input that axes shard; of the first of them, which has so many ranks, it may be a zigzag."""

    port: str
    dim: int
    length: int
    axis: str
    ranks: int
    balanced: bool = True  # may it be a zigzag?
    text: str = ""  # the annotation, for findings
    location: str | None = None
    axes: Axes = ()  # all that shard it
    of_chunks: bool = False  # is it one of the chunks of such a dim?


@dataclass(frozen=True)
class FindSequences(Pass):
    """Tell what is done along the dims of inputs that axes shard as moves of rows, and choose how they lie."""

    sequences: tuple[ShardedSequence, ...] = ()
    balance: Balance = "none"
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        ports = {p.name: n for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
        known = [(s, ports[s.port]) for s in self.sequences if s.port in ports]
        if not known:
            return graph
        unify_prefixes(graph)
        axes = dict.fromkeys(s.axis for s, _ in known) if self.balance == "auto" else {}
        worth = (worth_a_zigzag(node, axis, graph.mesh, self.hardware) for axis in axes for node in graph.calls())
        wanted = self.balance == "zigzag" or any(worth)
        if not (wanted or any(node.target in {*MOVES, *PREFIXES, *NAMED, *_PICKS, SCAN} for node in graph.calls())):
            return graph
        classes = _Classes(graph)
        for axis in dict.fromkeys(s.axis for s, _ in known):
            of_axis = [(s, value) for s, value in known if s.axis == axis]
            roots = {classes.of(place): s for s, value in of_axis if (place := _only(value, s.dim)) is not None}
            todo: list[tuple[dict[Place, ShardedSequence], Balance]] = [(roots, self.balance)]
            done = set[Place]()
            while todo:
                found, balance = todo.pop()
                roots = {root: s for root, s in found.items() if root not in done}  # chunks may be an input's rows too
                if roots:
                    family = _Family(graph, classes, roots, balance, self.hardware)
                    laid = family.write()
                    done |= {*family.lengths}
                    todo.append((roots, balance))
                    todo.append((family.of_chunks(), laid))
        return graph


def _type(slot: Slot) -> TensorType:
    if isinstance(slot, fx.Node):
        return type_of(slot)
    declared = info(slot[0]).results[slot[1]]
    assert declared is not None
    return declared


def _only(value: Slot, dim: int) -> Place | None:
    """The atom of a dim that is one atom."""
    type = _type(value)
    return (value, sum(map(len, type.dims[:dim]))) if len(type.dims[dim]) == 1 else None


class _Classes:
    """Atoms that ops pass on to each other, whether an axis may split them or not, with all of their places."""

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[Place, Place] = {}
        for node in graph.calls():
            if find_rule(node.target) is None:
                continue
            first: dict[tuple[int, int], Place] = {}
            projection = project(node)
            slots: list[Slot] = [*operands(node), *result_slots(node)]
            for slot, pieces in zip(slots, (*projection.operands, *projection.results), strict=True):
                for i, piece in enumerate(pieces):
                    size = int(_type(slot).atoms[i].size) if piece in projection.followed else 0
                    self._union(first.setdefault((piece, size), (slot, i)), (slot, i))
        for value, twin in linked_gradients(graph):
            if type_of(value).sizes == type_of(twin).sizes:
                for i in range(len(type_of(value).atoms)):
                    self._union((value, i), (twin, i))
        self.members: dict[Place, list[Place]] = {}
        self._atoms = {slot: len(_type(slot).atoms) for slot, _ in self._parent}
        for place in self._parent:
            self.members.setdefault(self.of(place), []).append(place)

    def places(self, root: Place) -> list[Place]:
        """All places of a class. Where a scan's blocks, which were one and no atom, are several, one is in front."""
        found = self.members.get(root, [root])
        return [(slot, i + len(_type(slot).atoms) - self._atoms.get(slot, len(_type(slot).atoms))) for slot, i in found]

    def of(self, place: Place) -> Place:
        root = place
        while (up := self._parent.get(root, root)) != root:
            root = up
        while self._parent.get(place, place) != root:
            self._parent[place], place = root, self._parent[place]
        return root

    def _union(self, a: Place, b: Place) -> None:
        self._parent.setdefault(a, a)
        self._parent.setdefault(b, b)
        first, other = self.of(a), self.of(b)
        if first != other:
            self._parent[other] = first


def result_slots(node: fx.Node) -> list[Slot]:
    """The results of a call in the order of its rule, those that nothing uses too."""
    if info(node).type is not None:
        return [node]
    declared = [i for i, t in enumerate(info(node).results) if t is not None]
    return [(node, i) if value is None else value for i, value in zip(declared, results(node), strict=True)]


_PICKS = (aten.select.int, aten.select_backward.default)


# --------------------------------------------------------------------------------------------- one axis's sequences
@dataclass
class _Family:
    """The classes that moves tie to those of the longest annotated dims: all of a sequence, or of nearly all of it. Of
    `roots` those stay that are among them: others, as a decoder's rows beside an encoder's, are sequences of their own.
    """

    graph: Graph
    classes: _Classes
    roots: dict[Place, ShardedSequence]
    balance: Balance
    hardware: Hardware
    moves: dict[fx.Node, Move] = field(default_factory=dict[fx.Node, Move])
    lengths: dict[Place, int] = field(default_factory=dict[Place, int])

    def __post_init__(self) -> None:
        self.base = max(self._length(root) for root in self.roots)
        self.lengths = {root: self.base for root in self.roots if self._length(root) == self.base}
        found = [(node, move) for node in self.graph.calls() for move in self._candidate(node)]
        changed = True
        while changed:
            changed = False
            for node, move in found:
                if node in self.moves:
                    continue
                ends = [_only(move.x, move.dim), _only(node, move.dim)]
                known = [self.classes.of(end) for end in ends if end is not None]
                if len(known) == 2 and any(end in self.lengths for end in known):
                    self.moves[node] = move
                    self.lengths |= {end: self._length(end) for end in known}
                    changed = True
        self.roots = {root: s for root, s in self.roots.items() if root in self.lengths}

    def _length(self, place: Place) -> int:
        return int(_type(place[0]).atoms[place[1]].size)

    def _near(self, length: int) -> bool:
        return 2 * length > self.base

    def _candidate(self, node: fx.Node) -> Iterator[Move]:
        """What a call does, if it moves rows and both of its ends are of nearly the length of the sequence."""
        move = of_whole(node, self._near) if node.target in MOVES and not type_of(node).ragged else None
        if move is not None and move.length < 2 * self.base:
            sizes = type_of(move.x).shape[move.dim], move.length
            if all(map(self._near, sizes)):
                yield move

    def _is_part(self, value: fx.Node, dim: int) -> bool:
        """Is a dim the sequence, or nearly all of it?"""
        end = _only(value, dim)
        return end is not None and self.classes.of(end) in self.lengths

    def _is_along(self, value: fx.Node, dim: int) -> bool:
        """Is a dim the sequence, from its first row to its last?"""
        end = _only(value, dim)
        return end is not None and self.classes.of(end) in self.lengths and self._length(end) == self.base

    def _pick(self) -> None:
        """A row of the sequence, or a few, which the ranks that have them give to all; and their gradients."""
        for node in list(self.graph.calls()):
            picked = picked_rows(node)
            if picked is None:
                continue
            whole = node if node.target in GRADIENTS_OF_PICKS else given(node)["self"]
            end = _only(whole, picked.dim)
            if end is not None and self.classes.of(end) in self.lengths and 2 * picked.length < self.base:
                write_pick(self.graph, node, picked)

    def write(self) -> Balance:
        """Tell moves, and lay the sequence: how?"""
        write_prefixes(self.graph, self._is_part)
        self._pick()
        write_named(self.graph, self._is_along)
        first = next(iter(self.roots.values()))
        scans, axes = scans_along(self.graph, self._is_along), first.axes or (first.axis,)
        divide_scans(self.graph, scans, str(self.base), axes)
        for node, move in self.moves.items():
            node.target, node.args, node.kwargs = SHIFT, move.args, {}
        for node in self.moves:
            _fold(self.graph, node)
        self.graph.erase_dead()
        alive = set(self.graph.fx.nodes)
        scans = [node for node in scans if node in alive]
        places = {
            root: [p for p in self.classes.places(root) if (p[0] if isinstance(p[0], fx.Node) else p[0][0]) in alive]
            for root in self.lengths
        }
        (first, *_), axis = self.roots.values(), next(iter(self.roots.values())).axis
        plain = {root: self._atom(self.base, length) for root, length in self.lengths.items()}
        chunks = self._chunks()
        few = self.balance == "auto" and min(chunks.values(), default=2 * first.ranks) < 2 * first.ranks
        if self.balance != "none" and not few and all(s.balanced for s in self.roots.values()):
            balanced = zigzag(self.base, axis, first.ranks)
            why = "" if balanced is not None else f"{self.base} rows are too few for {2 * first.ranks} chunks"
            if balanced is not None and not why:
                divide_scans(self.graph, scans, str(balanced), axes)
                places |= {root: self.classes.places(root) for root in chunks}
                plain |= chunks
                atoms = {root: self._atom(balanced, length) for root, length in self.lengths.items()}
                self._place(places, atoms | {root: zigzag(n, axis, first.ranks) for root, n in chunks.items()})
                why = self._refused(places)
                if not why and (self.balance == "zigzag" or any(map(self._is_lopsided_along, self._calls(places)))):
                    return "zigzag"
                divide_scans(self.graph, scans, str(self.base), axes)
            if why and self.balance == "zigzag" and not first.of_chunks:
                message = f"the rows of {first.text or first.port} are not in zigzag: {why}"
                self.graph.diagnostics.append(
                    Diagnostic("SC203", message, "warning", location=first.location, hint="write balance: none")
                )
        self._place(places, plain)
        return "none"

    def of_chunks(self) -> dict[Place, ShardedSequence]:
        """Chunks are sequences too: what a convolution with a stride yields, and the states of chunks."""
        first = next(iter(self.roots.values()))
        return {
            root: replace(first, length=n, of_chunks=True)
            for root, n in self._chunks().items()
            if root not in self.lengths
        }

    def _chunks(self) -> dict[Place, int]:
        """The classes of dims that have an element for each chunk of the sequence, and how many."""
        found: dict[Place, int] = {}
        for node in self.graph.calls():
            if node.target is REGROUP:
                x, dim, join = (given(node)[name] for name in ("x", "dim", "join"))
                rows, chunked = (node, x) if join else (x, node)
                (end, first) = _only(rows, dim), (chunked, sum(map(len, type_of(chunked).dims[:dim])))
                if end is not None and self.classes.of(end) in self.lengths and len(type_of(chunked).dims[dim]) > 1:
                    found[self.classes.of(first)] = self._length(first)
        return found

    def _atom(self, base: int, length: int) -> int | None:
        """The atom of a dim of this length; None if it is left as it is."""
        if length == self.base:
            return base
        return truncated(base, length) if self._near(length) and length < self.base else None

    def _place(self, places: dict[Place, list[Place]], atoms: dict[Place, int | None]) -> None:
        for root, size in atoms.items():
            for slot, i in places[root] if size is not None else ():
                assert size is not None
                _set_atom(slot, i, size)

    def _calls(self, places: dict[Place, list[Place]]) -> Iterator[fx.Node]:
        """The calls that make or read values of these places."""
        seen = set[fx.Node]()
        for of_root in places.values():
            for slot, _ in of_root:
                maker = slot if isinstance(slot, fx.Node) else slot[0]
                for node in (maker, *maker.users):
                    if node.op == "call_function" and find_rule(node.target) is not None and node not in seen:
                        seen.add(node)
                        yield node

    def _is_lopsided_along(self, node: fx.Node) -> bool:
        """Is it causal attention whose rows are the sequence, and not its batch or its heads?"""
        axis = next(iter(self.roots.values())).axis
        if not worth_a_zigzag(node, axis, self.graph.mesh, self.hardware):
            return False
        q = given(node)["q"]
        first = sum(map(len, type_of(q).dims[:-2]))
        rows = range(first, first + len(type_of(q).dims[-2]))
        return any(self.classes.of((q, atom)) in self.lengths for atom in rows)

    def _refused(self, places: dict[Place, list[Place]]) -> str:
        """Which call cannot have the sequence in zigzag over ranks, although it could have a plain one."""
        of = {(slot, i) for of_root in places.values() for slot, i in of_root}
        for node in self._calls(places):
            if info(node).constant:
                continue
            projection = project(node)
            pieces = {
                piece
                for slot, tensor in zip(
                    [*operands(node), *result_slots(node)], (*projection.operands, *projection.results), strict=True
                )
                for i, piece in enumerate(tensor)
                if (slot, i) in of and isinstance(projection.sizes[piece], Blocks)
            }
            if not pieces & projection.blocked:
                continue
            plain = _plain_projection(node)
            if any(piece in projection.blocked and piece not in plain for piece in pieces):
                return f"%{info(node).name} ({node.target}) counts them"
        return ""


def _plain_projection(node: fx.Node) -> frozenset[int]:
    """The pieces that a call would keep whole if none of its atoms had blocks."""

    def plain(type: TensorType) -> TensorType:
        return replace(type, dims=tuple(tuple(Atom(int(a.size)) for a in dim) for dim in type.dims))

    ins, outs = [plain(type_of(v)) for v in operands(node)], [plain(t) for t in result_types(node)]
    return overlay(rule_of(node), ins, outs).blocked


def _fold(graph: Graph, node: fx.Node) -> None:
    """A move of what another one has moved, as one; a move that moves nothing goes."""
    move = shifted(node)
    while move is not None and move.x.target is SHIFT:
        joined = move.after(shifted(move.x))  # type: ignore[arg-type]
        if joined is None:
            break
        move = joined
    assert move is not None
    node.args = move.args
    if move.offset == 0 and move.length == type_of(move.x).shape[move.dim]:
        graph.replace_value(node, move.x)


def _set_atom(slot: Slot, atom: int, size: int) -> None:
    type = _type(slot)
    flat = [*type.atoms]
    flat[atom] = Atom(size)
    it = iter(flat)
    changed = replace(type, dims=tuple(tuple(next(it) for _ in dim) for dim in type.dims))
    if isinstance(slot, fx.Node):
        update(slot, type=changed)
    else:
        declared = list(info(slot[0]).results)
        declared[slot[1]] = changed
        update(slot[0], results=tuple(declared))
