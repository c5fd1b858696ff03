"""Why a collective is there: the op that left it to do, the op that needs it done, and the way back to an annotation.

    up.weight = "tp, -"  ->  up.linear  ->  gelu  ->  down.linear splits k over tp: a pending sum  ->  all_reduce

Reads a graph as `name_causes` leaves it: calls are assigned, collectives are lowered, shapes are still global. The way
back, axis by axis, is that pass's own, so that the cause is the same here as in `Program.collectives()`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.ir.graph import Graph, Port, info, op_name, operands, producer, results, type_of
from shardc.ir.schema import given
from shardc.passes.base import split_of
from shardc.passes.communication.causes import MOVES, REDUCTIONS, Causes, Left, Place, as_named, before, left
from shardc.rules.projection import project
from shardc.rules.registry import find_rule, rule_of


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
    stored: bool  # no annotation, but the plan's storage
    gradient: bool  # what needs it is a gradient
    steps: tuple[Step, ...]
    roots: tuple[Place, ...]  # annotated atoms behind it, of the op before and of the op after
    ends: tuple[fx.Node, ...]  # the calls before and after


def trails(graph: Graph, collective_call: fx.Node) -> list[Trail]:
    """A trail for each axis of a collective; axes of one annotation and one reason are one trail."""
    causes = Causes(graph)
    by_reason: dict[tuple[str, str], Trail] = {}
    for axis in given(collective_call)["axes"]:
        trail = _trail(causes, collective_call, axis)
        by_reason.setdefault((trail.why, trail.cause), trail)
    return list(by_reason.values())


def _trail(causes: Causes, collective_call: fx.Node, axis: str) -> Trail:
    graph = causes.graph
    source, name, what = operands(collective_call)[0], as_named(graph, axis), left(collective_call, axis)
    if collective_call.target in REDUCTIONS:
        why = _sum(what, name)
    else:
        dim_text = f"dim {_dim_of(*what.starts[0])} of %{info(source).name}" if what.starts else f"%{info(source).name}"
        why = f"{dim_text} is sharded over {name}, as {_made(what.call)}"
    reads = list(_readers(collective_call))
    port = _returned_as(graph, reads)
    reader, needed, claims = (
        _needed(collective_call, reads, axis, name) if port is None else (None, _returned_text(port), [])
    )
    path_to_start = causes.way(what.starts, axis)
    claimed = causes.way(claims, axis)
    roots = tuple(path[0][0] for path in (path_to_start, claimed) if path)
    if claimed:
        needed += f" ({graph.seeds[claimed[0][0][0]].cause})"
    steps = tuple(step(through, value) for (value, _), through in path_to_start if through is not None)
    ends = tuple(n for n in (what.call, reader) if n is not None)
    gradient = port is not None and port.role == "grad"
    required = causes.cause(collective_call, axis)
    cause, stored = str(required or ""), required is not None and required.kind == "storage"
    return Trail(name, why, needed, cause, stored, gradient, steps, roots, ends)


# ---------------------------------------------------------------------- what lies before
def _sum(what: Left, axis: str) -> str:
    """The text of how a pending sum came about."""
    part = "its own part of the sum"
    if any(kind != "sum" for _, kind in type_of(what.value).partial):
        part = "only its own part"
    why = f"{op_name(what.call.target)} splits {_places(what.starts)} over {axis}{_notation(what.call)}"
    why += f": each rank is left with {part}"
    if what.passed:
        why += f", carried on unsummed through {what.passed} linear op{'s' if what.passed > 1 else ''}"
    return why


def _made(call: fx.Node) -> str:
    return f"{op_name(call.target)} computes it" if call.op == "call_function" else "it is placed"


# ---------------------------------------------------------------------- what lies behind
def _returned_as(graph: Graph, reads: Sequence[tuple[fx.Node, fx.Node]]) -> Port | None:
    """The output that a value becomes, if no call reads it."""
    values = {value for value, _ in reads}
    ports = (p for p, v in zip(graph.outputs, graph.output_values, strict=True) if v in values)
    return next(ports, None) if all(user.op == "output" for _, user in reads) else None


def _returned_text(port: Port) -> str:
    return {
        "grad": f"it is the gradient of {port.name}, which is placed as {port.name} is",
        "buffer": f"it is the new value of {port.name}, which is placed as {port.name} is",
        "loss": "it is the loss, which is whole on every rank",
    }.get(port.role, f"it is the output {port.name}")


def _needed(
    collective_call: fx.Node, reads: Sequence[tuple[fx.Node, fx.Node]], axis: str, shown: str
) -> tuple[fx.Node | None, str, list[Place]]:
    """The first reader, why it needs the collective, and the tensors through which it claims the axis for itself."""
    value, user = next((v, u) for v, u in reads if u.op != "output")
    name = f"%{info(user).name} ({op_name(user.target)})"
    if find_rule(user.target) is None:
        return user, f"{name} has no sharding rule and runs whole on every rank", []
    projection = project(user)
    split = split_of(user, projection)
    position = operands(user).index(value)
    claims = [p for p, axes in split.items() if axis in axes]
    claimed = [
        (v, factors.index(p))
        for v, factors in zip(
            [*operands(user), *results(user)], (*projection.operands, *projection.results), strict=True
        )
        for p in claims
        if v is not None and v is not value and p in factors and axis in type_of(v).placement[factors.index(p)]
    ]
    if collective_call.target in REDUCTIONS:
        if axis in type_of(value).axes and claims:
            return user, f"{name} splits it over {shown}, and takes its part of the sum", []
        kind = given(collective_call)["op"]
        if kind != "sum":
            return user, f"{name} needs the {kind} over all ranks", []
        if projection.linear != "joint" and position not in projection.linear:
            return user, f"{name} is not linear in it: it needs the sum, not the parts", []
        other_operands = [v for v in operands(user) if v is not value and producer(v)[0].target not in REDUCTIONS]
        if projection.linear == "joint" and other_operands:
            counted = info(other_operands[0]).name
            return user, f"{name} also takes %{counted}, which the parts would count more than once", []
        return user, f"{name} could carry the parts on, but summing here moves the fewest bytes", []
    whole = before(collective_call)
    gathered_dims = (
        [i for i, axes in enumerate(type_of(whole).placement) if axis in axes] if before(value) is whole else []
    )
    blocked = [i for i in gathered_dims if projection.operands[position][i] in projection.blocked]
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


def step(call: fx.Node, value: fx.Node) -> Step:
    """One call of a way, and what it hands the axis to."""
    about = info(call)
    rule = find_rule(call.target)
    main = rule is not None and rule.kind in ("compute", "create")
    return Step(info(value).name, str(type_of(value)), op_name(call.target), about.source, main)


# ---------------------------------------------------------------------- words
def _dim_of(value: fx.Node, atom: int) -> int:
    """The dim that a flat atom lies in."""
    for d, dim in enumerate(type_of(value).dims):
        atom -= len(dim)
        if atom < 0:
            return d
    raise AssertionError("an atom lies in a dim")


def _places(places: Sequence[Place]) -> str:
    dim_names = dict.fromkeys(f"dim {_dim_of(v, i)} of %{info(before(v)).name}" for v, i in places)
    return " and ".join(list(dim_names)[:2])


def _notation(call: fx.Node) -> str:
    """The rule, where it is written for people: generated factor names are left out."""
    text = str(rule_of(call))
    return f" ({text})" if text.replace(" ", "").replace(",", "").replace("->", "").isalpha() else ""
