"""Instruction lists and costs become a predicted `Timeline`.

Replay differs from the proof's machine, for it asks how long a good runtime takes, and not what the strictest one
could get stuck at: a send starts when it is reached, and takes its turn on its link (source, destination); work waits
for the arrival of what it reads, not for receives. Collectives have a lane of their own; the optimizer waits for it.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from shardc.ir.diagnostic import error
from shardc.stages.costs import Costs
from shardc.stages.instructions import COLLECTIVE, COMPUTE, Collective, Free, Gather, Instruction, Optimizer, Send
from shardc.stages.lists import RankLists
from shardc.stages.pipeline import Value
from shardc.stages.timeline import Event, Timeline


def replay(lists: RankLists, costs: Costs | None = None) -> Timeline:
    """The timeline of lists that were proved; those that wait for themselves are an error."""
    stages = len(lists.pipeline.stages)
    if costs is not None and len(costs.stages) != stages:
        message = f"the costs are of {len(costs.stages)} stages, the pipeline has {stages}"
        raise error("SC220", message, hint="give Costs one StageCost for each stage, in order")
    run = _Run(lists, costs or Costs.unit(stages))
    at = [0] * len(lists.ranks)
    moved = True
    while moved:
        moved = False
        for rank, listed in enumerate(lists.ranks):
            while at[rank] < len(listed) and run.step(rank, listed[at[rank]]):
                at[rank] += 1
                moved = True
    for rank, listed in enumerate(lists.ranks):
        if at[rank] < len(listed):
            message = f"rank {rank} waits for ever at instruction {at[rank]}, {listed[at[rank]]}"
            raise error("SC523", message, hint="prove the lists first: the proof shows why")
    return Timeline(len(lists.ranks), tuple(sorted(run.events, key=lambda e: (e.start, e.rank))), run.peak_bytes())


class _Run:
    """The state of a replay. `step` does a rank's next instruction, or says that it has to wait."""

    def __init__(self, lists: RankLists, costs: Costs) -> None:
        self.pipeline, self.costs = lists.pipeline, costs
        ranks = range(len(lists.ranks))
        self.events: list[Event] = []
        self.now = [0.0 for _ in ranks]  # when a rank is done with the work so far
        self.lane = [0.0 for _ in ranks]  # and with its collectives
        self.there: list[dict[Value, float]] = [{} for _ in ranks]  # since when, or from when on
        self.sent: list[dict[Value, float]] = [{} for _ in ranks]  # until when a value is needed for sending
        self.link: dict[tuple[int, int], float] = defaultdict(float)
        self.met: dict[tuple[Collective, int], dict[int, float]] = defaultdict(dict)  # who reached it, and when
        self.reached: list[dict[Collective, int]] = [{} for _ in ranks]  # how often
        self.open = [0 for _ in ranks]  # collectives that were reached and have not begun
        self.bytes: list[list[tuple[float, int]]] = [[] for _ in ranks]

    def step(self, rank: int, i: Instruction) -> bool:
        if isinstance(i, Optimizer):
            return self._optimizer(rank, i)
        if isinstance(i, Free):
            self._free(rank, i)
            return True
        reads, makes = self.pipeline.effects(i)
        there = self.there[rank]
        if any(value not in there for value in reads):
            return False
        start = max([self.now[rank], *(there[value] for value in reads)])
        if isinstance(i, COMPUTE):
            self.now[rank] = end = start + self.costs.of(i)
            self.events.append(Event(rank, i, start, end))
            for value in makes:
                there[value] = end
        elif isinstance(i, Send):
            self._send(rank, i, start)
        elif isinstance(i, Gather):
            self.lane[rank] = end = max(start, self.lane[rank]) + self.costs.gathering(i)
            self.events.append(Event(rank, i, end - self.costs.gathering(i), end))
            for value in makes:
                there[value] = end
        elif isinstance(i, COLLECTIVE):
            self._reach(rank, i)
        for value in makes:
            self.bytes[rank].append((start, self.pipeline.bytes.get(value[0], 0)))
        return True

    def _send(self, rank: int, i: Send, ready: float) -> None:
        value, link = (i.value, i.microbatch), (rank, i.peer)
        start = max(ready, self.link[link])
        end = start + self.costs.transfer(i.bytes)
        self.link[link] = self.there[i.peer][value] = end
        self.sent[rank][value] = max(end, self.sent[rank].get(value, 0.0))
        self.events.append(Event(rank, i, start, end))

    def _reach(self, rank: int, i: Collective) -> None:
        """A collective begins when the last member has reached it; nobody waits for it here."""
        members = self._meet(rank, i)
        self.open[rank] += 1
        if members is None:
            return
        start = max(members.values())
        end = start + self.costs.reduce
        for member in members:
            self.open[member] -= 1
            self.lane[member] = end
            self.events.append(Event(member, i, start, end))

    def _optimizer(self, rank: int, i: Optimizer) -> bool:
        if self.open[rank]:
            return False
        members = self.met[i, 0]
        members[rank] = max(self.now[rank], self.lane[rank])
        if len(members) < len(i.group):
            return False
        start = max(members.values())
        self.now[rank] = end = start + self.costs.optimizer
        if end > start:
            self.events.append(Event(rank, i, start, end))
        return True

    def _meet(self, rank: int, i: Collective) -> dict[int, float] | None:
        """All members' times, once the last has come."""
        number = self.reached[rank][i] = self.reached[rank].get(i, -1) + 1
        members = self.met[i, number]
        members[rank] = max(self.now[rank], self.lane[rank])
        return members if len(members) == len(i.group) else None

    def _free(self, rank: int, i: Free) -> None:
        for name in i.values:
            value = (name, i.microbatch)
            self.there[rank].pop(value, None)
            end = max(self.now[rank], self.sent[rank].pop(value, 0.0))
            self.bytes[rank].append((end, -self.pipeline.bytes.get(name, 0)))

    def peak_bytes(self) -> tuple[int, ...]:
        """What is freed at a moment makes room for what is made then."""
        return tuple(max(accumulate((b for _, b in sorted(changes)), initial=0)) for changes in self.bytes)
