"""Builds proved instruction lists from a pipeline and the name of a schedule. Only proved lists are run or drawn."""

from __future__ import annotations

from dataclasses import replace

from shardc.ir.diagnostic import ShardcError
from shardc.schedule.costs import Costs
from shardc.schedule.emit import emit
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
) -> RankLists:
    """The instruction lists of all ranks. Raises ShardcError if the proof fails, for built-in schedules too."""
    orders = order(schedule, len(pipeline.stages), virtual, microbatches, costs)
    lists = emit(orders, pipeline, microbatches, costs, schedule, regather)
    proof = prove(lists)
    if not proof.ok:
        raise ShardcError(*(replace(wrong, cause=f"schedule '{schedule}'") for wrong in proof.errors))
    return lists
