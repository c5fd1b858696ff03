"""Breadth-first: each stage of a rank runs all its microbatches before the next stage does.

(Lamy-Poirier 2022, "Breadth-First Pipeline Parallelism", arXiv 2211.05953, section 4.) Stages are p apart, as in
interleaved 1F1B, and the bubble is its, (p - 1) / (v m) for m >= p, but all m microbatches are held. In return, a
stage's sharded parameters are gathered twice a step and not once for each microbatch, and its gradients are complete,
and can be summed, while other stages still run.
"""

from __future__ import annotations

from shardc.stages.clock import Orders
from shardc.stages.costs import Costs
from shardc.stages.instructions import Backward, Compute, Forward


def breadth_first(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    ranks = stages // virtual
    orders: list[list[Compute]] = []
    for rank in range(ranks):
        own = range(rank, stages, ranks)
        order: list[Compute] = [Forward(stage, j) for stage in own for j in range(microbatches)]
        orders.append(order + [Backward(stage, j) for stage in reversed(own) for j in range(microbatches)])
    return orders
