"""Interleaved 1F1B: each rank has v stages, p apart; 1F1B over them, p microbatches at a time.

(Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", arXiv
2104.04473, section 2.2.2 and figure 4.)

A rank's k-th forward is of its stage k // p mod v, and of microbatch k mod p in the group k // (p v). The bubble is
(p - 1) / (v m) of the work. The first rank holds p + (p - 1) / v microbatches, in units of its v stages.

Megatron requires a multiple of p microbatches. Here any number works: the order is built for the next multiple, and
the work of missing microbatches is dropped. The remaining order has no cycles, because microbatches do not wait for
each other. An incomplete last group has more bubble than a full one.
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward
from shardc.schedule.schedules.one_f_one_b import alternate
from shardc.schedule.schedules.registry import need_virtual


def interleaved(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("interleaved", virtual, virtual > 1, "with one stage a rank, use '1f1b'")
    ranks = stages // virtual
    steps = -(-microbatches // ranks) * stages  # groups, of p microbatches, of v stages
    slots = [(k // ranks % virtual, k // stages * ranks + k % ranks) for k in range(steps)]
    orders: list[list[Compute]] = []
    for rank in range(ranks):
        forwards = [Forward(rank + ranks * chunk, j) for chunk, j in slots]
        backwards = [Backward(rank + ranks * (virtual - 1 - chunk), j) for chunk, j in slots]
        order = alternate(forwards, backwards, 2 * (ranks - 1 - rank) + (virtual - 1) * ranks)
        orders.append([work for work in order if work.microbatch < microbatches])
    return orders
