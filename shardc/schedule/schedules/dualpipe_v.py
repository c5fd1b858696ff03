"""DualPipeV: DualPipe cut in half, two stages a rank in a V; a forward stands beside a backward of another microbatch.

(DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.1 and table 2, which gives DualPipe's
bubble over 2p ranks; cut in half by Qi et al. 2025, "DualPipe could be better without the Dual", it runs on p.) With
F the time of a stage's forward, B of its whole backward, W of wgrad, and a pair that takes F&B, the bubble is
(p - 1)(F&B + B - 3W); pairs are listed as a forward and then a backward, so that F&B = F + B unless a runtime overlaps
their communication. A rank holds at most 2p + 1 microbatches of one stage. Only the ends of the step split backward.
With fewer than 2p microbatches the order is built for 2p, and the work of the missing ones is dropped.
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.schedules.registry import need_virtual
from shardc.schedule.schedules.spell import spell


def dualpipe_v(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("dualpipe-v", virtual, virtual == 2, "it takes `virtual: 2`, stages in a V")
    ranks = stages // 2
    return [
        spell(_words(rank, ranks, max(microbatches, stages)), (rank, stages - 1 - rank), microbatches)
        for rank in range(ranks)
    ]


def _words(rank: int, ranks: int, microbatches: int) -> list[str]:
    """Stage 0 of the rank is on the way down the V, stage 1 on the way up."""
    below = ranks - 1 - rank  # ranks that are closer to the bottom of the V
    last = ["B1", "B0"] * (rank + 1)
    return [
        *["F0"] * (2 * below),
        *["F0", "F1"] * (rank + 1),
        *["D1", "W", "F1"] * below,
        *["F0", "B1", "F1", "B0"] * (microbatches - ranks - below),
        *["B1", "F1", "B0"] * below,
        *last[: rank + 1],
        *(word.replace("B", "D") for word in last[rank + 1 :]),
        *["W", "D0"] * below,
        *["W"] * (rank + 1),
    ]
