"""Schedules by name. A schedule is a function, and this is the whole of what it has to know:

    (stages, virtual, microbatches, costs) -> for each rank, its Forwards, Backwards, Dgrads and Wgrads in order

`stages` counts all of them, `virtual` those of one rank: there are stages / virtual ranks. Which rank a stage lives on
is where its work is listed. The rest is added (emit.py), and the result is proved before anything runs (prove.py).
"""

from __future__ import annotations

from collections.abc import Callable

from shardc.ir.diagnostic import did_you_mean, error
from shardc.stages.clock import Orders
from shardc.stages.costs import Costs
from shardc.stages.instructions import COMPUTE

Schedule = Callable[[int, int, int, Costs], Orders]
_SCHEDULES: dict[str, Schedule] = {}
_RANKS = "return one list for each of the stages / virtual ranks, and every stage in one of them"


def register(name: str, function: Schedule) -> None:
    """Make a schedule known to plans under a name of its own; a name that is taken is an error."""
    if _SCHEDULES.get(name, function) is not function:
        raise error("SC220", f"there is a schedule named '{name}' already", hint="choose another name")
    _SCHEDULES[name] = function


def names() -> list[str]:
    return list(_SCHEDULES)


def order(name: str, stages: int, virtual: int, microbatches: int, costs: Costs | None = None) -> Orders:
    """What the schedule of this name says, in the form that it must have; whether it is any good is for the proof."""
    if name not in _SCHEDULES:
        hint = did_you_mean(name, names(), "schedules")
        raise error("SC220", f"there is no schedule named '{name}'", hint=hint)
    for what, value in (("stages", stages), ("virtual", virtual), ("microbatches", microbatches)):
        if value < 1:
            raise error("SC220", f"a pipeline of {value} {what} cannot be", hint=f"give {what} as 1 or more")
    if stages % virtual:
        message = f"{stages} stages cannot be shared out to ranks by {virtual}"
        raise error("SC220", message, hint="make the number of stages a multiple of `virtual`, the stages of one rank")
    orders = _SCHEDULES[name](stages, virtual, microbatches, costs or Costs.unit(stages))
    _check(name, orders, stages, stages // virtual, microbatches)
    return orders


def need_virtual(name: str, virtual: int, fits: bool, hint: str) -> None:
    """For a schedule that is made for certain numbers of stages a rank."""
    if not fits:
        raise error("SC220", f"schedule '{name}' cannot be used with {_count(virtual)} a rank", hint=hint)


def _check(name: str, orders: Orders, stages: int, ranks: int, microbatches: int) -> None:
    if len(orders) != ranks:
        message = f"schedule '{name}' lists work for {len(orders)} of {ranks} ranks"
        raise error("SC220", message, hint=_RANKS)
    home: dict[int, int] = {}
    for rank, work in ((rank, work) for rank, listed in enumerate(orders) for work in listed):
        if not isinstance(work, COMPUTE):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"schedule '{name}' lists {work!r} for rank {rank}"
            raise error("SC220", message, hint="list only Forward, Backward, Dgrad and Wgrad; the rest is added")
        if not (0 <= work.stage < stages and 0 <= work.microbatch < microbatches):
            message = f"schedule '{name}' lists {work!r} for rank {rank}"
            raise error("SC220", message, hint=f"there are {stages} stages and {microbatches} microbatches, from 0")
        if home.setdefault(work.stage, rank) != rank:
            message = f"schedule '{name}' puts stage {work.stage} on ranks {home[work.stage]} and {rank}"
            raise error("SC220", message, hint="a stage's parameters live on one rank: list all its work there")
    missing = sorted(set(range(stages)) - home.keys())
    if missing:
        raise error("SC220", f"schedule '{name}' lists no work for stage {missing[0]}", hint=_RANKS)


def _count(virtual: int) -> str:
    return "1 stage" if virtual == 1 else f"{virtual} stages"
