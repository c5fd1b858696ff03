"""Changes of the plan, each really tried: does the collective go away, and what does a rank's step cost then?

Each is compiled from the same reference graph, without tracing again. What it costs is measured on the result: bytes
sent, parameters held, and *work*, the operations that a rank does in matmuls, convolutions and attention, by which a
change that merely gives up parallelism is told from one that communicates less.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import fx

from shardc.compiler.driver import distribute, keep_gathered
from shardc.compiler.pass_pipeline import Options
from shardc.cost.flops import PRODUCTS, node_flops
from shardc.ir.collectives import Collective, collectives, human_bytes
from shardc.ir.diagnostic import ShardcError
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Graph, info, op_name, operands, type_of
from shardc.passes.base import split_of
from shardc.passes.communication.combine import Combine
from shardc.passes.sharding.seed import Bound
from shardc.rules.projection import project
from shardc.rules.registry import find_rule

Found = TypeVar("Found")
GAVE_UP = 0.01  # more work than this means that some op is no longer split


@dataclass(frozen=True)
class Cost:
    """The cost of a step on one rank under one plan."""

    collectives: tuple[Collective, ...]
    parameter_bytes: int
    work: float

    @property
    def sent(self) -> int:
        return sum(c.bytes_per_step for c in self.collectives)


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


@gc_paused()
def compiled(reference: Graph, bound: Sequence[Bound], options: Options, look: Callable[[Graph], Found]) -> Found:
    """Compile once more, and look at the graph as `combine` leaves it: collectives lowered, shapes still global."""
    graph = distribute(reference, bound, replace(options, verify=False), Combine)
    keep_gathered(graph, options)
    return look(graph)


def measure(graph: Graph) -> Cost:
    """The cost of a graph after `combine`."""
    params = 0
    work = sum(_work(graph, node) for node in graph.calls())
    for port, value in zip(graph.inputs, graph.placeholders, strict=True):
        params += type_of(value).local_bytes(graph.mesh) if port.role == "param" else 0
    return Cost(tuple(collectives(graph)), params, work)


def _work(graph: Graph, node: fx.Node) -> float:
    """A rank's operations of a call that contracts two tensors; pointwise ops cost next to nothing beside them.

    Of an op that `cost.flops` does not know they are two for each point of its iteration space.
    """
    if op_name(node.target) in PRODUCTS:
        return node_flops(graph, node)
    rule = find_rule(node.target)
    if rule is None or info(node).constant:
        return 0.0
    projection = project(node)
    floats = [
        factors
        for v, factors in zip(operands(node), projection.operands, strict=True)
        if type_of(v).dtype.is_floating_point
    ]
    shared = {p for factors in floats for p in factors if sum(p in other for other in floats) > 1}
    if not any(shared - set(side) for side in projection.results):
        return 0.0
    split = split_of(node, projection)
    used = {p for side in (*projection.operands, *projection.results) for p in side}
    return 2 * math.prod(projection.sizes[p] / graph.mesh.size(split.get(p, ())) for p in used)


@dataclass(frozen=True)
class Removals:
    """What trying found: the candidates that remove a collective, the best first, and those that broke the compiler."""

    changes: tuple[Change, ...]
    tried: int
    failed: tuple[str, ...]  # what the compiler's own error said, and for which change


def removals(
    reference: Graph,
    options: Options,
    target: Collective,
    current: Cost,
    candidates: Sequence[tuple[str, tuple[Bound, ...]]],
    seconds: float,
) -> Removals:
    """Try candidates, the likeliest first, for some seconds."""
    changes: list[Change] = []
    failed: list[str] = []
    deadline = time.monotonic() + seconds
    tried = 0
    for text, plan in candidates:
        if tried and time.monotonic() > deadline:
            break
        tried += 1
        try:
            cost = compiled(reference, plan, options, measure)
        except ShardcError:
            continue  # nobody asked for this plan: one that is refused is no candidate
        except Exception as bug:
            reason, _, _ = str(bug).partition("\n")
            failed.append(f"{type(bug).__name__}: {reason} ({text})")
            continue
        if _removed(target, current, cost):
            work = cost.work / current.work - 1 if current.work else 0.0
            sent, params = cost.sent - current.sent, cost.parameter_bytes - current.parameter_bytes
            same = any(_base(c) == _base(target) and set(c.axes) & set(target.axes) for c in cost.collectives)
            changes.append(Change(text, plan, sent, params, work, _instead(current, cost), same))
    changes.sort(key=lambda c: (c.gives_up, c.sent, c.parameter_bytes))
    return Removals(tuple(changes), tried, tuple(failed))


def _removed(target: Collective, current: Cost, changed: Cost) -> bool:
    """Whether the collective is gone, and has not merely moved to another value."""

    def alike(cost: Cost) -> int:
        key = target.kind, target.axes, target.phase
        return sum((c.kind, c.axes, c.phase) == key for c in cost.collectives)

    base = _base(target)
    same = any(
        _base(c) == base and c.kind == target.kind and set(c.axes) & set(target.axes) for c in changed.collectives
    )
    return not same and alike(changed) < alike(current)


def _base(collective: Collective) -> str:
    """The name of the value that a collective moves."""
    return re.sub(rf"\.{collective.kind}(_\d+)?$", "", collective.value)


def _instead(current: Cost, changed: Cost) -> tuple[str, ...]:
    """Kinds of collectives of which there are more than before: `2 all_gather over tp`."""

    def count(cost: Cost) -> dict[tuple[str, str], int]:
        kinds: dict[tuple[str, str], int] = {}
        for c in cost.collectives:
            key = c.kind, ".".join(c.axes)
            kinds[key] = kinds.get(key, 0) + 1
        return kinds

    counts = count(current)
    added = ((kind, axes, n - counts.get((kind, axes), 0)) for (kind, axes), n in count(changed).items())
    return tuple(f"{n} {kind} over {axes}" for kind, axes, n in added if n > 0)


def _difference(count: int, what: str) -> str:
    if not count:
        return f"as much {what}"
    return f"{human_bytes(abs(count))} {'more' if count > 0 else 'less'} {what}"
