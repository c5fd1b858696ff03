"""`auto`: the built-in schedule that a simulation finds fastest within the limit of memory, or a list schedule."""

from __future__ import annotations

from collections.abc import Iterator

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import ShardcError, error
from shardc.stages.clock import Orders
from shardc.stages.costs import Costs
from shardc.stages.schedules.breadth_first import breadth_first
from shardc.stages.schedules.dualpipe_v import dualpipe_v
from shardc.stages.schedules.gpipe import gpipe
from shardc.stages.schedules.greedy import attempts
from shardc.stages.schedules.interleaved import interleaved
from shardc.stages.schedules.judge import best
from shardc.stages.schedules.one_f_one_b import one_f_one_b
from shardc.stages.schedules.zb_h1 import zb_h1
from shardc.stages.schedules.zb_v import zb_v

FIXED = (one_f_one_b, gpipe, interleaved, breadth_first, zb_h1, zb_v, dualpipe_v)


def auto(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    found = best(_candidates(stages, virtual, microbatches, costs), costs)
    if found is None:
        message = f"no schedule keeps the activations of a rank within the limit of {human_bytes(costs.memory)}"
        raise error("SC220", message, hint="raise the limit, make microbatches smaller or stages more")
    return found


def _candidates(stages: int, virtual: int, microbatches: int, costs: Costs) -> Iterator[Orders]:
    for schedule in FIXED:
        try:
            yield schedule(stages, virtual, microbatches, costs)
        except ShardcError:
            continue  # not made for so many stages a rank
    yield from attempts(stages, virtual, microbatches, costs)
