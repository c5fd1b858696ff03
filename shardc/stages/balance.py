"""Where to cut: as balanced as a contiguous partition can be, and of those the one that sends least.

cost of a stage    the sum over its units of what forward and backward take: FLOPs, or bytes where those weigh more
best balance       the smallest possible cost of the dearest stage, over all places to cut: dynamic programming
chosen             within 1 % of the best balance, the fewest bytes across the cuts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import fx

from shardc.cost.flops import node_flops
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.graph import info, operands
from shardc.ir.storages import storages
from shardc.stages.anatomy import Anatomy, values_of
from shardc.stages.sums import terms_end

# FLOPs that an accelerator does while it reads or writes a byte of its memory, and while it sends one: as in recompute.
BALANCE = 256
LINK = 2048
SLACK = 0.01
Starts = tuple[int, ...]  # the first unit of each stage


def call_costs(anatomy: Anatomy) -> dict[fx.Node, float]:
    """The cost of each call of a microbatch, in FLOPs: its own, or the time to read and write its tensors."""
    body, memory = anatomy.body, storages(anatomy.body)
    costs: dict[fx.Node, float] = {}
    for call in anatomy.calls:
        made = values_of(call)
        fresh = any(memory[v].value is v for v in made if v in memory)
        touched = {*operands(call), *made} if fresh else set[fx.Node]()
        costs[call] = float(max(node_flops(body, call), BALANCE * sum(map(anatomy.bytes_of, touched))))
    return costs


def unit_costs(anatomy: Anatomy) -> list[float]:
    """What each unit costs in forward and backward. Free calls count once, where they are read last."""
    found = [0.0] * len(anatomy.units)
    costs = call_costs(anatomy)
    readers: dict[fx.Node, int] = {}
    for call in reversed(anatomy.calls):
        at = anatomy.unit_of.get(call)
        if at is None:
            at = max((readers[user] for value in values_of(call) for user in value.users if user in readers), default=0)
        readers[call] = at
        found[at] += costs[call]
    return found


def crossings(anatomy: Anatomy) -> list[int]:
    """Bytes of one microbatch that would cross a cut before each unit, there and back."""
    change = [0] * (len(anatomy.units) + 1)
    summed = terms_end(anatomy.body)  # the gradients of tied weights are sent once a step
    for call, home in anatomy.unit_of.items():
        for value in values_of(call) if call not in anatomy.again else ():  # which is sent to no one
            # What backward keeps of forward stays where forward had it at hand.
            users = [user for user in value.users if (user in anatomy.backward) == (call in anatomy.backward)]
            at = [home, *(anatomy.unit_of[user] for user in users if user in anatomy.unit_of and user not in summed)]
            if min(at) < max(at):
                change[min(at) + 1] += anatomy.bytes_of(value)
                change[max(at) + 1] -= anatomy.bytes_of(value)
    return list(accumulate(change))[:-1]


def balanced(costs: Sequence[float], crossing: Sequence[float], stages: int, slack: float = SLACK) -> Starts:
    """Cut units into contiguous stages, none of them empty. `crossing[i]` is what a cut before unit i costs."""
    before = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return before[end] - before[start] + (crossing[start] if start else 0.0)

    # best[k][end]: the least possible maximum over k + 1 stages that hold the units before `end`.
    best: list[list[float]] = [[cost(0, end) for end in range(len(costs) + 1)]]
    for k in range(1, stages):
        row = [math.inf] * (len(costs) + 1)
        for end in range(k + 1, len(costs) + 1):
            row[end] = min(max(best[-1][start], cost(start, end)) for start in range(k, end))
        best.append(row)
    limit = best[-1][len(costs)] * (1 + slack)
    sent: list[tuple[float, Starts]] = [
        (0.0, (0,)) if end and cost(0, end) <= limit else (math.inf, ()) for end in range(len(costs) + 1)
    ]
    for k in range(1, stages):
        sent = [
            min(
                (
                    (sent[start][0] + crossing[start], (*sent[start][1], start))
                    for start in range(k, end)
                    if sent[start][0] < math.inf and cost(start, end) <= limit
                ),
                default=(math.inf, ()),
            )
            for end in range(len(costs) + 1)
        ]
    return sent[len(costs)][1]


def choose(anatomy: Anatomy, stages: int) -> Starts:
    """The balanced cut of a body into so many stages."""
    units = anatomy.units
    if stages < 1 or len(units) < stages:
        message = f"a model of {len(units)} layers and modules cannot be cut into {stages} stages"
        shown = ", ".join(unit.name or "the model's own" for unit in units[:8]) + (", ..." if len(units) > 8 else "")
        raise error("SC221", message, cause=f"they are, in order: {shown}", hint="ask for fewer stages")
    return balanced(unit_costs(anatomy), [float(LINK * size) for size in crossings(anatomy)], stages)


def named(anatomy: Anatomy, split: Sequence[str]) -> Starts:
    """Stages that begin where these modules begin: named in full, or by their last segments if those say which."""
    modules = {fqn[: at + 1] for fqn in map(_segments, _fqns(anatomy)) for at in range(len(fqn))}
    starts = [0]
    for name in split:
        wanted = tuple(name.split("."))
        exact = [fqn for fqn in modules if fqn == wanted] or [fqn for fqn in modules if fqn[-len(wanted) :] == wanted]
        if len(exact) != 1:
            known = sorted(".".join(fqn) for fqn in (exact or modules))
            which = "several modules are" if exact else "no module that forward runs is"
            hint = f"name one of {', '.join(known[:4])}" if exact else did_you_mean(name, known, "modules")
            raise error("SC221", f"{which} called '{name}'", cause=f"pipeline.split: {list(split)}", hint=hint)
        starts.append(_first(anatomy, exact[0], name, split))
    for (_, a), (name, b) in pairwise(zip(("", *split), starts, strict=True)):
        if b <= a:
            message = f"no stage can begin at '{name}': nothing runs between it and the start of the stage before"
            hint = "name modules in the order in which forward runs them, the first of them not the model's first"
            raise error("SC221", message, cause=f"pipeline.split: {list(split)}", hint=hint)
    return tuple(starts)


def _first(anatomy: Anatomy, module: tuple[str, ...], name: str, split: Sequence[str]) -> int:
    """The unit that a module's first call begins."""
    for at, unit in enumerate(anatomy.units):
        for position, call in enumerate(unit.calls):
            if _segments(info(call).fqn)[: len(module)] == module:
                if position:
                    message = f"'{name}' begins in the middle of {unit.name or 'the model'}, which is not divided"
                    cause = f"pipeline.split: {list(split)}"
                    raise error("SC221", message, cause=cause, hint=f"split at '{unit.name}' or after it")
                return at
    raise AssertionError("a module that forward runs has a first call")


def _fqns(anatomy: Anatomy) -> set[str]:
    return {info(call).fqn for unit in anatomy.units for call in unit.calls}


def _segments(fqn: str) -> tuple[str, ...]:
    return tuple(fqn.split(".")) if fqn else ()
