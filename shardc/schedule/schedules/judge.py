"""Selects the best of several orders of work: the fastest that fits in memory, and of equally fast ones the one that
holds the least memory."""

from __future__ import annotations

from collections.abc import Iterable

from shardc.schedule.clock import Orders, work_spans
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward, Wgrad
from shardc.schedule.pipeline import chain_pipeline


def best_orders(candidates: Iterable[Orders], costs: Costs) -> Orders | None:
    """The best candidate. None if no candidate fits in memory, or there are no candidates."""
    pipeline = chain_pipeline(len(costs.stages), crossing=costs.crossing)
    judged: list[tuple[float, float, Orders]] = []
    for orders in candidates:
        activations = max(peak_activations(order, costs) for order in orders)
        if activations > costs.memory:
            continue
        spans = work_spans(orders, pipeline, costs)
        if all(len(timed) == len(order) for timed, order in zip(spans, orders, strict=True)):
            end = max(timed[-1].end for timed in spans)
            judged.append((float(f"{end:.6g}"), activations, orders))
    return min(judged, key=lambda scored: scored[:2])[2] if judged else None


def peak_activations(order: Iterable[Compute], costs: Costs) -> float:
    """The most that a rank holds at once, in the unit of `StageCost.activation`."""
    live = most = 0.0
    for work in order:
        size = costs.stages[work.stage].activation
        if isinstance(work, Forward):
            live += size
            most = max(most, live)
        elif isinstance(work, Wgrad | Backward):
            live -= size
    return most
