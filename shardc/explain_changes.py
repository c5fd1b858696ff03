"""What could be written otherwise so that a collective goes away: changes of the plan, each really tried.

Candidates come from the annotations behind the collective (leave one out, move its axis to another dim, shard it in
blocks), from the parameters of the ops on both sides of it, and from the activations around it. Each is compiled from
the same reference graph, without tracing again. What it costs is measured on the result: bytes sent, parameters held,
and *work*, the multiplications that a rank does in matmuls, convolutions and attention (points of their iteration
space), by which a change that merely gives up parallelism is told from one that communicates less.

A change speaks of all layers alike: `h.0.mlp.c_fc.weight` stands for the line of the plan that placed it, and that line
for the weight in every layer.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from torch import fx

from shardc import compiler
from shardc.compiler import Options
from shardc.explain_chain import MOVES, Trail
from shardc.ir.collectives import Collective, collectives, human_bytes
from shardc.ir.diagnostic import ShardcError
from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.placement import OPEN, UNSHARDED, DimPlacement, Placement
from shardc.ir.types import TensorType
from shardc.passes.base import Pass, split_of
from shardc.passes.seed import Bound
from shardc.rules.projection import project
from shardc.rules.registry import find_rule

Found = TypeVar("Found")
SECTIONS = {"param": "params", "input": "inputs", "activation": "activations", "output": "outputs"}
NEAREST_MODULES = 3  # whose outputs are worth an annotation
GAVE_UP = 0.01  # more work than this means that some op is no longer split


@dataclass(frozen=True)
class Cost:
    """What a rank does in a step under one plan."""

    collectives: tuple[Collective, ...]
    parameter_bytes: int
    work: float

    @property
    def sent(self) -> int:
        return sum(c.bytes_per_rank for c in self.collectives)


@dataclass(frozen=True)
class Change:
    """A change of the plan that removes the collective, and what it does to a rank's step."""

    text: str
    plan: tuple[Bound, ...]  # all annotations, the change made
    sent: int  # bytes in a step, against before; negative is less
    parameter_bytes: int
    work: float  # relative: 0.5 is half as much again
    instead: tuple[str, ...]  # collectives that it brings
    same_value: bool  # one of them moves the same value: the same communication in another form

    @property
    def gives_up(self) -> bool:
        """It avoids the communication by not splitting the work."""
        return self.work > GAVE_UP

    @property
    def saves(self) -> bool:
        """It does away with the communication, not with the splitting of work, and nothing dearer comes instead."""
        return self.sent < 0 and not self.gives_up and not self.same_value

    def __str__(self) -> str:
        effect = [_difference(self.sent, "communication")]
        if self.parameter_bytes:
            effect.append(_difference(self.parameter_bytes, "parameters"))
        if abs(self.work) > GAVE_UP / 2:
            effect.append(f"{abs(self.work):.0%} {'more' if self.work > 0 else 'less'} work")
        brings = f"; brings {', '.join(self.instead)}" if self.instead else ""
        return f"{self.text}\na rank then has {', '.join(effect)}{brings}"


def compiled(reference: Graph, bound: Sequence[Bound], look: Callable[[Graph], Found]) -> Found:
    """Compile once more, and look at the graph as `combine` leaves it: collectives lowered, shapes still global."""
    found: list[Found] = []

    def watch(one: Pass, graph: Graph, _: float) -> None:
        if one.name == "combine":
            found.append(look(graph))

    compiler.distribute(reference.copy(), bound, Options(verify=False, watch=watch))
    return found[0]


def measure(graph: Graph) -> Cost:
    """The cost of a graph after `combine`."""
    params = 0
    work = sum(_work(graph, node) for node in graph.calls())
    for port, value in zip(graph.inputs, graph.placeholders, strict=True):
        params += type_of(value).local_bytes(graph.mesh) if port.role == "param" else 0
    return Cost(tuple(collectives(graph)), params, work)


def _work(graph: Graph, node: fx.Node) -> float:
    """A rank's points of a call that contracts two tensors; pointwise ops cost next to nothing beside them."""
    rule = find_rule(node.target)
    if rule is None or info(node).constant:
        return 0.0
    projection = project(node)
    floats = [
        own for v, own in zip(operands(node), projection.operands, strict=True) if type_of(v).dtype.is_floating_point
    ]
    shared = {p for own in floats for p in own if sum(p in other for other in floats) > 1}
    if not any(shared - set(side) for side in projection.results):
        return 0.0
    split = split_of(node, projection)
    used = {p for side in (*projection.operands, *projection.results) for p in side}
    return math.prod(projection.sizes[p] / graph.mesh.size(split.get(p, ())) for p in used)


def removals(
    reference: Graph,
    bound: Sequence[Bound],
    target: Collective,
    now: Cost,
    candidates: Sequence[tuple[str, tuple[Bound, ...]]],
    seconds: float,
) -> tuple[list[Change], int]:
    """The candidates that remove `target`, the best first; and how many were tried."""
    found: list[Change] = []
    deadline = time.monotonic() + seconds
    tried = 0
    for text, plan in candidates:
        if tried and time.monotonic() > deadline:
            break
        tried += 1
        try:
            cost = compiled(reference, plan, measure)
        except (ShardcError, AssertionError):
            continue  # nobody asked for this plan: one that does not compile is no candidate
        if _removed(target, now, cost):
            work = cost.work / now.work - 1 if now.work else 0.0
            sent, params = cost.sent - now.sent, cost.parameter_bytes - now.parameter_bytes
            same = any(_base(c) == _base(target) and set(c.axes) & set(target.axes) for c in cost.collectives)
            found.append(Change(text, plan, sent, params, work, _instead(now, cost), same))
    return sorted(found, key=lambda c: (c.gives_up, c.sent, c.parameter_bytes)), tried


def _removed(target: Collective, now: Cost, then: Cost) -> bool:
    """It is gone, and has not merely moved to another value."""

    def alike(cost: Cost) -> int:
        key = target.kind, target.axes, target.phase
        return sum((c.kind, c.axes, c.phase) == key for c in cost.collectives)

    base = _base(target)
    same = any(_base(c) == base and c.kind == target.kind and set(c.axes) & set(target.axes) for c in then.collectives)
    return not same and alike(then) < alike(now)


def _base(one: Collective) -> str:
    """The name of the value that a collective moves."""
    return re.sub(rf"\.{one.kind}(_\d+)?$", "", one.value)


def _instead(now: Cost, then: Cost) -> tuple[str, ...]:
    """Kinds of collectives of which there are more than before: `2 all_gather over tp`."""

    def count(cost: Cost) -> dict[tuple[str, str], int]:
        kinds: dict[tuple[str, str], int] = {}
        for c in cost.collectives:
            key = c.kind, ".".join(c.axes)
            kinds[key] = kinds.get(key, 0) + 1
        return kinds

    before = count(now)
    more = ((kind, axes, n - before.get((kind, axes), 0)) for (kind, axes), n in count(then).items())
    return tuple(f"{n} {kind} over {axes}" for kind, axes, n in more if n > 0)


# ---------------------------------------------------------------------- candidates
@dataclass(frozen=True)
class _Line:
    """One line of the plan: a placement of all tensors whose names differ in numbers only."""

    kind: Literal["param", "input", "activation", "output"]
    pattern: str
    names: tuple[str, ...]


def propose(graph: Graph, bound: Sequence[Bound], trails: Sequence[Trail]) -> list[tuple[str, tuple[Bound, ...]]]:
    """Candidates as (what to write, the whole plan), the likeliest first, none twice."""
    seen: set[tuple[tuple[str, str, str], ...]] = {_key(bound)}
    found: list[tuple[str, tuple[Bound, ...]]] = []
    for text, plan in _all(graph, bound, trails):
        if (key := _key(plan)) not in seen:
            seen.add(key)
            found.append((text, plan))
    return found


def _key(plan: Sequence[Bound]) -> tuple[tuple[str, str, str], ...]:
    return tuple(sorted((b.kind, b.name, str(b.placement)) for b in plan))


def _all(graph: Graph, bound: Sequence[Bound], trails: Sequence[Trail]) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    for trail in trails:
        for value, atom in trail.roots:
            one = next((b for b in bound if graph.seeds[value].cause == b.cause), None)
            if one is not None:
                yield from _of_annotation(graph, bound, one, value, atom, trail.axis)
    for trail in trails:
        for value in _parameters(trail.ends):
            port = next(p for p, n in zip(graph.inputs, graph.placeholders, strict=True) if n is value)
            yield from _placed(graph, bound, "param", port.name, type_of(value), trail.axis)
        for fqn in _modules(graph, trail.ends):
            yield from _placed(graph, bound, "activation", fqn, type_of(graph.activations[fqn]), trail.axis)
    for axis in dict.fromkeys(trail.axis for trail in trails):
        yield f"use {axis} nowhere", tuple(b for b in (_without(b, axis) for b in bound) if b is not None)


def _of_annotation(
    graph: Graph, bound: Sequence[Bound], one: Bound, value: fx.Node, atom: int, axis: str
) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    """Write the annotation otherwise, or not at all."""
    line = _line(bound, one.kind, one.name)
    type = type_of(value)
    dims = list(one.placement.padded(type.ndim))
    at = next((d for d, dim in enumerate(dims) if axis in dim.axes), None)
    if at is None:
        return
    rest = _other(dims[at], axis)
    for d, dim in enumerate(dims):  # the axis on another dim
        if d != at and type.shape[d] > 1:
            moved = [*dims]
            moved[at] = DimPlacement(rest, dims[at].blocks if rest else 1)
            moved[d] = DimPlacement((*dim.axes, axis), dim.blocks)
            yield _rewrite(bound, line, Placement(tuple(moved)), str(one.placement))
    blocks = 1
    for piece in type.dims[at][:-1]:  # the axis within each of n blocks
        blocks *= piece.size
        if blocks != dims[at].blocks:
            blocked = [*dims]
            blocked[at] = DimPlacement(dims[at].axes, blocks)
            yield _rewrite(bound, line, Placement(tuple(blocked)), str(one.placement))
    dropped = [*dims]
    dropped[at] = DimPlacement(rest) if rest else OPEN
    left = Placement(tuple(dropped))
    if left.axes:
        yield _rewrite(bound, line, left, str(one.placement))
    else:
        plan = tuple(b for b in bound if not (b.kind == line.kind and b.name in line.names))
        yield f'leave out {line.pattern} = "{one.placement}"', plan


def _without(one: Bound, axis: str) -> Bound | None:
    """The annotation without an axis; None when that was all it said."""
    dims = tuple(
        dim if axis not in dim.axes else DimPlacement(rest, dim.blocks) if (rest := _other(dim, axis)) else OPEN
        for dim in one.placement.dims
    )
    left = Placement(dims)
    if left == one.placement:
        return one
    return replace(one, placement=left, cause=f'{one.name} = "{left}"') if left.axes else None


def _other(dim: DimPlacement, axis: str) -> tuple[str, ...]:
    return tuple(a for a in dim.axes if a != axis)


def _placed(
    graph: Graph, bound: Sequence[Bound], kind: Literal["param", "activation"], name: str, type: TensorType, axis: str
) -> Iterator[tuple[str, tuple[Bound, ...]]]:
    """The axis on each dim of a tensor in turn, its other axes as they are now."""
    line = _line(bound, kind, name, (p.name for p in graph.inputs) if kind == "param" else graph.activations)
    own = graph.mesh.resolve(axis)
    before = next((str(b.placement) for b in bound if b.kind == kind and b.name == name), None)
    for d, n in enumerate(type.shape):
        if n == 1 or any(a in own for atom in type.dims[d] for a in atom.axes):
            continue
        dims: list[DimPlacement] = []
        for i, dim in enumerate(type.dims):
            axes = graph.mesh.merged(tuple(a for atom in dim for a in atom.axes if a not in own))
            axes = (*axes, axis) if i == d else axes
            dims.append(DimPlacement(axes) if axes else UNSHARDED)
        try:
            placement = Placement(tuple(dims))
        except ShardcError:
            continue  # two atoms of one dim share a sub-axis
        yield _rewrite(bound, line, placement, before)


def _line(
    bound: Sequence[Bound], kind: str, name: str, names: Iterator[str] | Sequence[str] | dict[str, fx.Node] = ()
) -> _Line:
    """All tensors that are placed alike with this one, or could be: the same name in every layer."""
    pattern = _pattern(name)
    same = [b for b in bound if b.kind == kind and _pattern(b.name) == pattern]
    mine = next((b for b in same if b.name == name), None)
    alike = [b.name for b in same if mine is not None and b.placement == mine.placement]
    every = alike or [n for n in names if _pattern(n) == pattern]
    return _Line(kind, pattern if len(every) > 1 else name, tuple(every or [name]))  # type: ignore[arg-type]


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _rewrite(
    bound: Sequence[Bound], line: _Line, placement: Placement, before: str | None
) -> tuple[str, tuple[Bound, ...]]:
    text = f'{line.pattern} = "{placement}"'
    plan = {(b.kind, b.name): b for b in bound}
    for name in line.names:
        made = Bound(line.kind, name, placement, f'{name} = "{placement}"')
        old = plan.get((line.kind, name))
        plan[line.kind, name] = made if old is None else replace(made, location=old.location)
    under = SECTIONS[line.kind]
    words = f"write {text}" if before is None else f'write {text} instead of "{before}"'
    return f"under {under}, {words}", tuple(plan.values())


def _parameters(ends: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """Parameters that the calls read, through views and collectives."""
    seen: set[fx.Node] = set()
    for call in ends:
        for value in operands(call):
            while value.op == "call_function":
                rule = find_rule(value.target)
                if len(operands(value)) != 1 or not (
                    value.target in MOVES or (rule is not None and rule.kind == "view")
                ):
                    break
                value = operands(value)[0]
            if value.op == "placeholder" and type_of(value).dtype.is_floating_point and value not in seen:
                seen.add(value)
                yield value


def _modules(graph: Graph, ends: Sequence[fx.Node]) -> list[str]:
    """The modules around the calls, innermost first, whose outputs an annotation can name."""
    names: dict[str, None] = {}
    for call in ends:
        parts = info(call).fqn.split(".")
        for length in range(len(parts), 0, -1):
            fqn = ".".join(parts[:length])
            value = graph.activations.get(fqn)
            if value is not None and info(value).type is not None and type_of(value).ndim >= 2:
                names[fqn] = None
    return list(names)[:NEAREST_MODULES]


def _difference(count: int, what: str) -> str:
    if not count:
        return f"as much {what}"
    return f"{human_bytes(abs(count))} {'more' if count > 0 else 'less'} {what}"
