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
    # Looked up once for each part, not for each of its microbatches: searches call this by the thousand.
    parts = {(type(work), work.stage): pipeline.part(work) for order in orders for work in order}
    seconds = {(type(work), work.stage): costs.of(work) for order in orders for work in order}
    travel = {name: costs.transfer(pipeline.bytes.get(name, 0)) for name in pipeline.makers}
    reads = {kind: [name for name in part.reads if name in travel] for kind, part in parts.items()}
    # No work is free, for what makes a value must come before what reads it in time too.
    least = 1e-9 * max(seconds.values(), default=0.0) or 1e-9
    spans: list[list[Span]] = [[] for _ in orders]
    made: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in travel}  # by microbatch: rank and time
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            done = spans[rank]
            while len(done) < len(order):
                work = order[len(done)]
                kind, at = (type(work), work.stage), work.microbatch
                start = done[-1].end if done else 0.0
                for name in reads[kind]:
                    found = made[name].get(at)
                    if found is None:
                        break
                    maker, time = found
                    start = max(start, time if maker == rank else time + travel[name])
                else:
                    end = start + max(seconds[kind], least)
                    done.append(Span(start, end))
                    for name in parts[kind].makes:
                        made[name].setdefault(at, (rank, end))
                    moved = True
                    continue
                break
    return spans
