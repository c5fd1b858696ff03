"""From the order of work to instruction lists: adds transfers, gathers, reductions, the optimizer and frees.

Why the lists cannot deadlock: all work and all communication is placed on one global time line (a transfer at the
moment when its value is produced). A rank's list is that time line without the events of other ranks. Both ends of a
transfer therefore have the same position on it, and so have all members of a collective. Running the time line from
left to right is a legal execution, even if no send completes before its receive is posted. Adjacent transfers become
one batch, which can only shorten waits.

An order of work with a cycle of waits has no such time line. It is emitted all the same, with each receive before its
first use and each send after its work. The proof then reports the cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from shardc.schedule.clock import Orders, TimeSpan, work_spans
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import Free, Gather, Instruction, Optimizer, Recv, ReduceGrads, Send
from shardc.schedule.lists import RankLists, split_batches
from shardc.schedule.pipeline import Pipeline, ValueKey

RankSpans = list[list[TimeSpan]]
TimeKey = tuple[float, int, int]  # time; 0 for communication, 1 for work; which of them
NEVER = math.inf


class RankEvent(NamedTuple):
    """One rank's instruction of an event. `untimed_key` is its position in the list if the event has no time."""

    rank: int
    instruction: Instruction
    untimed_key: TimeKey


class CommunicationEvent(NamedTuple):
    """One communication, with a `RankEvent` for each rank that takes part."""

    time: float
    members: list[RankEvent]


def emit(
    orders: Orders,
    pipeline: Pipeline,
    microbatches: int,
    costs: Costs | None = None,
    schedule: str = "",
    regather: bool = True,
) -> RankLists:
    """The lists of all ranks. `regather` frees sharded parameters whenever a rank switches to another of its stages."""
    spans = work_spans(orders, pipeline, costs or Costs.unit(len(pipeline.stages)))
    timed_lists: list[list[tuple[TimeKey, Instruction]]] = [
        [(_work_key(position, spans[rank]), work) for position, work in enumerate(order)]
        for rank, order in enumerate(orders)
    ]
    events = chain(
        _transfers(orders, spans, pipeline),
        _reductions(orders, spans, pipeline),
        _gathers(orders, spans, pipeline, regather),
    )
    for number, event in enumerate(events):
        for rank, instruction, untimed_key in event.members:
            timed_lists[rank].append(((event.time, 0, number) if event.time < NEVER else untimed_key, instruction))
    everyone = tuple(range(len(orders)))
    ranks: list[tuple[Instruction, ...]] = []
    for rank, timed_list in enumerate(timed_lists):
        instructions = [instruction for _, instruction in sorted(timed_list, key=lambda item: item[0])]
        if pipeline.updates:
            instructions.append(Optimizer(everyone if pipeline.clips else (rank,)))
        ranks.append(tuple(_with_frees(instructions, pipeline)))
    return RankLists(pipeline, microbatches, tuple(ranks), schedule)


def _work_key(position: int, spans: list[TimeSpan]) -> TimeKey:
    return (spans[position].start, 1, position) if position < len(spans) else (NEVER, position, 1)


def _end_time(position: int, spans: list[TimeSpan]) -> float:
    return spans[position].end if position < len(spans) else NEVER


def _transfers(orders: Orders, spans: RankSpans, pipeline: Pipeline) -> Iterator[CommunicationEvent]:
    """Each value is sent once to each other rank that reads it, as soon as it is produced."""
    producers: dict[tuple[str, int], tuple[int, int]] = {}  # rank and position
    readers: dict[tuple[str, int, int], int] = {}  # by value, microbatch and rank: the position of the first use
    for rank, order in enumerate(orders):
        for position, work in enumerate(order):
            part = pipeline.part(work)
            for name in part.makes:
                producers.setdefault((name, work.microbatch), (rank, position))
            for name in part.reads:
                readers.setdefault((name, work.microbatch, rank), position)
    channels: dict[tuple[int, int], list[tuple[int, int, str, int]]] = {}
    for (name, microbatch, target), first_use in readers.items():
        # A value without a producer belongs to the batch, or the schedule lacks some work: the proof reports that.
        rank, position = producers.get((name, microbatch), (target, 0))
        if rank != target:
            channels.setdefault((rank, target), []).append((position, first_use, name, microbatch))
    for (rank, target), values in channels.items():
        values.sort()
        # Without a time, a receive precedes the first use of its value and of all values that the channel sends later.
        uses = [*accumulate((use for _, use, *_ in reversed(values)), min)][::-1]
        for (position, _, name, microbatch), first_use in zip(values, uses, strict=True):
            size = pipeline.bytes.get(name, 0)
            send = RankEvent(rank, Send(name, microbatch, target, size), (NEVER, position, 2))
            receive = RankEvent(target, Recv(name, microbatch, rank, size), (NEVER, first_use, 0))
            yield CommunicationEvent(_end_time(position, spans[rank]), [send, receive])


def _gathers(orders: Orders, spans: RankSpans, pipeline: Pipeline, regather: bool) -> Iterator[CommunicationEvent]:
    """A visit is a run of work of one stage on a rank. Parameters are gathered right before their first use in a visit
    and freed after their last use in it. How often that happens:

    breadth-first                   twice a step: once in forward, once in backward. The last stage of a rank passes
                                    from forward to backward in one visit: once. A rank holds one stage at a time
    interleaved, and other depth-   once a visit of one or a few microbatches: traffic grows with the microbatches.
    first orders of several stages  Without `regather`: once a step, and a rank holds all its stages at once
    one stage a rank                once a step, held from its first work to its last. Freeing between forward and
                                    backward would not lower the peak
    """
    for rank, order in enumerate(orders):
        last_visit: dict[str, int] = {}  # by value: the visit that read it last
        visit = 0
        for position, work in enumerate(order):
            visit += position > 0 and order[position - 1].stage != work.stage
            stage = pipeline.stages[work.stage]
            names = [name for name in stage.gathers if name in pipeline.part(work).reads]
            still_gathered = {name for name in names if name in last_visit and (name in stage.kept or not regather)}
            missing = tuple(name for name in names if name not in still_gathered and last_visit.get(name) != visit)
            last_visit.update(dict.fromkeys(names, visit))
            if missing:
                time = spans[rank][position].start if position < len(spans[rank]) else NEVER
                gather = Gather(work.stage, missing, sum(pipeline.bytes.get(name, 0) for name in missing))
                yield CommunicationEvent(time, [RankEvent(rank, gather, (NEVER, position, 0))])


def _reductions(orders: Orders, spans: RankSpans, pipeline: Pipeline) -> Iterator[CommunicationEvent]:
    """Gradients are reduced as soon as all ranks that accumulate them have added their last microbatch."""
    last: dict[str, dict[int, int]] = {}  # by name and rank: the position of the last work that accumulates it
    for rank, order in enumerate(orders):
        for position, work in enumerate(order):
            for name in pipeline.part(work).accumulates:
                last.setdefault(name, {})[rank] = position
    for number, (name, last_positions) in enumerate(last.items()):
        group = tuple(last_positions)
        time = max(_end_time(position, spans[rank]) for rank, position in last_positions.items())
        reduction = ReduceGrads(name, group, pipeline.bytes.get(name, 0))
        yield CommunicationEvent(
            time, [RankEvent(rank, reduction, (NEVER, len(orders[rank]), number)) for rank in group]
        )


def _with_frees(instructions: Sequence[Instruction], pipeline: Pipeline) -> list[Instruction]:
    """Free each value after its last use. If that is a transfer, free it after the batch, which must stay whole."""
    reversed_list: list[Instruction] = []
    needed: set[ValueKey] = set()
    for batch in reversed(split_batches(instructions)):
        effects = [pipeline.effects(instruction) for instruction in batch]
        produced = {value for _, makes in effects for value in makes}
        touched = dict.fromkeys(value for reads, makes in effects for value in (*makes, *reads))
        reversed_list += _frees([value for value in touched if value not in needed])
        reversed_list += reversed(batch)
        needed.update(touched)
        needed -= produced
    return reversed_list[::-1]


def _frees(values: Sequence[ValueKey]) -> Iterator[Free]:
    by_microbatch: dict[int | None, list[str]] = {}
    for name, microbatch in values:
        by_microbatch.setdefault(microbatch, []).append(name)
    for microbatch, names in by_microbatch.items():
        yield Free(tuple(names), microbatch)
