"""When each piece of work would start and end, if ranks did their work in the order given and links were free.

Each rank does one thing at a time, and starts it once what it reads is there: made on the rank itself, or arrived.
An order that waits for itself gets stuck; its rank's spans then end early. This is what puts transfers in order
(emit.py) and what searches look at (schedules/auto.py); a `Timeline` replays the finished lists instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardc.stages.costs import Costs
from shardc.stages.instructions import Compute
from shardc.stages.pipeline import Pipeline

Orders = Sequence[Sequence[Compute]]  # by rank


class Span(NamedTuple):
    start: float
    end: float


def clock(orders: Orders, pipeline: Pipeline, costs: Costs) -> list[list[Span]]:
    """The span of each piece of work, by rank and position."""
    # No work is free, for what makes a value must come before what reads it in time too.
    least = 1e-9 * max((costs.of(work) for order in orders for work in order), default=0.0) or 1e-9
    spans: list[list[Span]] = [[] for _ in orders]
    made: dict[tuple[str, int], tuple[int, float]] = {}  # value of a microbatch: the rank, and the time
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                work = order[len(spans[rank])]
                part = pipeline.part(work)
                ready = [_arrival(name, work.microbatch, rank, made, pipeline, costs) for name in part.reads]
                if None in ready:
                    break
                free = spans[rank][-1].end if spans[rank] else 0.0
                start = max([free, *(time for time in ready if time is not None)])
                end = start + max(costs.of(work), least)
                spans[rank].append(Span(start, end))
                for name in part.makes:
                    made.setdefault((name, work.microbatch), (rank, end))
                moved = True
    return spans


def _arrival(
    name: str,
    microbatch: int,
    rank: int,
    made: dict[tuple[str, int], tuple[int, float]],
    pipeline: Pipeline,
    costs: Costs,
) -> float | None:
    """When a value is there to be read on a rank; None if nobody has made it yet."""
    if name not in pipeline.makers:
        return 0.0
    found = made.get((name, microbatch))
    if found is None:
        return None
    maker, time = found
    return time if maker == rank else time + costs.transfer(pipeline.bytes.get(name, 0))
