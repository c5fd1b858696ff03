"""Which of several orders of work is best: the fastest that fits in memory; of equally fast ones, the leanest."""

from __future__ import annotations

from collections.abc import Iterable

from shardc.stages.clock import Orders, clock
from shardc.stages.costs import Costs
from shardc.stages.instructions import Backward, Compute, Forward, Wgrad
from shardc.stages.pipeline import chain


def best(candidates: Iterable[Orders], costs: Costs) -> Orders | None:
    """None if no candidate fits, or there is none."""
    pipeline = chain(len(costs.stages), crossing=costs.crossing)
    judged: list[tuple[float, float, Orders]] = []
    for orders in candidates:
        held = max(peak_activations(order, costs) for order in orders)
        if held > costs.memory:
            continue
        spans = clock(orders, pipeline, costs)
        if all(len(timed) == len(order) for timed, order in zip(spans, orders, strict=True)):
            end = max(timed[-1].end for timed in spans)
            judged.append((float(f"{end:.6g}"), held, orders))
    return min(judged, key=lambda found: found[:2])[2] if judged else None


def peak_activations(order: Iterable[Compute], costs: Costs) -> float:
    """The most that a rank holds at once, in the unit of `StageCost.activation`."""
    held = most = 0.0
    for work in order:
        size = costs.stages[work.stage].activation
        if isinstance(work, Forward):
            held += size
            most = max(most, held)
        elif isinstance(work, Wgrad | Backward):
            held -= size
    return most
