"""Interleaved 1F1B: each rank has v stages, p apart; 1F1B over them, p microbatches at a time.

(Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", arXiv
2104.04473, section 2.2.2 and figure 4.)

A rank's k-th forward is of its stage k // p mod v, and of microbatch k mod p in the group k // (p v). The bubble is
(p - 1) / (v m) of the work. The first rank holds p + (p - 1) / v microbatches, in units of its v stages.

Megatron asks for a multiple of p microbatches. Here any number will do: the order is made for the next multiple, and
microbatches that are not there are left out of it. What is left is still an order without cycles, for microbatches
do not wait for each other. Such a last group is not as tight as a full one.
"""

from __future__ import annotations

from shardc.stages.clock import Orders
from shardc.stages.costs import Costs
from shardc.stages.instructions import Backward, Compute, Forward
from shardc.stages.schedules.one_f_one_b import in_turn
from shardc.stages.schedules.registry import need_virtual


def interleaved(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    need_virtual("interleaved", virtual, virtual > 1, "with one stage a rank, use '1f1b'")
    ranks = stages // virtual
    steps = -(-microbatches // ranks) * stages  # groups, of p microbatches, of v stages
    places = [(k // ranks % virtual, k // stages * ranks + k % ranks) for k in range(steps)]
    orders: list[list[Compute]] = []
    for rank in range(ranks):
        forwards = [Forward(rank + ranks * chunk, j) for chunk, j in places]
        backwards = [Backward(rank + ranks * (virtual - 1 - chunk), j) for chunk, j in places]
        order = in_turn(forwards, backwards, 2 * (ranks - 1 - rank) + (virtual - 1) * ranks)
        orders.append([work for work in order if work.microbatch < microbatches])
    return orders
