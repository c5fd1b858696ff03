"""What is said of schedules that cannot be, word for word."""

from collections.abc import Callable

import pytest

from shardc import ShardcError, schedules
from shardc.schedule.build import build
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Forward, Send
from shardc.schedule.pipeline import chain_pipeline

Orders = list[list[Compute]]


def gpipe(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    every = range(microbatches)
    return [[*(Forward(rank, j) for j in every), *(Backward(rank, j) for j in every)] for rank in range(stages)]


def one_rank_short(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    return gpipe(stages - 1, virtual, microbatches, costs)


def one_microbatch_more(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    return gpipe(stages, virtual, microbatches + 1, costs)


def in_two_places(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    orders = gpipe(stages, virtual, microbatches, costs)
    orders[1].append(orders[0].pop())
    return orders


def one_stage_less(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    return [*gpipe(stages - 1, virtual, microbatches, costs), []]


def sends_itself(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    orders = gpipe(stages, virtual, microbatches, costs)
    orders[0].insert(1, Send("x1", 0, 1))  # type: ignore[arg-type]
    return orders


def backward_first(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    """Rank 0 wants its first gradient before it lets the second microbatch go; rank 1 begins backward with that."""
    orders = gpipe(stages, virtual, microbatches, costs)
    orders[0] = [Forward(0, 0), Backward(0, 0), Forward(0, 1), Backward(0, 1)]
    orders[1] = [Forward(1, 0), Forward(1, 1), Backward(1, 1), Backward(1, 0)]
    return orders


# By golden file: the schedule, stages, virtual, microbatches, and a limit of memory.
CASES = {
    "unknown_schedule": ("zb-h2", 4, 1, 8, 99.0),
    "no_microbatches": ("1f1b", 4, 1, 0, 99.0),
    "stages_do_not_divide": ("interleaved", 7, 2, 8, 99.0),
    "one_stage_a_rank_only": ("1f1b", 4, 2, 8, 99.0),
    "two_stages_a_rank_only": ("zb-v", 4, 1, 8, 99.0),
    "several_stages_a_rank_only": ("interleaved", 4, 1, 8, 99.0),
    "over_memory": ("auto", 4, 2, 8, 1.5),
    "own_ranks": (one_rank_short, 2, 1, 2, 99.0),
    "own_microbatch": (one_microbatch_more, 2, 1, 2, 99.0),
    "own_stage_twice": (in_two_places, 2, 1, 2, 99.0),
    "own_stage_missing": (one_stage_less, 2, 1, 2, 99.0),
    "own_send": (sends_itself, 2, 1, 2, 99.0),
    "own_deadlock": (backward_first, 2, 1, 2, 99.0),
}


@pytest.mark.parametrize("case", CASES)
def test_message(case: str, golden: Callable[[str, str], None]) -> None:
    schedule, stages, virtual, microbatches, memory = CASES[case]
    if not isinstance(schedule, str):
        schedules.register(schedule.__name__, schedule)
        schedule = schedule.__name__
    with pytest.raises(ShardcError) as caught:
        build(chain_pipeline(stages), schedule, microbatches, virtual, Costs.unit(stages, memory))
    golden(f"pipeline/{case}.txt", str(caught.value))
