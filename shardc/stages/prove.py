"""The proof that instruction lists do what a pipeline must, on every rank, whatever the timing.

The machine that it is proved for is the strictest that a runtime could be: **rendezvous, blocking**. A rank goes
through its list step by step. A batch of transfers is posted as a whole, and done when each of its transfers has met
its counterpart, in the order of its channel (source, destination), in a batch that is posted; a collective is done
when its whole group has reached it; only then does the rank go on. Buffers, several streams and early posting can only
take waits away, so what cannot deadlock here cannot deadlock there.

Collectives along other axes, which Gathers are, and calls of the parts, wait for no other list: all ranks of a
coordinate run the same one, and so reach them together, in one order.

What is shown (one check, one function, one code):
    SC521  every send has one receive, of the same value, in the order of its channel      (waits.py)
    SC522  every collective is reached by exactly its group, in the same order
    SC523  no cycle of waits; else the smallest one is shown
    SC524  no value is used before it is made or after it is freed, nor made twice, nor left behind
    SC525  every stage lives on one rank, and runs each microbatch's forward, dgrad and wgrad once, in order if it must
    SC526  gradients are summed once, after the last wgrad, by all who have some, and then the optimizer runs, last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardc.ir.collectives import collectives as collectives_of
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph
from shardc.ir.verify import violations
from shardc.stages.instructions import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    Backward,
    Compute,
    Dgrad,
    Forward,
    Free,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    Wgrad,
    in_words,
)
from shardc.stages.lists import RankLists, batches
from shardc.stages.pipeline import Value
from shardc.stages.waits import collectives, deadlock, transfers


@dataclass(frozen=True)
class Proof:
    """What is wrong, and what was looked at."""

    errors: tuple[Diagnostic, ...]
    checked: str = "transfers, collectives, waits, values, work, gradients"

    @property
    def ok(self) -> bool:
        return not self.errors

    def check(self) -> None:
        """Raise what is wrong, if anything is."""
        if self.errors:
            raise ShardcError(*self.errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors)) or f"proved: {self.checked}"


def prove_body(body: Graph) -> Proof:
    """Of a step without a pipeline: all ranks run one body, so they reach collectives together, in one order."""
    count = len(collectives_of(body))
    checked = (
        f"{body.mesh.world_size} ranks run one body, in one order: each of its {count} collectives meets its whole "
        "group, and nothing else is sent; types, names and axes are sound"
    )
    return Proof(tuple(Diagnostic("SC522", line, location=f"@{body.name}") for line in violations(body)), checked)


def prove(lists: RankLists) -> Proof:
    unknown = list(_unknown(lists))
    if unknown:  # the other checks look stages and ranks up
        return Proof(tuple(unknown))
    steps = [batches(listed) for listed in lists.ranks]
    met, errors = transfers(steps)
    gathered, wrong = collectives(steps)
    errors += wrong
    if not errors:  # who waits for whom is known only if each knows whom it meets
        errors += deadlock(steps, met + gathered)
    for rank, batched in enumerate(steps):
        errors += _values(lists, rank, batched)
    errors += _work(lists)
    errors += _gradients(lists)
    return Proof(tuple(errors))


_proved: WeakValueDictionary[int, RankLists] = WeakValueDictionary()  # by id, as long as they live


def checked(lists: RankLists) -> None:
    """Raise what is wrong with lists, if anything is. They never change, so the same ones are proved once."""
    if _proved.get(id(lists)) is not lists:
        prove(lists).check()
        _proved[id(lists)] = lists


def _unknown(lists: RankLists) -> Iterator[Diagnostic]:
    """What is named must exist: ranks of peers and groups, stages, microbatches."""
    ranks, stages = len(lists.ranks), len(lists.pipeline.stages)
    for rank, at, i in _instructions(lists):
        if isinstance(i, COMPUTE):
            if not (0 <= i.stage < stages and 0 <= i.microbatch < lists.microbatches):
                yield _wrong("SC525", f"{in_words(i)} is no work of {stages} stages", rank, at)
        elif isinstance(i, TRANSFER):
            if not (0 <= i.peer < ranks and i.peer != rank):
                yield _wrong("SC521", f"{in_words(i)} names a peer that rank {rank} of {ranks} does not have", rank, at)
        elif isinstance(i, Gather):
            gathers = lists.pipeline.stages[i.stage].gathers if 0 <= i.stage < stages else ()
            for name in [name for name in i.values if name not in gathers]:
                yield _wrong("SC525", f"{in_words(i)}: stage {i.stage} gathers no {name}", rank, at)
        elif isinstance(i, COLLECTIVE) and not (
            rank in i.group and set(i.group) <= set(range(ranks)) and len(set(i.group)) == len(i.group)
        ):
            yield _wrong("SC522", f"{in_words(i)} is no group of rank {rank} of {ranks}", rank, at)


# ---------------------------------------------------------------------- what each rank does with values
def _values(lists: RankLists, rank: int, batched: list[list[Instruction]]) -> Iterator[Diagnostic]:
    """Values live from where they are made or received to where they are freed. A batch reads before it receives."""
    live: set[Value] = set()
    gone: set[Value] = set()
    at = 0
    for batch in batched:
        effects = [lists.pipeline.effects(i) for i in batch]
        for offset, (reads, _) in enumerate(effects):
            for value in reads:
                if value not in live:
                    when = "after it is freed" if value in gone else "before it is made"
                    yield _wrong("SC524", f"{in_words(batch[offset])} uses {_name(value)} {when}", rank, at + offset)
                    live.add(value)  # said once
        for offset, (_, makes) in enumerate(effects):
            for value in makes:
                if value in live:
                    message = f"{in_words(batch[offset])} makes {_name(value)}, which is there already"
                    yield _wrong("SC524", message, rank, at + offset)
                live.add(value)
        for i in batch:
            for value in [(name, i.microbatch) for name in i.values] if isinstance(i, Free) else ():
                if value not in live:
                    state = "is freed already" if value in gone else "is not there"
                    yield _wrong("SC524", f"{in_words(i)}: {_name(value)} {state}", rank, at)
                live.discard(value)
                gone.add(value)
        at += len(batch)
    for value in sorted(live, key=str):
        yield _wrong("SC524", f"{_name(value)} is never freed", rank, at)


def _work(lists: RankLists) -> Iterator[Diagnostic]:
    done: Counter[tuple[type[Compute], int, int]] = Counter()
    homes: dict[int, int] = {}
    last: dict[int, int] = {}  # by stage: the microbatch whose forward ran before
    for rank, at, i in _instructions(lists):
        if isinstance(i, Forward) and lists.pipeline.stages[i.stage].ordered:
            if i.microbatch < last.get(i.stage, -1):
                why = "though it starts from the buffers of the microbatch before it"
                yield _wrong("SC525", f"{in_words(i)} runs after #{last[i.stage]}, {why}", rank, at)
            last[i.stage] = i.microbatch
        if isinstance(i, COMPUTE):
            done[type(i), i.stage, i.microbatch] += 1
        if isinstance(i, (*COMPUTE, Gather)) and homes.setdefault(i.stage, rank) != rank:
            yield _wrong("SC525", f"{in_words(i)}: that stage lives on rank {homes[i.stage]}", rank, at)
    for stage in range(len(lists.pipeline.stages)):
        for j in range(lists.microbatches):
            whole = done[Backward, stage, j]
            for kind, times in (
                (Forward, done[Forward, stage, j]),
                (Dgrad, done[Dgrad, stage, j] + whole),
                (Wgrad, done[Wgrad, stage, j] + whole),
            ):
                if times != 1:
                    name = kind.__name__.lower()
                    often = "never runs" if times == 0 else f"runs {times} times"
                    yield Diagnostic("SC525", f"the {name} of stage {stage} for microbatch {j} {often}")


def _gradients(lists: RankLists) -> Iterator[Diagnostic]:
    homes = {work.stage: rank for rank in range(len(lists.ranks)) for work in lists.work(rank)}
    owners: dict[str, set[int]] = {}  # the ranks that accumulate under a name
    for name, stages in lists.pipeline.accumulators.items():
        owners[name] = {homes[stage] for stage in stages if stage in homes}
    for rank, listed in enumerate(lists.ranks):
        summed: dict[str, int] = {}
        last: dict[str, int] = {}
        work = -1
        updates: list[int] = []
        for at, i in enumerate(listed):
            if isinstance(i, COMPUTE):
                work = at
                last.update(dict.fromkeys(lists.pipeline.part(i).accumulates, at))
            elif isinstance(i, ReduceGrads):
                if i.value in summed:
                    yield _wrong("SC526", f"{i.value} is summed again", rank, at)
                if set(i.group) != owners.get(i.value, set()):
                    yield _wrong("SC526", f"{in_words(i)}: those who have {i.value} are others", rank, at)
                summed[i.value] = at
            elif isinstance(i, Optimizer):
                updates.append(at)
                if i.group != (tuple(range(len(lists.ranks))) if lists.pipeline.clips else (rank,)):
                    yield _wrong("SC526", f"{in_words(i)}: the gradients' norm is of another group", rank, at)
        if len(updates) != lists.pipeline.updates:
            yield _wrong("SC526", f"the optimizer runs {len(updates)} times", rank, len(listed))
        for name in sorted(name for name, ranks in owners.items() if rank in ranks):
            if name not in summed:
                yield _wrong("SC526", f"{name} is never summed", rank, len(listed))
            elif summed[name] < last.get(name, -1):
                yield _wrong(
                    "SC526", f"{name} is summed before the last wgrad, which is at {last[name]}", rank, summed[name]
                )
        if updates and updates[0] < max([work, *summed.values()]):
            yield _wrong("SC526", "the optimizer runs before the end of the step", rank, updates[0])


def _instructions(lists: RankLists) -> Iterator[tuple[int, int, Instruction]]:
    return ((rank, at, i) for rank, listed in enumerate(lists.ranks) for at, i in enumerate(listed))


def _wrong(code: str, message: str, rank: int, at: int) -> Diagnostic:
    return Diagnostic(code, message, location=f"rank {rank}, instruction {at}")


def _name(value: Value) -> str:
    name, microbatch = value
    return name if microbatch is None else f"{name}#{microbatch}"
