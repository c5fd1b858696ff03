"""Breadth-first: each stage of a rank runs all its microbatches before the next stage does.

(Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", arXiv 2211.05953, section 4.) Stages are p apart, as in
interleaved 1F1B, and the bubble is the same, (p - 1) / (v m) for m >= p, but all m microbatches are held. In return, a
stage's sharded parameters are gathered twice a step instead of once for each microbatch, and its gradients are complete
and can be reduced while other stages still run.
"""

from __future__ import annotations

from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward


def breadth_first(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    ranks = stages // virtual
    orders: list[list[Compute]] = []
    for rank in range(ranks):
        rank_stages = range(rank, stages, ranks)
        order: list[Compute] = [Forward(stage, j) for stage in rank_stages for j in range(microbatches)]
        orders.append(order + [Backward(stage, j) for stage in reversed(rank_stages) for j in range(microbatches)])
    return orders
