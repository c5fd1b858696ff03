"""ZB-V: two stages a rank in a V, so that the loss is on the rank of the batch; no bubble within 1F1B's memory.

(Qi et al. 2023, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6 and figure 6; V-ZB in Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362.) Rank r has stages r and 2p - 1 - r. If forward,
dgrad and wgrad take equally long, no rank is idle between its first work and its last from 2p - 1 microbatches on; only
the staggered start of the ranks is lost. Every rank holds at most p microbatches (2p of one stage). With fewer
microbatches the order is built for 2p - 1, and the work of the missing ones is dropped.
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.schedules.registry import need_virtual
from shardc.schedule.schedules.spell import spell


def zb_v(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("zb-v", virtual, virtual == 2, "it takes `virtual: 2`, stages in a V")
    ranks = stages // 2
    return [
        spell(_words(rank, ranks, max(microbatches, 2 * ranks - 1)), (rank, stages - 1 - rank), microbatches)
        for rank in range(ranks)
    ]


def _words(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Stage 0 of the rank is on the way down the V, stage 1 on the way up."""
    below = ranks - 1 - rank  # ranks that are closer to the bottom of the V
    return [
        *["F0"] * (2 * below + 1),
        *["F1", "F0"] * rank,
        *["F1", "D1", "W1"] * (below + 1),
        *["F0", "D0", "W0", "F1", "D1", "W1"] * (microbatches - ranks - below),
        *["D0", "W0", "F1", "D1", "W1"] * below,
        *["D0", "D1"] * rank,
        *["D0", "W0"] * (below + 1),
        *["W1"] * rank,
        *["W0"] * rank,
    ]
