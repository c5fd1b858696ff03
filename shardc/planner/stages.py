"""The layers of a model in stages of a pipeline: contiguous, the longest as short as can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.network import Identity

HALVINGS = 40


@dataclass(frozen=True, eq=False)
class Stage:
    """The parts of one stage summed. Stages of the same layers are one object."""

    part: Part
    layers: int

    def work(self, faster: float = 1.0) -> float:
        """Seconds of a microbatch, if the device takes `faster` times as long; no less than the host's."""
        return max(faster * self.part.seconds, self.part.host)


def split(costs: LayerCosts, count: int) -> tuple[Stage, ...]:
    """The layers in contiguous stages whose longest is as short as can be, none of them empty."""
    return _split(Identity(costs), count)


@lru_cache(maxsize=4096)
def _split(key: Identity, count: int) -> tuple[Stage, ...]:
    costs = key.value
    assert isinstance(costs, LayerCosts)
    numbers = [n for _, n in costs.runs]
    if count == 1:
        return (Stage(costs.total(), sum(numbers)),)
    work = [part.seconds for part, n in costs.runs for _ in range(n)]
    sums = [0.0, *accumulate(work)]
    before, after = (part.seconds for part in (costs.entry, costs.exit))
    low, high = max(work), sums[-1] + before + after
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _ends(sums, before, after, count, middle) else (middle, high)
    ends = _ends(sums, before, after, count, high)
    assert ends is not None, "stages of all the work there is hold it"
    starts = [0, *ends[:-1]]
    stage_of: dict[tuple[object, ...], Stage] = {}  # by its layers
    stages: list[Stage] = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        spans = zip(accumulate(numbers, initial=0), accumulate(numbers), strict=False)
        holds = tuple(max(0, min(end, last) - max(start, first)) for first, last in spans)
        where = (number == 0, number == count - 1, holds)
        if where not in stage_of:
            part = costs.entry if number == 0 else Part()
            for (layer, _), here in zip(costs.runs, holds, strict=True):
                part = part.plus(layer.times(here)) if here else part
            stage_of[where] = Stage(part.plus(costs.exit) if number == count - 1 else part, end - start)
        stages.append(stage_of[where])
    return tuple(stages)


@lru_cache(maxsize=4096)
def summed(stages: tuple[Stage, ...]) -> Part:
    """The parts of the stages that a rank has."""
    part = stages[0].part
    for stage in stages[1:]:
        part = part.plus(stage.part)
    return part


def _ends(sums: Sequence[float], before: float, after: float, count: int, limit: float) -> list[int] | None:
    """Where stages of no more than the limit end, filled from the first on, each with a layer; None if they hold less
    than all. `sums` are those of the work of so many layers."""
    layers, position, ends = len(sums) - 1, 0, list[int]()
    for number in range(count):
        left = count - number - 1
        room = limit + sums[position] - (before if number == 0 else 0.0) - (after if left == 0 else 0.0)
        most = layers - left
        end = min(most, max(position + 1, bisect_right(sums, room) - 1))
        if left == 0 and end < layers:
            return None
        position = end
        ends.append(end)
    return ends
