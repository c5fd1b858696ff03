"""`auto`: the schedule that simulates fastest within the memory limit, of all built-in ones and of list schedules."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import ShardcError, error
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.schedules.breadth_first import breadth_first
from shardc.schedule.schedules.dualpipe_v import dualpipe_v
from shardc.schedule.schedules.gpipe import gpipe
from shardc.schedule.schedules.greedy import attempts
from shardc.schedule.schedules.interleaved import interleaved
from shardc.schedule.schedules.judge import best_orders
from shardc.schedule.schedules.one_f_one_b import one_f_one_b
from shardc.schedule.schedules.zb_h1 import zb_h1
from shardc.schedule.schedules.zb_v import zb_v

FIXED = (one_f_one_b, gpipe, interleaved, breadth_first, zb_h1, zb_v, dualpipe_v)


def auto(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    orders = best_orders(_candidates(stages, virtual, microbatches, costs), costs)
    if orders is None:
        message = f"no schedule keeps the activations of a rank within the limit of {human_bytes(costs.memory)}"
        raise error("SC220", message, hint="raise the limit, make microbatches smaller or stages more")
    return orders


def _candidates(stages: int, virtual: int, microbatches: int, costs: Costs) -> Iterator[Orders]:
    for schedule in FIXED:
        try:
            yield schedule(stages, virtual, microbatches, costs)
        except ShardcError:
            continue  # the schedule does not support this number of stages a rank
    yield from attempts(stages, virtual, microbatches, costs)
