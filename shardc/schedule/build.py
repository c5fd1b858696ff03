"""Builds proved instruction lists from a pipeline and the name of a schedule. Only proved lists are run or drawn."""

from __future__ import annotations

from dataclasses import replace

from shardc.ir.diagnostic import ShardcError
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.emit import emit
from shardc.schedule.instructions import Forward
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

    A program for evaluation runs the forwards of the schedule, in its order; or those of `like`, the orders of another
    program of as many microbatches or more, whose stages lie on the same ranks.
    """
    orders = order(schedule, len(pipeline.stages), virtual, microbatches, costs) if like is None else like
    if not pipeline.trains:
        forwards = ([work for work in listed if isinstance(work, Forward)] for listed in orders)
        orders = [[work for work in listed if work.microbatch < microbatches] for listed in forwards]
    lists = emit(orders, pipeline, microbatches, costs, schedule, regather)
    proof = prove(lists)
    if not proof.ok:
        raise ShardcError(*(replace(wrong, cause=f"schedule '{schedule}'") for wrong in proof.errors))
    return lists
