"""1F1B: a warm-up of as many forwards as fill the pipeline, then one forward and one backward in turn.

(PipeDream-Flush: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training", arXiv 2006.09503, section
3.2; in Megatron-LM: Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1.)

    rank 0   F0 F1 .. .. B0 F2 B1 F3 B2 .. B3     bubble (p - 1) / m of the work, as GPipe;
    rank 1   .. F0 B0 F1 B1 F2 B2 F3 B3 ..        rank r holds p - r microbatches, however many there are
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward
from shardc.schedule.schedules.registry import need_virtual


def one_f_one_b(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("1f1b", virtual, virtual == 1, "use 'interleaved'")
    every = range(microbatches)
    return [
        alternate([Forward(rank, j) for j in every], [Backward(rank, j) for j in every], stages - 1 - rank)
        for rank in range(stages)
    ]


def alternate(forwards: Sequence[Compute], backwards: Sequence[Compute], ahead: int) -> list[Compute]:
    """`ahead` forwards, then a forward and a backward in turn, then the backwards that are left."""
    order = list(forwards[:ahead])
    for index, backward in enumerate(backwards):
        order += [*forwards[ahead + index : ahead + index + 1], backward]
    return order
