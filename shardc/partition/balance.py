"""Chooses the cut points: the best balance of a contiguous partition, and among near-equal ones the fewest bytes sent.

cost of a stage    the sum over its units of the cost of forward and backward: the seconds that the hardware's account
                   tells (`cost.call_seconds`), in FLOPs of 16-bit products that take as long; what a cut sends is
                   weighed in the same unit. Of a body that is fused later, calls cost what their kernels take
                   (`fused_costs`)
best balance       the smallest possible cost of the most expensive stage, by dynamic programming over all cut points
chosen             the cut with the fewest bytes sent, among those within 1 % of the best balance

A unit is a layer. A layer that costs more than a stage's share of the whole is divided into the layers inside of it,
where there are any (a stage of Swin's into its blocks): no cut between whole layers could be balanced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import fx

from shardc.cost.call_seconds import Kind
from shardc.cost.call_seconds import call_costs as account
from shardc.ir.diagnostic import did_you_mean, error
from shardc.ir.graph import Graph, info, operands
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.links import Group
from shardc.ir.mesh import Mesh
from shardc.partition.microbatch_sums import linear_tail
from shardc.partition.step_analysis import StepAnalysis, divisible_layers, result_values

SLACK = 0.01
Starts = tuple[int, ...]  # the first unit of each stage


def call_costs(analysis: StepAnalysis, hardware: Hardware = DEFAULT, mesh: Mesh | None = None) -> dict[fx.Node, float]:
    """The cost of each call of a microbatch, in FLOPs of 16-bit products that take as long. `mesh` is that of all
    ranks, by default the body's."""
    return {call: cost for call, (_, cost) in costs_by_kind(analysis.body, hardware, mesh).items()}


def costs_by_kind(graph: Graph, hardware: Hardware, mesh: Mesh | None = None) -> dict[fx.Node, tuple[Kind, float]]:
    """The kind and the cost of each call of a graph. The latency of collectives counts where the hardware has tables of
    its links: of no machine in particular, small models would be cut by nothing else."""
    latency = 0.0 if hardware.tables.links else hardware.collective_start_seconds
    costs: dict[fx.Node, tuple[Kind, float]] = {}
    for call, cost in account(graph, hardware, mesh).items():
        seconds = cost.total
        if cost.kind == "product":  # where no table of products tells, reading operands may take longer
            touched = {*operands(call), *result_values(call)}
            types = [type for value in touched if (type := info(value).type) is not None]
            seconds = max(seconds, hardware.memory_seconds(sum(type.local_bytes(graph.mesh) for type in types)))
        elif cost.kind == "collective":
            seconds -= latency
        seconds = max(seconds, hardware.call_seconds)  # of small calls the host takes longer to issue one
        costs[call] = cost.kind, seconds * hardware.bf16_flops_per_second
    return costs


def sent_cost(hardware: Hardware, size: float, mesh: Mesh | None, axis: str) -> float:
    """What sending so many bytes to the next stage adds to its latency, in the same unit: stages compute meanwhile,
    and a cut elsewhere has the same latency."""
    if mesh is None or axis not in mesh.names:
        return hardware.flops_per_sent_byte((axis,)) * size
    return (send_seconds(hardware, size, mesh, axis) - send_seconds(hardware, 0, mesh, axis)) * (
        hardware.bf16_flops_per_second
    )


def send_seconds(hardware: Hardware, size: float, mesh: Mesh, axis: str) -> float:
    """From one stage to the next, of those that are farthest from each other."""
    levels = len(hardware.group_of(mesh, (axis,)).extents)
    return hardware.collective_seconds("send", size, Group((*[1] * (levels - 1), 2)), graph=True)


def unit_costs(
    analysis: StepAnalysis,
    hardware: Hardware = DEFAULT,
    mesh: Mesh | None = None,
    costs: Mapping[fx.Node, float] | None = None,
) -> list[float]:
    """The cost of each unit in forward and backward. A replicable call counts once, in the last unit that reads it.
    `costs` are those of calls, where they are known."""
    totals = [0.0] * len(analysis.units)
    costs = call_costs(analysis, hardware, mesh) if costs is None else costs
    unit_of: dict[fx.Node, int] = {}
    for call in reversed(analysis.calls):
        unit = analysis.unit_of.get(call)
        if unit is None:
            unit = max(
                (unit_of[user] for value in result_values(call) for user in value.users if user in unit_of), default=0
            )
        unit_of[call] = unit
        totals[unit] += costs[call]
    return totals


def cut_bytes(analysis: StepAnalysis) -> list[int]:
    """Bytes of one microbatch that would cross a cut before each unit, forward and backward together."""
    change = [0] * (len(analysis.units) + 1)
    sum_tail = linear_tail(analysis.body)  # gradients of tied weights are sent once a step, not once a microbatch
    for call, home in analysis.unit_of.items():
        for value in result_values(call) if call not in analysis.recomputed else ():  # a recomputed value is never sent
            # A forward value that backward reads is kept in a stage that had it in forward, so it does not cross.
            users = [user for user in value.users if (user in analysis.backward) == (call in analysis.backward)]
            units = [
                home,
                *(analysis.unit_of[user] for user in users if user in analysis.unit_of and user not in sum_tail),
            ]
            if min(units) < max(units):
                change[min(units) + 1] += analysis.bytes_of(value)
                change[max(units) + 1] -= analysis.bytes_of(value)
    return list(accumulate(change))[:-1]


def balanced_starts(costs: Sequence[float], crossing: Sequence[float], stages: int, slack: float = SLACK) -> Starts:
    """Cut units into contiguous stages, none of them empty. `crossing[i]` is what a cut before unit i costs."""
    cost_before = [0.0, *accumulate(costs)]

    def cost(start: int, end: int) -> float:
        return cost_before[end] - cost_before[start] + (crossing[start] if start else 0.0)

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


def divide_large_layers(
    analysis: StepAnalysis,
    stages: int,
    hardware: Hardware = DEFAULT,
    mesh: Mesh | None = None,
    costs: Mapping[fx.Node, float] | None = None,
) -> StepAnalysis:
    """The analysis with every layer divided that costs more than one of so many stages may, as far as lists go. `costs`
    are those of calls, where they are known."""
    divisible = divisible_layers(analysis.body) if stages > 1 else frozenset[str]()
    of_calls = costs or (call_costs(analysis, hardware, mesh) if divisible else {})
    while divisible:
        of_units = unit_costs(analysis, hardware, mesh, of_calls)
        share = sum(of_units) / stages
        large = {unit.name for unit, cost in zip(analysis.units, of_units, strict=True) if cost > share} & divisible
        if not large:
            break
        divisible -= large
        analysis = StepAnalysis(analysis.body, analysis.divided | large)
    return analysis


def choose_starts(
    analysis: StepAnalysis,
    stages: int,
    hardware: Hardware = DEFAULT,
    axis: str = "pp",
    mesh: Mesh | None = None,
    costs: Mapping[fx.Node, float] | None = None,
) -> Starts:
    """The balanced cut of a body into this many stages, which send along an axis of the mesh of all ranks. `costs` are
    those of calls, where they are known."""
    units = analysis.units
    if stages < 1 or len(units) < stages:
        message = f"a model of {len(units)} layers and modules cannot be cut into {stages} stages"
        shown = ", ".join(unit.name or "the model's own" for unit in units[:8]) + (", ..." if len(units) > 8 else "")
        raise error("SC221", message, cause=f"they are, in order: {shown}", hint="ask for fewer stages")
    crossing = [sent_cost(hardware, size, mesh, axis) for size in cut_bytes(analysis)]
    return balanced_starts(unit_costs(analysis, hardware, mesh, costs), crossing, stages)


def named_starts(analysis: StepAnalysis, split: Sequence[str]) -> Starts:
    """Stages that begin where these modules begin. A name may be a full FQN or its last segments, if unambiguous."""
    modules = {fqn[: length + 1] for fqn in map(_segments, _fqns(analysis)) for length in range(len(fqn))}
    starts = [0]
    for name in split:
        segments = tuple(name.split("."))
        exact = [fqn for fqn in modules if fqn == segments] or [
            fqn for fqn in modules if fqn[-len(segments) :] == segments
        ]
        if len(exact) != 1:
            names = sorted(".".join(fqn) for fqn in (exact or modules))
            which = "several modules are" if exact else "no module that forward runs is"
            hint = f"name one of {', '.join(names[:4])}" if exact else did_you_mean(name, names, "modules")
            raise error("SC221", f"{which} called '{name}'", cause=f"pipeline.split: {list(split)}", hint=hint)
        starts.append(_first_unit(analysis, exact[0], name, split))
    for (_, a), (name, b) in pairwise(zip(("", *split), starts, strict=True)):
        if b <= a:
            message = f"no stage can begin at '{name}': nothing runs between it and the start of the stage before"
            hint = "name modules in the order in which forward runs them, the first of them not the model's first"
            raise error("SC221", message, cause=f"pipeline.split: {list(split)}", hint=hint)
    return tuple(starts)


def _first_unit(analysis: StepAnalysis, module: tuple[str, ...], name: str, split: Sequence[str]) -> int:
    """The unit whose first call is the module's first call."""
    for index, unit in enumerate(analysis.units):
        for position, call in enumerate(unit.calls):
            if _segments(info(call).fqn)[: len(module)] == module:
                if position:
                    message = f"'{name}' begins in the middle of {unit.name or 'the model'}, which is not divided"
                    cause = f"pipeline.split: {list(split)}"
                    raise error("SC221", message, cause=cause, hint=f"split at '{unit.name}' or after it")
                return index
    raise AssertionError("a module that forward runs has a first call")


def _fqns(analysis: StepAnalysis) -> set[str]:
    return {info(call).fqn for unit in analysis.units for call in unit.calls}


def _segments(fqn: str) -> tuple[str, ...]:
    return tuple(fqn.split(".")) if fqn else ()
