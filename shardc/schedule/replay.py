"""Simulates instruction lists under a cost model: the result is a predicted `Timeline`.

Replay differs from the machine of the proof: it predicts how long a good runtime takes, and not where the strictest
one could deadlock. A send starts when its rank reaches it and its link (source, destination) is free. Work waits until
its operands have arrived, not for the Recv instructions. Collectives run beside compute on a lane of their own; the
optimizer waits for that lane. Where transfers take the cores that compute, the work of both ranks that runs beside one
takes longer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from shardc.ir.diagnostic import error
from shardc.schedule.costs import Costs, InstructionCosts
from shardc.schedule.instructions import (
    COLLECTIVE,
    COMPUTE,
    Free,
    Gather,
    Instruction,
    Optimizer,
    PipelineCollective,
    Send,
)
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import ValueKey
from shardc.schedule.timeline import Timeline, TimelineEvent


def replay(lists: RankLists, costs: Costs | None = None) -> Timeline:
    """The timeline of proved lists. Lists with a cycle of waits raise SC523."""
    stages = len(lists.pipeline.stages)
    if costs is not None and len(costs.stages) != stages:
        message = f"the costs are of {len(costs.stages)} stages, the pipeline has {stages}"
        raise error("SC220", message, hint="give Costs one StageCost for each stage, in order")
    state = _ReplayState(lists, costs or Costs.unit(stages))
    positions = [0] * len(lists.ranks)
    progressed = True
    while progressed:
        progressed = False
        for rank, instructions in enumerate(lists.ranks):
            while positions[rank] < len(instructions) and state.step(rank, instructions[positions[rank]]):
                positions[rank] += 1
                progressed = True
    for rank, instructions in enumerate(lists.ranks):
        if positions[rank] < len(instructions):
            message = f"rank {rank} waits for ever at instruction {positions[rank]}, {instructions[positions[rank]]}"
            raise error("SC523", message, hint="prove the lists first: the proof shows why")
    return Timeline(len(lists.ranks), tuple(sorted(state.events, key=lambda e: (e.start, e.rank))), state.peak_bytes())


ROUNDS = 20  # of finding when work ends beside transfers, each by the end before


class _Transfer(NamedTuple):
    """From when to when, and how long the compute of both ranks stands still for it."""

    start: float
    end: float
    taken: float

    def beside(self, start: float, end: float) -> float:
        """How long work from `start` to `end` stands still for it."""
        shared = min(end, self.end) - max(start, self.start)
        return self.taken * shared / (self.end - self.start) if shared > 0 else 0.0


class _ReplayState:
    """The state of a replay. `step` executes a rank's next instruction, or returns False if the rank must wait."""

    def __init__(self, lists: RankLists, costs: Costs) -> None:
        self.pipeline, self.costs = lists.pipeline, costs
        self.in_line = isinstance(costs, InstructionCosts)
        ranks = range(len(lists.ranks))
        self.events: list[TimelineEvent] = []
        self.work_end = [0.0 for _ in ranks]  # by rank: when its compute so far ends
        self.collective_end = [0.0 for _ in ranks]  # by rank: when its collectives so far end
        self.available_from: list[dict[ValueKey, float]] = [{} for _ in ranks]  # by rank and value: its arrival
        self.sending_until: list[dict[ValueKey, float]] = [{} for _ in ranks]  # by rank and value: when its sends end
        self.link_end: dict[tuple[int, int], float] = defaultdict(float)
        # By rank: what it sends, and what it has been sent, where that takes compute; and when it worked.
        self.sent: list[list[_Transfer]] = [[] for _ in ranks]
        self.received: list[dict[ValueKey, _Transfer]] = [{} for _ in ranks]
        self.worked: list[list[tuple[float, float]]] = [[] for _ in ranks]
        # By collective, its number, and rank: when the rank reached it.
        self.member_times: dict[tuple[PipelineCollective, int], dict[int, float]] = defaultdict(dict)
        # By rank and collective: the number of the last one reached.
        self.reach_counts: list[dict[PipelineCollective, int]] = [{} for _ in ranks]
        self.pending_collectives = [0 for _ in ranks]  # by rank: collectives reached but not begun
        self.byte_changes: list[list[tuple[float, int]]] = [[] for _ in ranks]

    def step(self, rank: int, i: Instruction) -> bool:
        if isinstance(i, Optimizer):
            return self._optimizer(rank, i)
        if isinstance(i, Free):
            self._free(rank, i)
            return True
        reads, makes = self.pipeline.effects(i)
        available_from = self.available_from[rank]
        if any(value not in available_from for value in reads):
            return False
        self._receive(rank, reads)
        start = max([self.work_end[rank], *(available_from[value] for value in reads)])
        if isinstance(i, COMPUTE):
            self.work_end[rank] = end = self._work(rank, start, self.costs.seconds(rank, i))
            self.events.append(TimelineEvent(rank, i, start, end))
            for value in makes:
                available_from[value] = end
        elif isinstance(i, Send):
            self._send(rank, i, start)
        elif isinstance(i, Gather):
            self.collective_end[rank] = end = max(start, self.collective_end[rank]) + self.costs.seconds(rank, i)
            if self.in_line:
                self.work_end[rank] = end
            self.events.append(TimelineEvent(rank, i, end - self.costs.seconds(rank, i), end))
            for value in makes:
                available_from[value] = end
        elif isinstance(i, COLLECTIVE):
            self._reach(rank, i)
        for value in makes:
            self.byte_changes[rank].append((start, self.pipeline.bytes.get(value[0], 0)))
        return True

    def _send(self, rank: int, i: Send, ready: float) -> None:
        value, link = (i.value, i.microbatch), (rank, i.peer)
        start = max(ready, self.link_end[link])
        end = start + self.costs.seconds(rank, i)
        self.link_end[link] = self.available_from[i.peer][value] = end
        self.sending_until[rank][value] = max(end, self.sending_until[rank].get(value, 0.0))
        self.events.append(TimelineEvent(rank, i, start, end))
        if isinstance(self.costs, InstructionCosts) and (taken := self.costs.taken(rank, i)) and end > start:
            transfer = _Transfer(start, end, taken)
            self.sent[rank].append(transfer)
            self.received[i.peer][value] = transfer

    def _work(self, rank: int, start: float, seconds: float) -> float:
        """When work ends that would take so long alone: transfers of this rank's run beside it."""
        under_way, end = self.sent[rank], start + seconds
        if under_way:
            for _ in range(ROUNDS):  # what it takes longer, it is longer beside them
                before, end = end, start + seconds + sum(transfer.beside(start, end) for transfer in under_way)
                if end - before <= 1e-9 * seconds:
                    break
            self.sent[rank] = [transfer for transfer in under_way if transfer.end > end]
        if self.in_line:
            self.worked[rank].append((start, end))
        return end

    def _receive(self, rank: int, reads: Iterable[ValueKey]) -> None:
        """The work that ran while these were received took longer."""
        received = self.received[rank]
        for value in reads if received else ():
            if (transfer := received.pop(value, None)) is None:
                continue
            worked, late = self.worked[rank], 0.0
            first = next((i for i in range(len(worked) - 1, -1, -1) if worked[i][1] <= transfer.start), -1) + 1
            for i in range(first, len(worked)):
                idle = worked[i][0] - worked[i - 1][1] if i > first else 0.0  # which makes up for it
                late = max(0.0, late - idle) + transfer.beside(*worked[i])
            if late:
                self.work_end[rank] += late
                worked[-1] = worked[-1][0], worked[-1][1] + late

    def _reach(self, rank: int, i: PipelineCollective) -> None:
        """A collective begins when its last member has reached it. No rank waits for it at this point."""
        members = self._meet(rank, i)
        self.pending_collectives[rank] += 1
        if members is None:
            return
        start = max(members.values())
        end = start + max(self.costs.seconds(member, i) for member in members)
        for member in members:
            self.pending_collectives[member] -= 1
            self.collective_end[member] = end
            if self.in_line and len(members) == 1:
                self.work_end[member] = end
            self.events.append(TimelineEvent(member, i, start, end))

    def _optimizer(self, rank: int, i: Optimizer) -> bool:
        if self.pending_collectives[rank]:
            return False
        members = self.member_times[i, 0]
        members[rank] = max(self.work_end[rank], self.collective_end[rank])
        if len(members) < len(i.group):
            return False
        start = max(members.values())
        self.work_end[rank] = end = start + self.costs.seconds(rank, i)
        if end > start:
            self.events.append(TimelineEvent(rank, i, start, end))
        return True

    def _meet(self, rank: int, i: PipelineCollective) -> dict[int, float] | None:
        """The times at which the members reached it, or None until the last one has."""
        number = self.reach_counts[rank][i] = self.reach_counts[rank].get(i, -1) + 1
        members = self.member_times[i, number]
        members[rank] = max(self.work_end[rank], self.collective_end[rank])
        return members if len(members) == len(i.group) else None

    def _free(self, rank: int, i: Free) -> None:
        for name in i.values:
            value = (name, i.microbatch)
            self.available_from[rank].pop(value, None)
            end = max(self.work_end[rank], self.sending_until[rank].pop(value, 0.0))
            self.byte_changes[rank].append((end, -self.pipeline.bytes.get(name, 0)))

    def peak_bytes(self) -> tuple[int, ...]:
        """At equal times, frees (negative) sort before allocations, so that the memory is reused."""
        return tuple(max(accumulate((b for _, b in sorted(changes)), initial=0)) for changes in self.byte_changes)
