"""From the order of work to instruction lists: transfers, gathers, reductions, the optimizer and frees are added.

Why the lists cannot deadlock: all work and all communication is put on one line of time (a transfer at the moment that
its value is made), and a rank's list is that line with the events of other ranks left out. Both ends of a transfer
thus sit at the same place of the same line, and so do all members of a collective: running the line from left to right
is a legal run, even where no send completes before its receive is posted. Transfers that end up side by side become
one batch, which can only make waits shorter.

An order of work that waits for itself has no such line. It is emitted all the same, each receive before its first use
and each send after its work: the proof then shows the cycle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

from shardc.stages.clock import Orders, Span, clock
from shardc.stages.costs import Costs
from shardc.stages.instructions import Free, Gather, Instruction, Optimizer, Recv, ReduceGrads, Send
from shardc.stages.lists import RankLists, batches
from shardc.stages.pipeline import Pipeline, Value

Spans = list[list[Span]]
Key = tuple[float, int, int]  # time; 0 for communication, 1 for work; which of them
NEVER = math.inf


class Seat(NamedTuple):
    """A rank's side of an event: its instruction, and where that goes if the event has no time."""

    rank: int
    instruction: Instruction
    otherwise: Key


class Event(NamedTuple):
    """Communication, with one seat for each rank that takes part."""

    time: float
    seats: list[Seat]


def emit(
    orders: Orders,
    pipeline: Pipeline,
    microbatches: int,
    costs: Costs | None = None,
    schedule: str = "",
    regather: bool = True,
) -> RankLists:
    """The lists of all ranks. `regather`: sharded parameters are freed where a rank leaves their stage for a while."""
    spans = clock(orders, pipeline, costs or Costs.unit(len(pipeline.stages)))
    lines: list[list[tuple[Key, Instruction]]] = [
        [(_when(at, spans[rank]), work) for at, work in enumerate(order)] for rank, order in enumerate(orders)
    ]
    events = chain(
        _transfers(orders, spans, pipeline), _sums(orders, spans, pipeline), _gathers(orders, spans, pipeline, regather)
    )
    for number, event in enumerate(events):
        for rank, instruction, otherwise in event.seats:
            lines[rank].append(((event.time, 0, number) if event.time < NEVER else otherwise, instruction))
    everyone = tuple(range(len(orders)))
    ranks: list[tuple[Instruction, ...]] = []
    for rank, line in enumerate(lines):
        listed = [instruction for _, instruction in sorted(line, key=lambda item: item[0])]
        if pipeline.updates:
            listed.append(Optimizer(everyone if pipeline.clips else (rank,)))
        ranks.append(tuple(_with_frees(listed, pipeline)))
    return RankLists(pipeline, microbatches, tuple(ranks), schedule)


def _when(at: int, spans: list[Span]) -> Key:
    return (spans[at].start, 1, at) if at < len(spans) else (NEVER, at, 1)


def _end(at: int, spans: list[Span]) -> float:
    return spans[at].end if at < len(spans) else NEVER


def _transfers(orders: Orders, spans: Spans, pipeline: Pipeline) -> Iterator[Event]:
    """Each value goes once to each rank that reads it and has not made it, as soon as it is made."""
    makers: dict[tuple[str, int], tuple[int, int]] = {}  # rank and position
    readers: dict[tuple[str, int, int], int] = {}  # by value, microbatch and rank: the position of the first use
    for rank, order in enumerate(orders):
        for at, work in enumerate(order):
            part = pipeline.part(work)
            for name in part.makes:
                makers.setdefault((name, work.microbatch), (rank, at))
            for name in part.reads:
                readers.setdefault((name, work.microbatch, rank), at)
    channels: dict[tuple[int, int], list[tuple[int, int, str, int]]] = {}
    for (name, microbatch, to), use in readers.items():
        # What nobody makes is the batch, or the fault of a schedule that forgot something: the proof will say so.
        rank, at = makers.get((name, microbatch), (to, 0))
        if rank != to:
            channels.setdefault((rank, to), []).append((at, use, name, microbatch))
    for (rank, to), values in channels.items():
        values.sort()
        # Where there is no time, a receive stands before the first use of its value, or of any that is sent after it.
        uses = [*accumulate((use for _, use, *_ in reversed(values)), min)][::-1]
        for (at, _, name, microbatch), use in zip(values, uses, strict=True):
            size = pipeline.bytes.get(name, 0)
            send = Seat(rank, Send(name, microbatch, to, size), (NEVER, at, 2))
            receive = Seat(to, Recv(name, microbatch, rank, size), (NEVER, use, 0))
            yield Event(_end(at, spans[rank]), [send, receive])


def _gathers(orders: Orders, spans: Spans, pipeline: Pipeline, regather: bool) -> Iterator[Event]:
    """Parameters are gathered right before their first use in a visit, which is a run of work of one stage, and freed
    after their last: only when a rank has worked for another of its stages in between are they gathered again.

    breadth-first                   twice a step: once forward, once backward; a rank's last stage, which goes from one
                                    to the other, once. A rank holds one stage at a time
    interleaved, and other depth-   once a visit, of a few microbatches or of one: traffic grows with the microbatches.
    first orders of several stages  Without `regather`, once a step, and all stages of a rank are held at once
    one stage a rank                once a step, from its first work to its last: freeing it between forward and
                                    backward would make nothing smaller at the peak
    """
    for rank, order in enumerate(orders):
        last: dict[str, int] = {}  # by value: the visit that read it last
        visit = 0
        for at, work in enumerate(order):
            visit += at > 0 and order[at - 1].stage != work.stage
            stage = pipeline.stages[work.stage]
            names = [name for name in stage.gathers if name in pipeline.part(work).reads]
            stay = {name for name in names if name in last and (name in stage.kept or not regather)}
            missing = tuple(name for name in names if name not in stay and last.get(name) != visit)
            last.update(dict.fromkeys(names, visit))
            if missing:
                time = spans[rank][at].start if at < len(spans[rank]) else NEVER
                gather = Gather(work.stage, missing, sum(pipeline.bytes.get(name, 0) for name in missing))
                yield Event(time, [Seat(rank, gather, (NEVER, at, 0))])


def _sums(orders: Orders, spans: Spans, pipeline: Pipeline) -> Iterator[Event]:
    """Gradients are summed as soon as the last microbatch's are in, on all ranks that accumulate them."""
    last: dict[str, dict[int, int]] = {}  # by name and rank: the position of the last work that accumulates it
    for rank, order in enumerate(orders):
        for at, work in enumerate(order):
            for name in pipeline.part(work).accumulates:
                last.setdefault(name, {})[rank] = at
    for number, (name, places) in enumerate(last.items()):
        group = tuple(places)
        time = max(_end(at, spans[rank]) for rank, at in places.items())
        total = ReduceGrads(name, group, pipeline.bytes.get(name, 0))
        yield Event(time, [Seat(rank, total, (NEVER, len(orders[rank]), number)) for rank in group])


def _with_frees(listed: Sequence[Instruction], pipeline: Pipeline) -> list[Instruction]:
    """Free each value after its last use; after the whole batch if that is a transfer, so as not to cut it in two."""
    backwards: list[Instruction] = []
    needed: set[Value] = set()
    for batch in reversed(batches(listed)):
        effects = [pipeline.effects(instruction) for instruction in batch]
        made = {value for _, makes in effects for value in makes}
        touched = dict.fromkeys(value for reads, makes in effects for value in (*makes, *reads))
        backwards += _frees([value for value in touched if value not in needed])
        backwards += reversed(batch)
        needed.update(touched)
        needed -= made
    return backwards[::-1]


def _frees(values: Sequence[Value]) -> Iterator[Free]:
    by_microbatch: dict[int | None, list[str]] = {}
    for name, microbatch in values:
        by_microbatch.setdefault(microbatch, []).append(name)
    for microbatch, names in by_microbatch.items():
        yield Free(tuple(names), microbatch)
