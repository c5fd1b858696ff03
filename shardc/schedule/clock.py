"""Start and end times of all work, if each rank works in its given order and no link is ever busy.

A rank does one piece of work at a time. Work starts when its operands are available: produced on the same rank, or
received. An order with a cycle of waits makes no progress; the spans of its ranks then end early. `emit` orders
transfers by these times, and schedule searches compare candidates by them (schedules/auto.py). A `Timeline` is
different: it replays finished lists (replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Compute
from shardc.schedule.pipeline import Pipeline

Orders = Sequence[Sequence[Compute]]  # by rank


class TimeSpan(NamedTuple):
    start: float
    end: float


def work_spans(orders: Orders, pipeline: Pipeline, costs: Costs) -> list[list[TimeSpan]]:
    """The span of each piece of work, by rank and position."""
    # Looked up once a part, not once a microbatch: searches call this function thousands of times.
    parts = {(type(work), work.stage): pipeline.part(work) for order in orders for work in order}
    seconds = {(type(work), work.stage): costs.work_seconds(work) for order in orders for work in order}
    transfer_seconds = {name: costs.transfer_seconds(pipeline.bytes.get(name, 0)) for name in pipeline.producers}
    reads = {kind: [name for name in part.reads if name in transfer_seconds] for kind, part in parts.items()}
    # Every work takes some time, so that a producer always starts before its readers.
    shortest = 1e-9 * max(seconds.values(), default=0.0) or 1e-9
    spans: list[list[TimeSpan]] = [[] for _ in orders]
    # By value and microbatch: the rank and time of its production.
    produced: dict[str, dict[int, tuple[int, float]]] = {name: {} for name in transfer_seconds}
    progressed = True
    while progressed:
        progressed = False
        for rank, order in enumerate(orders):
            rank_spans = spans[rank]
            while len(rank_spans) < len(order):
                work = order[len(rank_spans)]
                kind, microbatch = (type(work), work.stage), work.microbatch
                start = rank_spans[-1].end if rank_spans else 0.0
                for name in reads[kind]:
                    production = produced[name].get(microbatch)
                    if production is None:
                        break
                    producer, time = production
                    start = max(start, time if producer == rank else time + transfer_seconds[name])
                else:
                    end = start + max(seconds[kind], shortest)
                    rank_spans.append(TimeSpan(start, end))
                    for name in parts[kind].makes:
                        produced[name].setdefault(microbatch, (rank, end))
                    progressed = True
                    continue
                break
    return spans
