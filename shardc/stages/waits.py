"""Who waits for whom: transfers and collectives as meetings of steps, and cycles among them.

A step is a batch of transfers or a collective. The machine (prove.py) lets a step be done when every step that it meets
is posted, and a rank posts a step when the one before is done. So each step waits for the step *before* each one that
it meets, and the lists can deadlock if and only if that relation has a cycle:

    rank 0   Send a -> 1 | work | Recv b <- 1         Send a meets Recv a, before which rank 1 has Send b;
    rank 1   Send b -> 0 | work | Recv a <- 0         Send b meets Recv b, before which rank 0 has Send a: a cycle
"""

from __future__ import annotations

from collections import defaultdict
from itertools import zip_longest

import networkx as nx

from shardc.ir.diagnostic import Diagnostic
from shardc.stages.instructions import COLLECTIVE, COMPUTE, TRANSFER, Collective, Instruction, Send, Transfer, in_words

Step = tuple[int, int]  # a rank, and a number among its steps
Steps = list[list[list[Instruction]]]  # by rank: its batches
Meetings = list[tuple[Step, ...]]  # steps that can only be done together
Ends = list[tuple[Step, Transfer]]


def transfers(steps: Steps) -> tuple[Meetings, list[Diagnostic]]:
    """The n-th send of a channel meets its n-th receive."""
    channels: dict[tuple[int, int], tuple[Ends, Ends]] = defaultdict(lambda: ([], []))
    for rank, batched in enumerate(steps):
        for number, batch in enumerate(batched):
            for i in batch:
                if isinstance(i, Send):
                    channels[rank, i.peer][0].append(((rank, number), i))
                elif isinstance(i, TRANSFER):
                    channels[i.peer, rank][1].append(((rank, number), i))
    meetings: Meetings = []
    errors: list[Diagnostic] = []
    for (source, to), (sends, receives) in channels.items():
        for number, (sent, received) in enumerate(zip_longest(sends, receives)):
            if sent is None or received is None or not _same(sent[1], received[1]):
                a, b = ("nothing" if end is None else in_words(end[1]) for end in (sent, received))
                errors.append(Diagnostic("SC521", f"transfer {number} from rank {source} to rank {to}: {a} meets {b}"))
                break  # what follows on the channel is shifted, and says nothing new
            meetings.append((sent[0], received[0]))
    return meetings, errors


def _same(a: Transfer, b: Transfer) -> bool:
    return a.value == b.value and a.microbatch == b.microbatch and a.bytes == b.bytes


def collectives(steps: Steps) -> tuple[Meetings, list[Diagnostic]]:
    """The n-th collective of a group meets its n-th on every member."""
    found: dict[tuple[int, ...], dict[int, list[tuple[Step, Collective]]]] = defaultdict(lambda: defaultdict(list))
    for rank, batched in enumerate(steps):
        for number, (i, *_) in enumerate(batched):
            if isinstance(i, COLLECTIVE) and len(i.group) > 1:
                found[i.group][rank].append(((rank, number), i))
    meetings: Meetings = []
    errors: list[Diagnostic] = []
    for group, by_rank in found.items():
        for number, members in enumerate(zip_longest(*(by_rank[rank] for rank in group))):
            here = [None if member is None else member[1] for member in members]
            if len(set(here)) > 1:
                said = ", ".join(f"rank {rank} {i and in_words(i)}" for rank, i in zip(group, here, strict=True))
                errors.append(Diagnostic("SC522", f"collective {number} of group {set(group)} differs: {said}"))
                break
            meetings.append(tuple(step for step, _ in members))
    return meetings, errors


def deadlock(steps: Steps, meetings: Meetings) -> list[Diagnostic]:
    """A step is done after the one before it on its own rank, and on the rank of every step that it meets."""
    of: dict[Step, list[int]] = defaultdict(list)  # the meetings of each step
    for at, meeting in enumerate(meetings):
        for step in meeting:
            of[step].append(at)
    lines: list[list[Step]] = [[] for _ in steps]
    for step in sorted(of, reverse=True):
        lines[step[0]].append(step)  # what each rank has to do yet, from its end
    missing = [len(meeting) for meeting in meetings]  # steps that are not posted
    open_ = {step: len(own) for step, own in of.items()}  # meetings that have not taken place
    todo = [line[-1] for line in lines if line]
    while todo:
        for at in of[todo.pop()]:
            missing[at] -= 1
            for step in () if missing[at] else meetings[at]:
                open_[step] -= 1
                if not open_[step]:
                    line = lines[step[0]]
                    line.pop()
                    todo += line[-1:]
    stuck = {rank: line[-1] for rank, line in enumerate(lines) if line}
    return [_cycle(steps, meetings, stuck)] if stuck else []


def _cycle(steps: Steps, meetings: Meetings, stuck: dict[int, Step]) -> Diagnostic:
    """The smallest cycle of ranks that each stand at a step, and wait for the next to get past its own."""
    waits: nx.DiGraph[int] = nx.DiGraph()
    for meeting in meetings:
        for here in meeting:
            if stuck.get(here[0]) == here:
                waits.add_edges_from(
                    (here[0], rank) for rank, number in meeting if number > stuck.get(rank, (0, number))[1]
                )
    backs = ((b, a) for a, b in waits.edges if nx.has_path(waits, b, a))
    cycle: list[int] = min((nx.shortest_path(waits, b, a) for b, a in backs), key=len)
    ends = zip(cycle, [*cycle[1:], cycle[0]], strict=True)
    shown = [(rank, _stands_at(steps[rank], stuck[rank][1], other), other) for rank, other in ends]
    text = "\n".join(f"rank {rank} at {words}: waits for rank {other}" for rank, words, other in shown)
    message = f"{len(cycle)} ranks wait for each other in a cycle"
    sends = all("Send" in words for _, words, _ in shown)
    hint = "list opposite transfers side by side: adjacent ones are one batch" if sends else None
    return Diagnostic("SC523", message, source_text=text, hint=hint)


def _stands_at(batched: list[list[Instruction]], number: int, other: int) -> str:
    """What of a step has to do with another rank, and the work that comes next."""
    shown = [in_words(i) for i in batched[number] if not isinstance(i, TRANSFER) or i.peer == other]
    work = next((i for batch in batched[number:] for i in batch if isinstance(i, COMPUTE)), None)
    before = "" if work is None else f", before {in_words(work)}"
    return " | ".join(shown[:3]) + (f" | {len(shown) - 3} more" if len(shown) > 3 else "") + before
