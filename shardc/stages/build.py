"""From a pipeline and the name of a schedule to lists that are proved: nothing runs, or is drawn, that was not."""

from __future__ import annotations

from dataclasses import replace

from shardc.ir.diagnostic import ShardcError
from shardc.stages.costs import Costs
from shardc.stages.emit import emit
from shardc.stages.lists import RankLists
from shardc.stages.pipeline import Pipeline
from shardc.stages.prove import prove
from shardc.stages.schedules import order


def build(
    pipeline: Pipeline,
    schedule: str,
    microbatches: int,
    virtual: int = 1,
    costs: Costs | None = None,
    regather: bool = True,
) -> RankLists:
    """The instruction lists of all ranks. A schedule, built-in or not, that does not hold up is an error."""
    orders = order(schedule, len(pipeline.stages), virtual, microbatches, costs)
    lists = emit(orders, pipeline, microbatches, costs, schedule, regather)
    proof = prove(lists)
    if not proof.ok:
        raise ShardcError(*(replace(wrong, cause=f"schedule '{schedule}'") for wrong in proof.errors))
    return lists
