"""ZB-H1: 1F1B with a split backward; wgrads are delayed and fill the bubble at the end.

(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 2.1 and figure 3.) With F, B, W the
times of forward, dgrad and wgrad, the bubble is (p - 1)(F + B - W), where 1F1B's is (p - 1)(F + B + W): a third of it
if they are equal. Rank r delays its wgrads by r microbatches, so that every rank holds p microbatches, no more than the
first rank holds under 1F1B.
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Compute
from shardc.schedule.schedules.registry import need_virtual
from shardc.schedule.schedules.spell import spell


def zb_h1(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("zb-h1", virtual, virtual == 1, "use 'zb-v' with two stages a rank, 'interleaved' with more")
    orders: list[list[Compute]] = []
    for rank in range(stages):
        ahead, lag = (min(n, microbatches) for n in (stages - 1 - rank, rank))
        words = ["F"] * ahead
        for j in range(microbatches):
            words += ["F"] * (ahead + j < microbatches) + ["D"] + ["W"] * (j >= lag)
        orders.append(spell(words + ["W"] * lag, [rank], microbatches))
    return orders
