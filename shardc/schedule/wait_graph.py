"""The wait graph: transfers and collectives as meetings of steps, and the search for a cycle of waits.

A step is a batch of transfers or a collective. On the machine of the proof (prove.py) a step completes when every step
that it meets is posted, and a rank posts a step when its previous one has completed. Each step therefore waits for the
*predecessor* of each step that it meets. The lists can deadlock if and only if that relation has a cycle:

    rank 0   Send a -> 1 | work | Recv b <- 1         Send a meets Recv a, before which rank 1 has Send b;
    rank 1   Send b -> 0 | work | Recv a <- 0         Send b meets Recv b, before which rank 0 has Send a: a cycle
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

import networkx as nx

from shardc.ir.diagnostic import Diagnostic
from shardc.schedule.instructions import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    Instruction,
    PipelineCollective,
    Send,
    Transfer,
    instruction_text,
)

StepKey = tuple[int, int]  # a rank, and a number among its steps
RankSteps = list[list[list[Instruction]]]  # by rank: its batches
Meetings = list[tuple[StepKey, ...]]  # steps that can only be done together
ChannelEnds = list[tuple[StepKey, Transfer]]


def match_transfers(steps: RankSteps) -> tuple[Meetings, list[Diagnostic]]:
    """The n-th send of a channel meets the n-th receive of that channel."""
    channels: dict[tuple[int, int], tuple[ChannelEnds, ChannelEnds]] = defaultdict(lambda: ([], []))
    for rank, batched in enumerate(steps):
        for number, batch in enumerate(batched):
            for i in batch:
                if isinstance(i, Send):
                    channels[rank, i.peer][0].append(((rank, number), i))
                elif isinstance(i, TRANSFER):
                    channels[i.peer, rank][1].append(((rank, number), i))
    meetings: Meetings = []
    errors: list[Diagnostic] = []
    for (source, target), (sends, receives) in channels.items():
        for number, (sent, received) in enumerate(zip_longest(sends, receives)):
            if sent is None or received is None or not _same_transfer(sent[1], received[1]):
                a, b = ("nothing" if end is None else instruction_text(end[1]) for end in (sent, received))
                errors.append(
                    Diagnostic("SC521", f"transfer {number} from rank {source} to rank {target}: {a} meets {b}")
                )
                break  # later transfers of the channel are shifted and would repeat the error
            meetings.append((sent[0], received[0]))
    return meetings, errors


def _same_transfer(a: Transfer, b: Transfer) -> bool:
    return a.value == b.value and a.microbatch == b.microbatch and a.bytes == b.bytes


def match_collectives(steps: RankSteps) -> tuple[Meetings, list[Diagnostic]]:
    """The n-th collective of a group meets the n-th collective of that group on every other member."""
    group_calls: dict[tuple[int, ...], dict[int, list[tuple[StepKey, PipelineCollective]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, batched in enumerate(steps):
        for number, (i, *_) in enumerate(batched):
            if isinstance(i, COLLECTIVE) and len(i.group) > 1:
                group_calls[i.group][rank].append(((rank, number), i))
    meetings: Meetings = []
    errors: list[Diagnostic] = []
    for group, by_rank in group_calls.items():
        for number, members in enumerate(zip_longest(*(by_rank[rank] for rank in group))):
            calls = [None if member is None else member[1] for member in members]
            if len(set(calls)) > 1:
                member_texts = ", ".join(
                    f"rank {rank} {instruction_text(i) if i else 'nothing'}"
                    for rank, i in zip(group, calls, strict=True)
                )
                errors.append(Diagnostic("SC522", f"collective {number} of group {set(group)} differs: {member_texts}"))
                break
            meetings.append(tuple(step for step, _ in members))
    return meetings, errors


def find_deadlock(steps: RankSteps, meetings: Meetings) -> list[Diagnostic]:
    """A step completes after its predecessor on its own rank, and after those of all steps that it meets."""
    meetings_of: dict[StepKey, list[int]] = defaultdict(list)  # the meetings of each step
    for meeting_index, meeting in enumerate(meetings):
        for step in meeting:
            meetings_of[step].append(meeting_index)
    remaining: list[list[StepKey]] = [[] for _ in steps]
    for step in sorted(meetings_of, reverse=True):
        remaining[step[0]].append(step)  # by rank: its steps that have not completed, last first
    unposted = [len(meeting) for meeting in meetings]  # steps that are not posted
    # By step: its meetings that have not taken place.
    open_meetings = {step: len(step_meetings) for step, step_meetings in meetings_of.items()}
    todo = [line[-1] for line in remaining if line]
    while todo:
        for meeting_index in meetings_of[todo.pop()]:
            unposted[meeting_index] -= 1
            for step in () if unposted[meeting_index] else meetings[meeting_index]:
                open_meetings[step] -= 1
                if not open_meetings[step]:
                    line = remaining[step[0]]
                    line.pop()
                    todo += line[-1:]
    stuck = {rank: line[-1] for rank, line in enumerate(remaining) if line}
    return [_cycle(steps, meetings, stuck)] if stuck else []


def _cycle(steps: RankSteps, meetings: Meetings, stuck: dict[int, StepKey]) -> Diagnostic:
    """The smallest cycle of stuck ranks, in which each rank waits for the next one to pass its current step."""
    waits: nx.DiGraph[int] = nx.DiGraph()
    for meeting in meetings:
        for step in meeting:
            if stuck.get(step[0]) == step:
                waits.add_edges_from(
                    (step[0], rank) for rank, number in meeting if number > stuck.get(rank, (0, number))[1]
                )
    return_edges = ((b, a) for a, b in waits.edges if nx.has_path(waits, b, a))
    cycle: list[int] = min((nx.shortest_path(waits, b, a) for b, a in return_edges), key=len)
    ends = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    shown = [(rank, _step_text(steps[rank], stuck[rank][1], other), other) for rank, other in ends]
    text = "\n".join(f"rank {rank} at {words}: waits for rank {other}" for rank, words, other in shown)
    message = f"{len(cycle)} ranks wait for each other in a cycle"
    sends = all("Send" in words for _, words, _ in shown)
    hint = "reorder the work of one of these ranks, so that it comes first to what another waits for"
    if sends:
        hint = "list opposite transfers side by side: adjacent ones are one batch"
    return Diagnostic("SC523", message, source_text=text, hint=hint)


def _step_text(batched: list[list[Instruction]], number: int, other: int) -> str:
    """The instructions of a step that involve another rank, and the work that follows."""
    shown = [instruction_text(i) for i in batched[number] if not isinstance(i, TRANSFER) or i.peer == other]
    work = next((i for batch in batched[number:] for i in batch if isinstance(i, COMPUTE)), None)
    suffix = "" if work is None else f", before {instruction_text(work)}"
    return " | ".join(shown[:3]) + (f" | {len(shown) - 3} more" if len(shown) > 3 else "") + suffix
