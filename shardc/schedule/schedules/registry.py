"""The registry of schedules by name. A schedule is a function with this signature:

    (stages, virtual, microbatches, costs) -> for each rank, its Forwards, Backwards, Dgrads and Wgrads in order

`stages` is the number of all stages, `virtual` that of one rank: there are stages / virtual ranks. A stage belongs to
the rank that lists its work. `emit` adds all other instructions, and `prove` checks the result before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

from shardc.ir.diagnostic import ShardcError, did_you_mean, error
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import COMPUTE
from shardc.schedule.schedules.within import within

ScheduleFunction = Callable[[int, int, int, Costs], Orders]
_SCHEDULES: dict[str, ScheduleFunction] = {}
_VIRTUAL: dict[str, int] = {}
SECONDS = 60.0  # for a schedule to list its work: ours take less than one
_RANKS = "return one list for each of the stages / virtual ranks, and every stage in one of them"


def register(name: str, function: ScheduleFunction, *, virtual: int = 1) -> None:
    """Register a schedule under a name for plans. A name that is taken is an error.

    `virtual` is the default number of stages of a rank, for plans that do not give it.

        from shardc.schedule.instructions import Backward, Forward

        def in_groups(stages, virtual, microbatches, costs):
            # GPipe over as many microbatches at a time as there are ranks: no rank holds more of them.
            ranks, orders = stages // virtual, []
            for rank in range(ranks):
                order = []
                for start in range(0, microbatches, ranks):
                    group = range(start, min(start + ranks, microbatches))
                    order += [Forward(rank, j) for j in group]
                    order += [Backward(rank, j) for j in reversed(group)]
                orders.append(order)
            return orders

        shardc.schedules.register("in-groups", in_groups)
        plan = {"pipeline": {"schedule": "in-groups", "microbatches": 8}}
    """
    if not callable(function):
        message = f"schedule '{name}' is {function!r}, no function"
        raise error("SC220", message, hint="pass one of (stages, virtual, microbatches, costs)")
    if virtual < 1:
        raise error("SC220", f"schedule '{name}' has {virtual} stages a rank", hint="give `virtual` as 1 or more")
    if _SCHEDULES.get(name, function) is not function:
        raise error("SC220", f"there is a schedule named '{name}' already", hint="choose another name")
    _SCHEDULES[name], _VIRTUAL[name] = function, virtual


def default_virtual(name: str) -> int:
    """The number of stages of a rank, for plans that do not give it."""
    return _VIRTUAL[name]


def names() -> list[str]:
    return list(_SCHEDULES)


def order(name: str, stages: int, virtual: int, microbatches: int, costs: Costs | None = None) -> Orders:
    """The orders of work of a schedule, with their form checked. Their correctness is left to the proof."""
    if name not in _SCHEDULES:
        hint = did_you_mean(name, names(), "schedules")
        raise error("SC220", f"there is no schedule named '{name}'", hint=hint)
    for what, value in (("stages", stages), ("virtual", virtual), ("microbatches", microbatches)):
        if value < 1:
            raise error("SC220", f"a pipeline of {value} {what} cannot be", hint=f"give {what} as 1 or more")
    if stages % virtual:
        message = f"{stages} stages cannot be shared out to ranks by {virtual}"
        raise error("SC220", message, hint="make the number of stages a multiple of `virtual`, the stages of one rank")
    ranks, most = stages // virtual, len(COMPUTE) * virtual * microbatches + 1

    def listed() -> Orders:  # users' functions may as well make tuples, or generators, of no end even
        work_lists = _SCHEDULES[name](stages, virtual, microbatches, costs or Costs.unit(stages))
        return [list(islice(work, most)) for work in islice(work_lists, ranks + 1)]

    try:
        orders = within(SECONDS, listed)
    except TimeoutError:
        message = f"schedule '{name}' does not list its work within {SECONDS:g} seconds"
        raise error("SC220", message, hint=_RANKS) from None
    except (ShardcError, KeyboardInterrupt):
        raise
    except BaseException as failed:
        failure = f"{type(failed).__name__}: {failed}"
        raise error("SC220", f"schedule '{name}' does not list its work: {failure}", hint=_RANKS) from failed
    _check(name, orders, stages, ranks, microbatches)
    return orders


def need_virtual(name: str, virtual: int, fits: bool, hint: str) -> None:
    """Raise SC220 unless the schedule supports this number of stages a rank."""
    if not fits:
        raise error("SC220", f"schedule '{name}' cannot be used with {_stage_count_text(virtual)} a rank", hint=hint)


def _check(name: str, orders: Orders, stages: int, ranks: int, microbatches: int) -> None:
    if len(orders) != ranks:
        count_text = (
            f"more than the {ranks} ranks there are" if len(orders) > ranks else f"{len(orders)} of {ranks} ranks"
        )
        raise error("SC220", f"schedule '{name}' lists work for {count_text}", hint=_RANKS)
    for rank, work in enumerate(orders):
        if len(work) > (most := len(COMPUTE) * (stages // ranks) * microbatches):
            message = f"schedule '{name}' lists more work for rank {rank} than there is: over {most} pieces"
            raise error("SC220", message, hint="list each piece of a stage once for each microbatch")
    rank_of: dict[int, int] = {}
    for rank, work in ((rank, work) for rank, listed in enumerate(orders) for work in listed):
        if not isinstance(work, COMPUTE):  # pyright: ignore[reportUnnecessaryIsInstance]
            message = f"schedule '{name}' lists {work!r} for rank {rank}"
            raise error("SC220", message, hint="list only Forward, Backward, Dgrad and Wgrad; the rest is added")
        if work.stage not in range(stages) or work.microbatch not in range(microbatches):
            message = f"schedule '{name}' lists {work!r} for rank {rank}"
            raise error("SC220", message, hint=f"there are {stages} stages and {microbatches} microbatches, from 0")
        if rank_of.setdefault(work.stage, rank) != rank:
            message = f"schedule '{name}' puts stage {work.stage} on ranks {rank_of[work.stage]} and {rank}"
            raise error("SC220", message, hint="a stage's parameters live on one rank: list all its work there")
    missing = sorted(set(range(stages)) - rank_of.keys())
    if missing:
        raise error("SC220", f"schedule '{name}' lists no work for stage {missing[0]}", hint=_RANKS)


def _stage_count_text(virtual: int) -> str:
    return "1 stage" if virtual == 1 else f"{virtual} stages"
