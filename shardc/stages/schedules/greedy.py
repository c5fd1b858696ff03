"""A list scheduler: whenever a rank is free it does the most urgent work that is ready and that memory allows.

Urgent is what others wait for: first backward, then forward, of the stage nearest to the loss; wgrads fill gaps
(or come before forwards, if `eager`). A microbatch takes memory for all stages of a rank when it first comes there:
one that was let in can always be finished, oldest first, so the search never runs into a corner.

`greedy` tries it with stages laid out in a loop and in a V, backward split and whole, and several limits on the
microbatches under way (letting in too many early delays the first ones), and keeps the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import error
from shardc.stages.clock import Orders
from shardc.stages.costs import Costs
from shardc.stages.instructions import Backward, Compute, Dgrad, Forward, Wgrad
from shardc.stages.schedules.judge import best

Homes = Sequence[int]  # the rank of each stage


def greedy(stages: int, virtual: int, microbatches: int, costs: Costs) -> Orders:
    found = best(attempts(stages, virtual, microbatches, costs), costs)
    if found is None:
        message = f"the activations of one microbatch take more than the limit of {human_bytes(costs.memory)}"
        raise error("SC220", message, hint="raise the limit, make microbatches smaller or stages more")
    return found


def attempts(stages: int, virtual: int, microbatches: int, costs: Costs) -> Iterator[Orders]:
    ranks = stages // virtual
    layouts = [[stage % ranks for stage in range(stages)]]
    if virtual == 2:
        layouts.append([min(stage, stages - 1 - stage) for stage in range(stages)])
    for homes in layouts:
        most = _largest(homes, costs)
        # At the limit itself, and in multiples of what a pipeline needs to be full.
        limits = {min(costs.memory, most * admitted) for admitted in (ranks, 2 * ranks - 1, microbatches)}
        for limit in sorted(limits):
            if limit >= most:
                for split, eager in ((False, False), (True, False), (True, True)):
                    yield list_schedule(homes, microbatches, costs, limit, split, eager)


def list_schedule(
    homes: Homes, microbatches: int, costs: Costs, limit: float, split: bool = True, eager: bool = False
) -> Orders:
    """The orders of work that come out of doing first what is most urgent."""
    state = _State(homes, microbatches, costs, limit, split, eager)
    events = [(0.0, rank) for rank in range(max(homes) + 1)]  # a heap: when a rank should look for work
    busy = [0.0] * len(events)
    while events:
        now, rank = heapq.heappop(events)
        work = None if now < busy[rank] else state.choose(rank, now)
        if work is None:
            continue
        busy[rank] = end = now + costs.of(work)
        heapq.heappush(events, (end, rank))
        given = state.do(work, rank, end)
        if given is not None:
            stage, arrival = given
            heapq.heappush(events, (arrival, homes[stage]))
    return state.orders


@dataclass
class _State:
    """How far each stage has come. Microbatches pass a stage in order, so counts and arrival times say it all."""

    homes: Homes
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
        stages = range(len(self.homes))
        self.orders = [[] for _ in range(max(self.homes) + 1)]
        self.own = [[s for s in reversed(stages) if self.homes[s] == rank] for rank in range(len(self.orders))]
        self.need = [sum(self.costs.stages[s].activation for s in own) for own in self.own]
        self.held = [0.0] * len(self.orders)
        # Arrivals of what a stage's next forwards and backwards read; and how many of each are done.
        self.forward: list[list[float]] = [[] for _ in stages]
        self.forward[0] = [0.0] * self.microbatches
        self.backward: list[list[float]] = [[] for _ in stages]
        self.done: list[dict[type[Compute], int]] = [
            dict.fromkeys((Forward, Dgrad, Backward, Wgrad), 0) for _ in stages
        ]

    def choose(self, rank: int, now: float) -> Compute | None:
        """The most urgent work that a rank can do now."""
        for kind in self.urgency:
            for stage in self.own[rank]:
                work = kind(stage, now)
                if work is not None:
                    return work
        return None

    def do(self, work: Compute, rank: int, end: float) -> tuple[int, float] | None:
        """Note that work ends at some time; the stage that waits for what it made, and when that is there."""
        stage = work.stage
        self.done[stage][type(work)] += 1
        self.orders[rank].append(work)
        if isinstance(work, Forward) and self._enters(stage):
            self.held[rank] += self.need[rank]
        if isinstance(work, Wgrad | Backward):
            self.held[rank] -= self.costs.stages[stage].activation
        if isinstance(work, Wgrad) or (stage == 0 and not isinstance(work, Forward)):
            return None
        if isinstance(work, Forward):
            last = stage == len(self.homes) - 1  # where the loss is, and backward begins
            to, arrivals = (stage, self.backward) if last else (stage + 1, self.forward)
        else:
            to, arrivals = stage - 1, self.backward
        there = end if self.homes[to] == rank else end + self.costs.transfer(self.costs.crossing)
        arrivals[to].append(there)
        return to, there

    def _enters(self, stage: int) -> bool:
        """Whether a microbatch first comes to the stage's rank here."""
        return stage == self.own[self.homes[stage]][-1]

    def _forward(self, stage: int, now: float) -> Compute | None:
        rank, j = self.homes[stage], self.done[stage][Forward]
        fits = not self._enters(stage) or self.held[rank] + self.need[rank] <= self.limit * (1 + 1e-9)
        return Forward(stage, j) if fits and _ready(self.forward[stage], j, now) else None

    def _backward(self, stage: int, now: float) -> Compute | None:
        kind = Dgrad if self.split else Backward
        j = self.done[stage][kind]
        return kind(stage, j) if _ready(self.backward[stage], j, now) else None

    def _wgrad(self, stage: int, now: float) -> Compute | None:
        j = self.done[stage][Wgrad]
        return Wgrad(stage, j) if j < self.done[stage][Dgrad] else None


def _ready(arrivals: Sequence[float], j: int, now: float) -> bool:
    return j < len(arrivals) and arrivals[j] <= now


def _largest(homes: Homes, costs: Costs) -> float:
    """What one microbatch takes on the rank where that is most."""
    need: dict[int, float] = {}
    for stage, rank in enumerate(homes):
        need[rank] = need.get(rank, 0.0) + costs.stages[stage].activation
    return max(need.values())
