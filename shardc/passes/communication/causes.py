"""name_causes: which annotation each collective comes from, axis by axis.

    up.weight = "tp, -"  ->  up.linear  ->  gelu  ->  down.linear splits k over tp: a pending sum  ->  all_reduce

Needs: combined collectives, assignments, global shapes. Ensures: a collective's `cause` names the annotation behind
each of its axes, for good: a localized graph, or one from a file, does not tell any more.

A value has one cause, but several axes, and each may be from another annotation; so the way back follows one axis: from
a tensor that it shards, through a call, to another tensor of that call with the same piece, and on to a tensor that the
user annotated. One that only looks at what the value was computed from is preferred, then the one with the fewest calls
of backward, and of these the shortest: so the gradients of all layers are reduced over `dp` because the inputs are cut,
and not those of the last layers because the labels are. All ways of a graph are found at once, nearest first from the
annotations on (Dijkstra 1959), so that a thousand gradients cost one walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, results, type_of, update
from shardc.ir.ops import collectives, local
from shardc.ir.ops.exchange import EXCHANGE_COUNTS, ROW_MOVES
from shardc.ir.provenance import Cause, Requirement
from shardc.ir.schema import given
from shardc.passes.base import Pass, split_of
from shardc.passes.sharding.casts import narrows
from shardc.rules.projection import project
from shardc.rules.registry import find_rule

REDUCTIONS = (collectives.all_reduce, collectives.reduce_scatter)
GATHERS = (collectives.all_gather, collectives.gather_blocks, collectives.all_to_all, collectives.permute_ranks)
COLLECTIVES = (*REDUCTIONS, *GATHERS, EXCHANGE_COUNTS, *ROW_MOVES)
MOVES = (*COLLECTIVES, local.shard_slice, local.slice_blocks)
Place = tuple[fx.Node, int]  # a value and one of its flat atoms
Way = list[tuple[Place, fx.Node | None]]  # from an annotated place on, each with the call that handed it the axis
# How far a place is (calls of backward, and all calls), the place before it, and the call between.
_Step = tuple[tuple[int, int], Place, fx.Node | None]
Scope = Literal["upstream", "forward", "anywhere"]


@dataclass(frozen=True)
class NameCauses(Pass):
    """Put on every collective the annotations that it comes from."""

    def run(self, graph: Graph) -> Graph:
        causes = Causes(graph)
        for node in graph.calls():
            if node.target in COLLECTIVES:
                requirements = dict.fromkeys(causes.cause(node, axis) for axis in given(node)["axes"])
                update(node, cause=Cause(tuple(filter(None, requirements))))
        return graph


@dataclass(frozen=True)
class Left:
    """What the op before a collective leaves to be communicated over an axis."""

    call: fx.Node  # the op
    value: fx.Node  # its result
    starts: tuple[Place, ...]  # the tensors whose split did it
    passed: int  # linear ops that carried a pending sum on


@dataclass(frozen=True, slots=True)
class _Shared:
    """Places of one call's tensors that are the same piece, sharded over the same axis."""

    call: fx.Node
    places: tuple[Place, ...]
    of_results: tuple[Place, ...]  # the places in its results


class Causes:
    """The ways from annotations to all places of a graph, found when they are first asked for."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._shared: dict[str, dict[Place, list[_Shared]]] | None = None
        self._reached_by_scope: dict[tuple[str, Scope], dict[Place, _Step]] = {}

    def cause(self, moved: fx.Node, axis: str) -> Requirement | None:
        """The annotation behind an axis of a collective, or the storage or optimizer that it is for; None if there is
        none of these."""
        if optimizer := needs_whole(moved):
            return Requirement("optimizer", optimizer, as_named(self.graph, axis))
        way = self.way(left(moved, axis).starts, axis)
        if way:
            return self.graph.seeds[way[0][0][0]].cause
        value = before(moved)
        source = operands(value)[0] if narrows(value) else value  # a stored parameter is cast before it is gathered
        stored = any(axis in axes for axes in self.graph.stored.get(source, ()))
        if stored or info(value).phase == "opt":
            return Requirement("storage", placement=as_named(self.graph, axis))
        return None

    def way(self, starts: Sequence[Place], axis: str) -> Way:
        """The shortest way from an annotated place to one of `starts`; empty when there is none."""
        forward = any(info(v).phase == "fwd" for v, _ in starts)
        scopes: tuple[Scope, ...] = ("upstream", "forward", "anywhere") if forward else ("upstream", "anywhere")
        for scope in scopes:
            reached = self._reached(axis, scope)
            near = [place for place in starts if place in reached]
            if near:
                return _path(reached, min(near, key=lambda place: reached[place][0]))
        return []

    def _reached(self, axis: str, scope: Scope) -> dict[Place, _Step]:
        """The last step to each place that can be reached."""
        if (axis, scope) in self._reached_by_scope:
            return self._reached_by_scope[axis, scope]
        if self._shared is None:
            self._shared = _shared(self.graph)
        groups = self._shared.get(axis, {})
        reached: dict[Place, _Step] = {}
        seeds = self.graph.seeds.items()
        starts = [(v, atom) for v, seed in seeds for atom, axes in enumerate(seed.placement) if axis in axes]
        number = count()  # of equally far places the one that was found first
        near: list[tuple[tuple[int, int], int, Place, Place, fx.Node | None]] = []
        near += (((0, 0), next(number), place, place, None) for place in starts)
        while near:
            far, _, place, earlier, call = heappop(near)
            if place in reached:
                continue
            reached[place] = far, earlier, call
            for group in groups.get(place, ()):
                is_forward = info(group.call).phase == "fwd"
                if scope == "forward" and not is_forward:
                    continue
                further = (far[0] + (not is_forward), far[1] + 1)
                for other in group.of_results if scope == "upstream" else group.places:
                    if other not in reached:
                        heappush(near, (further, next(number), other, place, group.call))
        self._reached_by_scope[axis, scope] = reached
        return reached


def left(moved: fx.Node, axis: str) -> Left:
    """What lies before a collective: the call, the tensors that it splits over the axis."""
    source = operands(moved)[0]
    if moved.target not in REDUCTIONS:
        return Left(producer(before(source))[0], source, tuple(_sharded(source, axis)), 0)
    value, passed = source, 0
    while True:
        call = producer(value)[0]
        pending = [v for v in operands(call) if axis in type_of(v).partial_axes]
        if not pending or not (call.target in MOVES or axis in info(call).passes):
            break
        passed += axis in info(call).passes
        value = pending[0]
    if find_rule(call.target) is None:
        return Left(call, value, (), passed)
    projection = project(call)
    pieces = [p for p, axes in split_of(call, projection).items() if axis in axes]
    sides = zip(operands(call), projection.operands, strict=True)
    starts = tuple((v, operand_pieces.index(p)) for v, operand_pieces in sides for p in pieces if p in operand_pieces)
    return Left(call, value, starts, passed)


def needs_whole(moved: fx.Node) -> str:
    """The optimizer for whose products of whole matrices a value is moved there or back; "" if for none."""
    if info(moved).phase != "opt":
        return ""
    todo, visited = [before(moved)], set[fx.Node]()
    if name := info(todo[0]).optimizer:
        return name
    todo = [moved]
    while todo:
        for user in todo.pop().users:
            if user.op == "output":
                continue
            if name := info(user).optimizer:
                return name
            rule = find_rule(user.target)
            if user not in visited and (user.target in MOVES or (rule is not None and rule.kind == "view")):
                visited.add(user)
                todo.append(user)
    return ""


def before(value: fx.Node) -> fx.Node:
    """The value that a chain of collectives and slices starts from."""
    while value.target in MOVES:
        value = operands(value)[0]
    return value


def as_named(graph: Graph, axis: str) -> str:
    """An axis as the user named it."""
    return ".".join(graph.mesh.merged(graph.mesh.children(graph.mesh.parent(axis)) or axis))


def _sharded(value: fx.Node, axis: str) -> Iterator[Place]:
    return ((value, i) for i, axes in enumerate(type_of(value).placement) if axis in axes)


def _path(reached: dict[Place, _Step], place: Place) -> Way:
    way: Way = []
    while True:
        _, earlier, call = reached[place]
        way.append((place, call))
        if call is None:
            return way[::-1]
        place = earlier


def _shared(graph: Graph) -> dict[str, dict[Place, list[_Shared]]]:
    """Axis -> place -> the groups that it belongs to."""
    groups_of: dict[str, dict[Place, list[_Shared]]] = {axis: {} for axis in graph.mesh.names}
    for call in graph.calls():
        for axis, places in _groups(call):
            result_places = tuple(place for place in places if producer(place[0])[0] is call)
            group = _Shared(call, places, result_places)
            for place in places:
                groups_of[axis].setdefault(place, []).append(group)
    return groups_of


def _groups(call: fx.Node) -> Iterator[tuple[str, tuple[Place, ...]]]:
    """(axis, places) for every piece of a call that an axis splits and several tensors have."""
    values = [*operands(call), *results(call)]
    pieces: dict[tuple[int, str], list[Place]] = {}
    if call.target in MOVES:
        for value in (values[0], *results(call)):  # what it moves, without the counts of rows
            for atom, axes in enumerate(type_of(value).placement if value is not None else ()):
                for axis in axes:
                    pieces.setdefault((atom, axis), []).append((value, atom))  # type: ignore[arg-type]
    elif info(call).assignment and find_rule(call.target) is not None:
        projection = project(call)
        split = split_of(call, projection)
        for value, tensor_pieces in zip(values, (*projection.operands, *projection.results), strict=True):
            if value is None:
                continue
            for atom, axes in enumerate(type_of(value).placement):
                for axis in axes:
                    if axis in split.get(tensor_pieces[atom], ()):
                        pieces.setdefault((tensor_pieces[atom], axis), []).append((value, atom))
    yield from ((axis, tuple(dict.fromkeys(places))) for (_, axis), places in pieces.items() if len(places) > 1)
