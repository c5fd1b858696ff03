"""A list scheduler: a free rank runs the most urgent work that is ready and fits in memory.

Work that other ranks wait for is urgent: first backward, then forward, of the stage closest to the loss. Wgrads fill
gaps, or precede forwards if `eager`. A microbatch reserves memory for all stages of a rank when it first enters the
rank. An admitted microbatch can therefore always finish, oldest first, and the search never deadlocks on memory.

`greedy` tries stages laid out in a loop and in a V, backward split and whole, and several limits on the microbatches in
flight (admitting too many early delays the first ones). It keeps the best order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import error
from shardc.schedule.clock import Orders
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Backward, Compute, Dgrad, Forward, Wgrad
from shardc.schedule.schedules.judge import best_orders

StageRanks = Sequence[int]  # the rank of each stage


def greedy(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    orders = best_orders(attempts(stages, virtual, microbatches, costs), costs)
    if orders is None:
        message = f"the activations of one microbatch take more than the limit of {human_bytes(costs.memory)}"
        raise error("SC220", message, hint="raise the limit, make microbatches smaller or stages more")
    return orders


def attempts(stages: int, virtual: int, microbatches: int, costs: Costs) -> Iterator[Orders]:
    ranks = stages // virtual
    layouts = [[stage % ranks for stage in range(stages)]]
    if virtual == 2:
        layouts.append([min(stage, stages - 1 - stage) for stage in range(stages)])
    for rank_of in layouts:
        largest_microbatch = _largest_microbatch(rank_of, costs)
        # The memory limit itself, and the memory of as many microbatches as fill the pipeline.
        limits = {min(costs.memory, largest_microbatch * admitted) for admitted in (ranks, 2 * ranks - 1, microbatches)}
        for limit in sorted(limits):
            if limit >= largest_microbatch:
                for split, eager in ((False, False), (True, False), (True, True)):
                    yield list_schedule(rank_of, microbatches, costs, limit, split, eager)


def list_schedule(
    rank_of: StageRanks, microbatches: int, costs: Costs, limit: float, split: bool = True, eager: bool = False
) -> Orders:
    """The orders of work that the list scheduler produces: each rank runs its most urgent ready work first."""
    state = _SearchState(rank_of, microbatches, costs, limit, split, eager)
    events = [(0.0, rank) for rank in range(max(rank_of) + 1)]  # a heap: when a rank should look for work
    busy = [0.0] * len(events)
    while events:
        now, rank = heapq.heappop(events)
        work = None if now < busy[rank] else state.choose(rank, now)
        if work is None:
            continue
        busy[rank] = end = now + costs.work_seconds(work)
        heapq.heappush(events, (end, rank))
        delivery = state.do(work, rank, end)
        if delivery is not None:
            stage, arrival = delivery
            heapq.heappush(events, (arrival, rank_of[stage]))
    return state.orders


@dataclass
class _SearchState:
    """The progress of each stage. Microbatches pass a stage in order, so counts and arrival times describe it."""

    rank_of: StageRanks
    microbatches: int
    costs: Costs
    limit: float
    split: bool
    eager: bool
    orders: list[list[Compute]] = field(init=False)

    def __post_init__(self) -> None:
        self.urgency = [self._backward, self._forward]
        if self.split:
            self.urgency.insert(1 if self.eager else 2, self._wgrad)
        stages = range(len(self.rank_of))
        self.orders = [[] for _ in range(max(self.rank_of) + 1)]
        self.stages_of = [[s for s in reversed(stages) if self.rank_of[s] == rank] for rank in range(len(self.orders))]
        self.memory_per_microbatch = [
            sum(self.costs.stages[s].activation for s in rank_stages) for rank_stages in self.stages_of
        ]
        self.memory_held = [0.0] * len(self.orders)
        # Arrival times of the operands of each stage's forwards and backwards, and the number of completed ones.
        self.forward: list[list[float]] = [[] for _ in stages]
        self.forward[0] = [0.0] * self.microbatches
        self.backward: list[list[float]] = [[] for _ in stages]
        self.run_counts: list[dict[type[Compute], int]] = [
            dict.fromkeys((Forward, Dgrad, Backward, Wgrad), 0) for _ in stages
        ]

    def choose(self, rank: int, now: float) -> Compute | None:
        """The most urgent work that a rank can do now."""
        for kind in self.urgency:
            for stage in self.stages_of[rank]:
                work = kind(stage, now)
                if work is not None:
                    return work
        return None

    def do(self, work: Compute, rank: int, end: float) -> tuple[int, float] | None:
        """Record work that ends at `end`. Returns the stage that reads its result and the time of arrival there."""
        stage = work.stage
        self.run_counts[stage][type(work)] += 1
        self.orders[rank].append(work)
        if isinstance(work, Forward) and self._admits_microbatch(stage):
            self.memory_held[rank] += self.memory_per_microbatch[rank]
        if isinstance(work, Wgrad | Backward):
            self.memory_held[rank] -= self.costs.stages[stage].activation
        if isinstance(work, Wgrad) or (stage == 0 and not isinstance(work, Forward)):
            return None
        if isinstance(work, Forward):
            last = stage == len(self.rank_of) - 1  # where the loss is, and backward begins
            target, arrivals = (stage, self.backward) if last else (stage + 1, self.forward)
        else:
            target, arrivals = stage - 1, self.backward
        arrival = end if self.rank_of[target] == rank else end + self.costs.transfer_seconds(self.costs.crossing)
        arrivals[target].append(arrival)
        return target, arrival

    def _admits_microbatch(self, stage: int) -> bool:
        """Whether a microbatch first enters the stage's rank at this stage."""
        return stage == self.stages_of[self.rank_of[stage]][-1]

    def _forward(self, stage: int, now: float) -> Compute | None:
        rank, j = self.rank_of[stage], self.run_counts[stage][Forward]
        fits = not self._admits_microbatch(stage) or self.memory_held[rank] + self.memory_per_microbatch[
            rank
        ] <= self.limit * (1 + 1e-9)
        return Forward(stage, j) if fits and _ready(self.forward[stage], j, now) else None

    def _backward(self, stage: int, now: float) -> Compute | None:
        kind = Dgrad if self.split else Backward
        j = self.run_counts[stage][kind]
        return kind(stage, j) if _ready(self.backward[stage], j, now) else None

    def _wgrad(self, stage: int, now: float) -> Compute | None:
        j = self.run_counts[stage][Wgrad]
        return Wgrad(stage, j) if j < self.run_counts[stage][Dgrad] else None


def _ready(arrivals: Sequence[float], j: int, now: float) -> bool:
    return j < len(arrivals) and arrivals[j] <= now


def _largest_microbatch(rank_of: StageRanks, costs: Costs) -> float:
    """The memory of one microbatch on the rank where it is largest."""
    need: dict[int, float] = {}
    for stage, rank in enumerate(rank_of):
        need[rank] = need.get(rank, 0.0) + costs.stages[stage].activation
    return max(need.values())
