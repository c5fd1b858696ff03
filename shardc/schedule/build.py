"""Builds proved instruction lists from a pipeline and the name of a schedule. Only proved lists are run or drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardc.ir.diagnostic import ShardcError
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.emit import emit
from shardc.schedule.instructions import Compute, Forward
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import Pipeline
from shardc.schedule.prove import prove
from shardc.schedule.schedules import order


def build(
    pipeline: Pipeline,
    schedule: str,
    microbatches: int,
    virtual: int = 1,
    costs: Costs | None = None,
    regather: bool = True,
    like: Orders | None = None,
) -> RankLists:
    """The instruction lists of all ranks. Raises ShardcError if the proof fails, for built-in schedules too.

    A program for evaluation runs the forwards of the schedule, in its order. With `like`, the orders of another
    program, stages lie on the ranks that they lie on there.
    """
    orders = order(schedule, len(pipeline.stages), virtual, microbatches, costs) if like is None else like
    if like is not None and microbatches > (count := _microbatches(like)):
        orders = order(schedule, len(pipeline.stages), virtual, microbatches, costs)
        if [*map(_stages, orders)] != [*map(_stages, like)]:  # a schedule that chooses by cost may choose anew
            orders = [
                [
                    replace(work, microbatch=start + work.microbatch)
                    for start in range(0, microbatches, count)
                    for work in listed
                ]
                for listed in like
            ]
    if not pipeline.trains:
        orders = [[work for work in listed if isinstance(work, Forward)] for listed in orders]
    orders = [[work for work in listed if work.microbatch < microbatches] for listed in orders]
    lists = emit(orders, pipeline, microbatches, costs, schedule, regather)
    proof = prove(lists)
    if not proof.ok:
        raise ShardcError(*(replace(wrong, cause=f"schedule '{schedule}'") for wrong in proof.errors))
    return lists


def _microbatches(orders: Orders) -> int:
    return 1 + max(work.microbatch for listed in orders for work in listed)


def _stages(listed: Sequence[Compute]) -> frozenset[int]:
    return frozenset(work.stage for work in listed)
