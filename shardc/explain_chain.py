"""Why a collective is there: the op that left it to do, the op that needs it done, and the way back to an annotation.

    up.weight = "tp, -"  ->  up.linear  ->  gelu  ->  down.linear splits k over tp: a pending sum  ->  all_reduce

Reads a graph as `combine` leaves it: calls are assigned, collectives are lowered, shapes are still global. The way back
follows one axis: from a tensor that it shards, through a call, to another tensor of that call with the same piece, and
on until a tensor that the user annotated. The shortest such way, found breadth first, is the one a reader needs; one
that only looks at what the value was computed from is preferred, then one that keeps out of the backward pass.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, operands, producer, results, type_of
from shardc.ir.schema import given
from shardc.passes.base import split_of
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule, rule_of

S = torch.ops.shardc
REDUCTIONS = (S.all_reduce.default, S.reduce_scatter.default)
MOVES = (*REDUCTIONS, S.all_gather.default, S.all_to_all.default, S.permute_ranks.default, S.shard_slice.default)
Place = tuple[fx.Node, int]  # a value and one of its flat atoms


@dataclass(frozen=True)
class Step:
    """One call on the way from the annotation, and the tensor that it hands the axis to."""

    value: str
    type: str
    op: str
    source: str
    main: bool  # neither a view nor pointwise: what a short account of the way names


@dataclass(frozen=True)
class Trail:
    """One axis of a collective: what the op before it leaves, what the op after it needs, where the axis is from."""

    axis: str  # as the user named it
    why: str
    needed: str
    cause: str  # the annotation, as diagnostics cite it; "" when no annotation is behind it
    steps: tuple[Step, ...]
    roots: tuple[Place, ...]  # annotated atoms behind it, of the op before and of the op after
    ends: tuple[fx.Node, ...]  # the calls before and after


def trails(graph: Graph, moved: fx.Node) -> list[Trail]:
    """A trail for each axis of a collective; axes of one annotation and one reason are one trail."""
    found: dict[tuple[str, str], Trail] = {}
    for axis in given(moved)["axes"]:
        trail = _trail(graph, moved, axis)
        found.setdefault((trail.why, trail.cause), trail)
    return list(found.values())


def _trail(graph: Graph, moved: fx.Node, axis: str) -> Trail:
    source = moved.args[0]
    assert isinstance(source, fx.Node)
    shown = ".".join(graph.mesh.merged(graph.mesh.children(graph.mesh.parent(axis)) or axis))
    if moved.target in REDUCTIONS:
        call, starts, why = _sum(source, axis, shown)
    else:
        call, starts = producer(_before(source))[0], _sharded(source, axis)
        at = f"dim {_dim_of(*starts[0])} of %{info(source).name}" if starts else f"%{info(source).name}"
        why = f"{at} is sharded over {shown}, as {_made(call)}"
    reader, needed, claims = _needed(graph, moved, axis, shown)
    way = _way(graph, starts, axis)
    claimed = _way(graph, claims, axis) if claims else []
    roots = tuple(path[0][0] for path in (way, claimed) if path)
    if claimed:
        needed += f" ({graph.seeds[claimed[0][0][0]].cause})"
    steps = tuple(_step(through, value) for (value, _), through in way if through is not None)
    cause = graph.seeds[roots[0][0]].cause if way else info(source).cause
    return Trail(shown, why, needed, cause, steps, roots, tuple(n for n in (call, reader) if n is not None))


# ---------------------------------------------------------------------- what lies before
def _sum(value: fx.Node, axis: str, shown: str) -> tuple[fx.Node, list[Place], str]:
    """The call that left the sum pending, the tensors whose split did it, and that in words."""
    passed = 0
    while True:
        call = producer(value)[0]
        pending = [v for v in operands(call) if axis in type_of(v).partial_axes]
        if not pending or not (call.target in MOVES or axis in info(call).passes):
            break
        passed += axis in info(call).passes
        value = pending[0]
    projection = project(call)
    split = split_of(call, projection)
    pieces = [p for p, axes in split.items() if axis in axes]
    starts = [
        (v, own.index(p))
        for v, own in zip(operands(call), projection.operands, strict=True)
        for p in pieces
        if p in own
    ]
    what = _places(starts)
    part = (
        "its own part of the sum" if all(kind == "sum" for _, kind in type_of(value).partial) else "only its own part"
    )
    why = f"{op_name(call.target)} splits {what} over {shown}{_notation(call)}: each rank is left with {part}"
    if passed:
        why += f", carried on unsummed through {passed} linear op{'s' if passed > 1 else ''}"
    return call, starts, why


def _before(value: fx.Node) -> fx.Node:
    """The value that a chain of collectives and slices starts from."""
    while value.target in MOVES:
        value = operands(value)[0]
    return value


def _made(call: fx.Node) -> str:
    return f"{op_name(call.target)} computes it" if call.op == "call_function" else "it is placed"


# ---------------------------------------------------------------------- what lies behind
def _needed(graph: Graph, moved: fx.Node, axis: str, shown: str) -> tuple[fx.Node | None, str, list[Place]]:
    """The first reader, why it needs the collective, and the tensors through which it claims the axis for itself."""
    reads = list(_readers(moved))
    ports = [p for p, v in zip(graph.outputs, graph.output_values, strict=True) if v in {v for v, _ in reads}]
    for port in ports:
        text = {
            "grad": f"it is the gradient of {port.name}, which is placed as {port.name} is",
            "buffer": f"it is the new value of {port.name}, which is placed as {port.name} is",
            "loss": "it is the loss, which is whole on every rank",
        }.get(port.role, f"it is the output {port.name}")
        if all(user.op == "output" for _, user in reads):
            return None, text, []
    value, user = next((v, u) for v, u in reads if u.op != "output")
    name = f"%{info(user).name} ({op_name(user.target)})"
    if find_rule(user.target) is None:
        return user, f"{name} has no sharding rule and runs whole on every rank", []
    projection = project(user)
    split = split_of(user, projection)
    at = operands(user).index(value)
    claims = [p for p, axes in split.items() if axis in axes]
    claimed = [
        (v, own.index(p))
        for v, own in zip([*operands(user), *results(user)], (*projection.operands, *projection.results), strict=True)
        for p in claims
        if v is not None and v is not value and p in own and axis in type_of(v).placement[own.index(p)]
    ]
    if moved.target in REDUCTIONS:
        if axis in type_of(value).axes and claims:
            return user, f"{name} splits it over {shown}, and takes its part of the sum", []
        kind = given(moved)["op"]
        if kind != "sum":
            return user, f"{name} needs the {kind} over all ranks", []
        if projection.linear != "joint" and at not in projection.linear:
            return user, f"{name} is not linear in it: it needs the sum, not the parts", []
        others = [v for v in operands(user) if v is not value and producer(v)[0].target not in REDUCTIONS]
        if projection.linear == "joint" and others:
            return user, f"{name} also takes %{info(others[0]).name}, which the parts would count more than once", []
        return user, f"{name} could carry the parts on, but summing here moves the fewest bytes", []
    whole = _before(moved)
    lost = [i for i, axes in enumerate(type_of(whole).placement) if axis in axes] if _before(value) is whole else []
    blocked = [i for i in lost if projection.operands[at][i] in projection.blocked]
    if blocked:
        return user, f"{name} needs dim {_dim_of(whole, blocked[0])} of it whole{_notation(user)}", []
    if claimed:
        return user, f"{name} splits {_places(claimed)} over {shown} instead", claimed
    return user, f"{name} computes with all of it on every rank", []


def _readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """(value, user) for all who read a value, past the collectives, slices and views that it goes through first."""
    for user in value.users:
        rule = find_rule(user.target)
        if user.target in MOVES or (rule is not None and rule.kind == "view" and user.users and info(user).type):
            yield from _readers(user)
        else:
            yield value, user


# ---------------------------------------------------------------------- the way back
def _way(graph: Graph, starts: Sequence[Place], axis: str) -> list[tuple[Place, fx.Node | None]]:
    """From an annotated atom to one of `starts`: each place with the call that handed it the axis."""
    forward = any(info(v).phase == "fwd" for v, _ in starts)
    for allowed in (_upstream, _forward if forward else _anywhere, _anywhere):
        if found := _search(graph, starts, axis, allowed):
            return found
    return []


def _upstream(value: fx.Node) -> Iterator[fx.Node]:
    """The call that computes a value."""
    call = producer(value)[0]
    if call.op == "call_function":
        yield call


def _anywhere(value: fx.Node) -> Iterator[fx.Node]:
    """Every call that touches a value."""
    yield from _upstream(value)
    yield from (u for u in value.users if u.op == "call_function" and u.target is not operator.getitem)


def _forward(value: fx.Node) -> Iterator[fx.Node]:
    return (call for call in _anywhere(value) if info(call).phase == "fwd")


def _search(
    graph: Graph, starts: Sequence[Place], axis: str, calls: Callable[[fx.Node], Iterator[fx.Node]]
) -> list[tuple[Place, fx.Node | None]]:
    queue = deque(starts)
    onward: dict[Place, tuple[Place, fx.Node] | None] = dict.fromkeys(starts)
    while queue:
        place = queue.popleft()
        value, atom = place
        seed = graph.seeds.get(value)
        if seed is not None and axis in seed.placement[atom]:
            way: list[tuple[Place, fx.Node | None]] = [(place, None)]
            while (step := onward[place]) is not None:
                place = step[0]
                way.append((place, step[1]))
            return way
        for call in calls(value):
            for other in _through(call, value, atom, axis):
                if other not in onward:
                    onward[other] = (place, call)
                    queue.append(other)
    return []


def _through(call: fx.Node, value: fx.Node, atom: int, axis: str) -> Iterator[Place]:
    """The other tensors of a call that have the same piece sharded over the axis."""
    tensors = [v for v in [*operands(call), *results(call)] if v is not None]
    if call.target in MOVES:
        yield from ((v, atom) for v in tensors if v is not value and axis in type_of(v).placement[atom])
        return
    if find_rule(call.target) is None or not info(call).assignment:
        return
    projection = project(call)
    split = split_of(call, projection)
    sides = list(_sides(call, projection))
    pieces = {own[atom] for v, own in sides if v is value and axis in split.get(own[atom], ())}
    for v, own in sides:
        yield from (
            (v, j) for j, p in enumerate(own) if p in pieces and v is not value and axis in type_of(v).placement[j]
        )


def _sides(call: fx.Node, projection: Projection) -> Iterator[tuple[fx.Node, tuple[int, ...]]]:
    values = [*operands(call), *results(call)]
    for value, own in zip(values, (*projection.operands, *projection.results), strict=True):
        if value is not None:
            yield value, own


def _step(call: fx.Node, value: fx.Node) -> Step:
    about = info(call)
    rule = find_rule(call.target)
    main = rule is not None and rule.kind in ("compute", "create")
    return Step(info(value).name, str(type_of(value)), op_name(call.target), about.source, main)


# ---------------------------------------------------------------------- words
def _sharded(value: fx.Node, axis: str) -> list[Place]:
    return [(value, i) for i, axes in enumerate(type_of(value).placement) if axis in axes]


def _dim_of(value: fx.Node, atom: int) -> int:
    """The dim that a flat atom lies in."""
    for d, dim in enumerate(type_of(value).dims):
        atom -= len(dim)
        if atom < 0:
            return d
    raise AssertionError("an atom lies in a dim")


def _places(places: Sequence[Place]) -> str:
    named = dict.fromkeys(f"dim {_dim_of(v, i)} of %{info(_before(v)).name}" for v, i in places)
    return " and ".join(list(named)[:2])


def _notation(call: fx.Node) -> str:
    """The rule, where it is written for people: generated factor names are left out."""
    text = str(rule_of(call))
    return f" ({text})" if text.replace(" ", "").replace(",", "").replace("->", "").isalpha() else ""
