"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965, section 2.3 and figure 2c).

rank 0   F0 F1 F2 F3 .. .. B0 B1 B2 B3        bubble (p - 1) / m of the work; holds all m microbatches
rank 1   .. F0 F1 F2 F3 B0 B1 B2 B3 ..
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Forward
from shardc.schedule.schedules.registry import need_virtual


def gpipe(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("gpipe", virtual, virtual == 1, "with several stages a rank, 'bfs' is what GPipe becomes")
    every = range(microbatches)
    return [[*(Forward(rank, j) for j in every), *(Backward(rank, j) for j in every)] for rank in range(stages)]
