"""The proof that instruction lists are correct on every rank, whatever the timing.

The abstract machine of the proof is the strictest possible runtime: **blocking rendezvous**. A rank executes its list
step by step. A batch of transfers is posted as a whole. It completes when each of its transfers has met its
counterpart, in the order of the channel (source, destination), in a batch that is posted. A collective completes when
its whole group has reached it. Only then does the rank continue. Buffering, several streams and early posting can only
remove waits, so lists that cannot deadlock on this machine cannot deadlock on a real one.

Gathers and the collectives within parts run along other axes and wait for no other list: all ranks of a coordinate run
the same list, and so reach them together, in one order.

What is proved (one function and one code for each check):
    SC521  every send has one receive of the same value, in the order of its channel      (wait_graph.py)
    SC522  every collective is reached by exactly its group, in the same order
    SC523  no cycle of waits; otherwise the smallest cycle is reported
    SC524  no value is used before it is made or after it is freed, made twice, or never freed
    SC525  every stage runs on one rank, and runs each microbatch's forward, dgrad and wgrad once, ordered where needed;
           of a program for evaluation the forward alone
    SC526  gradients are reduced once, after the last wgrad, by all ranks that have terms; the optimizer runs last
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

from shardc.ir.attention_parts import broken_parts
from shardc.ir.attention_rings import broken_rings
from shardc.ir.collectives import collectives as collectives_of
from shardc.ir.diagnostic import Diagnostic, ShardcError
from shardc.ir.graph import Graph
from shardc.ir.verify import violations
from shardc.schedule.instructions import (
    COLLECTIVE,
    COMPUTE,
    STAGE_WORK,
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
    RunBody,
    Wgrad,
    instruction_text,
)
from shardc.schedule.lists import RankLists, split_batches
from shardc.schedule.pipeline import ValueKey
from shardc.schedule.wait_graph import find_deadlock, match_collectives, match_transfers


@dataclass(frozen=True)
class Proof:
    """The errors of a proof, and the properties that it checked."""

    errors: tuple[Diagnostic, ...]
    checked: str = "transfers, collectives, waits, values, work, gradients"

    @property
    def ok(self) -> bool:
        return not self.errors

    def check(self) -> None:
        """Raise the errors, if there are any."""
        if self.errors:
            raise ShardcError(*self.errors)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors)) or f"proved: {self.checked}"


def prove_body(body: Graph) -> Proof:
    """The proof of a step without a pipeline: all ranks run one body, so they reach collectives in the same order."""
    count = len(collectives_of(body))
    checked = (
        f"{body.mesh.world_size} ranks run one body, in one order: each of its {count} collectives meets its whole "
        "group, and nothing else is sent; types, names and axes are sound, and rings of attention whole"
    )
    broken = violations(body) or [*broken_rings(body), *broken_parts(body)]
    return Proof(tuple(Diagnostic("SC522", line, location=f"@{body.name}") for line in broken), checked)


def prove(lists: RankLists) -> Proof:
    unknown_references = list(_unknown_references(lists))
    if unknown_references:  # the other checks index stages and ranks
        return Proof(tuple(unknown_references))
    steps = [split_batches(instructions) for instructions in lists.ranks]
    transfer_meetings, errors = match_transfers(steps)
    collective_meetings, collective_errors = match_collectives(steps)
    errors += collective_errors
    if not errors:  # the wait graph needs every transfer and collective to be matched
        errors += find_deadlock(steps, transfer_meetings + collective_meetings)
    for rank, batched in enumerate(steps):
        errors += _values(lists, rank, batched)
    errors += _work(lists)
    errors += _gradients(lists)
    return Proof(tuple(errors))


_proved: WeakValueDictionary[int, RankLists] = WeakValueDictionary()  # by id, as long as they live


def require_proved(lists: RankLists) -> None:
    """Raise the errors of lists, if there are any. Lists are immutable, so each object is proved only once."""
    if _proved.get(id(lists)) is not lists:
        prove(lists).check()
        _proved[id(lists)] = lists


def _unknown_references(lists: RankLists) -> Iterator[Diagnostic]:
    """Everything that an instruction names must exist: peers, members of groups, stages, microbatches."""
    ranks, stages = len(lists.ranks), len(lists.pipeline.stages)
    for rank, position, i in _instructions(lists):
        if isinstance(i, COMPUTE):
            if not (0 <= i.stage < stages and 0 <= i.microbatch < lists.microbatches):
                yield _diagnostic_at("SC525", f"{instruction_text(i)} is no work of {stages} stages", rank, position)
        elif isinstance(i, TRANSFER):
            if not (0 <= i.peer < ranks and i.peer != rank):
                yield _diagnostic_at(
                    "SC521",
                    f"{instruction_text(i)} names a peer that rank {rank} of {ranks} does not have",
                    rank,
                    position,
                )
        elif isinstance(i, Gather):
            gathers = lists.pipeline.stages[i.stage].gathers if 0 <= i.stage < stages else ()
            for name in [name for name in i.values if name not in gathers]:
                yield _diagnostic_at(
                    "SC525", f"{instruction_text(i)}: stage {i.stage} gathers no {name}", rank, position
                )
        elif isinstance(i, COLLECTIVE) and not (
            rank in i.group and set(i.group) <= set(range(ranks)) and len(set(i.group)) == len(i.group)
        ):
            yield _diagnostic_at(
                "SC522", f"{instruction_text(i)} is no group of rank {rank} of {ranks}", rank, position
            )


# ---------------------------------------------------------------------- values, work and gradients of each rank
def _values(lists: RankLists, rank: int, batched: list[list[Instruction]]) -> Iterator[Diagnostic]:
    """A value is live from where it is made or received to where it is freed. A batch reads before it receives."""
    live: set[ValueKey] = set()
    freed: set[ValueKey] = set()
    position = 0
    for batch in batched:
        effects = [lists.pipeline.effects(i) for i in batch]
        for offset, (reads, _) in enumerate(effects):
            for value in reads:
                if value not in live:
                    when = "after it is freed" if value in freed else "before it is made"
                    yield _diagnostic_at(
                        "SC524",
                        f"{instruction_text(batch[offset])} uses {_value_text(value)} {when}",
                        rank,
                        position + offset,
                    )
                    live.add(value)  # reported once
        for offset, (_, makes) in enumerate(effects):
            for value in makes:
                if value in live:
                    message = f"{instruction_text(batch[offset])} makes {_value_text(value)}, which is there already"
                    yield _diagnostic_at("SC524", message, rank, position + offset)
                live.add(value)
        for i in batch:
            for value in [(name, i.microbatch) for name in i.values] if isinstance(i, Free) else ():
                if value not in live:
                    state = "is freed already" if value in freed else "is not there"
                    yield _diagnostic_at(
                        "SC524", f"{instruction_text(i)}: {_value_text(value)} {state}", rank, position
                    )
                live.discard(value)
                freed.add(value)
        position += len(batch)
    for value in sorted(live, key=str):
        yield _diagnostic_at("SC524", f"{_value_text(value)} is never freed", rank, position)


def _work(lists: RankLists) -> Iterator[Diagnostic]:
    run_counts: Counter[tuple[type[Compute], int, int]] = Counter()
    rank_of: dict[int, int] = {}
    last_forward: dict[int, int] = {}  # by stage: the microbatch whose forward ran before
    for rank, position, i in _instructions(lists):
        if isinstance(i, Forward) and lists.pipeline.stages[i.stage].ordered:
            if i.microbatch < last_forward.get(i.stage, -1):
                why = "though it starts from the buffers of the microbatch before it"
                yield _diagnostic_at(
                    "SC525", f"{instruction_text(i)} runs after #{last_forward[i.stage]}, {why}", rank, position
                )
            last_forward[i.stage] = i.microbatch
        if isinstance(i, COMPUTE):
            run_counts[type(i), i.stage, i.microbatch] += 1
        elif isinstance(i, RunBody):
            run_counts.update((kind, i.stage, j) for kind in (Forward, Backward) for j in range(lists.microbatches))
        if isinstance(i, (*STAGE_WORK, Gather)) and rank_of.setdefault(i.stage, rank) != rank:
            yield _diagnostic_at(
                "SC525", f"{instruction_text(i)}: that stage lives on rank {rank_of[i.stage]}", rank, position
            )
    for stage in range(len(lists.pipeline.stages)):
        for j in range(lists.microbatches):
            whole_backwards = run_counts[Backward, stage, j]
            for kind, times in (
                (Forward, run_counts[Forward, stage, j]),
                (Dgrad, run_counts[Dgrad, stage, j] + whole_backwards),
                (Wgrad, run_counts[Wgrad, stage, j] + whole_backwards),
            ):
                if times != (kind is Forward or lists.pipeline.trains):
                    name = kind.__name__.lower()
                    how_often = "never runs" if times == 0 else f"runs {times} times"
                    how_often += "" if lists.pipeline.trains else " in a program for evaluation"
                    yield Diagnostic("SC525", f"the {name} of stage {stage} for microbatch {j} {how_often}")


def _gradients(lists: RankLists) -> Iterator[Diagnostic]:
    rank_of = {last_work.stage: rank for rank in range(len(lists.ranks)) for last_work in lists.work(rank)}
    owners: dict[str, set[int]] = {}  # the ranks that accumulate under a name
    for name, stages in lists.pipeline.accumulators.items():
        owners[name] = {rank_of[stage] for stage in stages if stage in rank_of}
    for rank, instructions in enumerate(lists.ranks):
        summed: dict[str, int] = {}
        last_accumulation: dict[str, int] = {}
        work = -1
        updates: list[int] = []
        for position, i in enumerate(instructions):
            if isinstance(i, COMPUTE):
                work = position
                last_accumulation.update(dict.fromkeys(lists.pipeline.part(i).accumulates, position))
            elif isinstance(i, ReduceGrads):
                if i.value in summed:
                    yield _diagnostic_at("SC526", f"{i.value} is summed again", rank, position)
                if set(i.group) != owners.get(i.value, set()):
                    yield _diagnostic_at(
                        "SC526", f"{instruction_text(i)}: those who have {i.value} are others", rank, position
                    )
                summed[i.value] = position
            elif isinstance(i, Optimizer):
                updates.append(position)
                if i.group != (tuple(range(len(lists.ranks))) if lists.pipeline.clips else (rank,)):
                    yield _diagnostic_at(
                        "SC526", f"{instruction_text(i)}: the gradients' norm is of another group", rank, position
                    )
        if len(updates) != lists.pipeline.updates:
            yield _diagnostic_at("SC526", f"the optimizer runs {len(updates)} times", rank, len(instructions))
        for name in sorted(name for name, ranks in owners.items() if rank in ranks):
            if name not in summed:
                yield _diagnostic_at("SC526", f"{name} is never summed", rank, len(instructions))
            elif summed[name] < last_accumulation.get(name, -1):
                yield _diagnostic_at(
                    "SC526",
                    f"{name} is summed before the last wgrad, which is at {last_accumulation[name]}",
                    rank,
                    summed[name],
                )
        if updates and updates[0] < max([work, *summed.values()]):
            yield _diagnostic_at("SC526", "the optimizer runs before the end of the step", rank, updates[0])


def _instructions(lists: RankLists) -> Iterator[tuple[int, int, Instruction]]:
    return (
        (rank, position, i) for rank, instructions in enumerate(lists.ranks) for position, i in enumerate(instructions)
    )


def _diagnostic_at(code: str, message: str, rank: int, position: int) -> Diagnostic:
    return Diagnostic(code, message, location=f"rank {rank}, instruction {position}")


def _value_text(value: ValueKey) -> str:
    name, microbatch = value
    return name if microbatch is None else f"{name}#{microbatch}"
