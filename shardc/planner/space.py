"""The space of the search: every candidate that the ranks, the batch and the model's layers allow.

    mesh            pp x dp_replicate x dp x ep x cp x tp = ranks; pp at most the equal layers, tp at most LONGEST_TP
    microbatches    powers of two of rows, and the whole batch at once
    schedules       1f1b, interleaved with 2, 4 or 8 stages a rank, zb-h1, zb-v
    storage         zero 0, 1 or (of one microbatch) 2, and 3, over all that dp, ep and cp have; or over part of dp
    recomputation   none, selective, full
    sums            of gradients: dtypes that the user leaves to the search; buckets of the hardware's size and larger

`gpipe` holds more than 1f1b and takes as long, `bfs` likewise beside interleaved, dualpipe-v takes no less than zb-v;
`auto` and `greedy` look for an order when a plan is compiled. None of these is tried unless a kept plan says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shardc.planner.candidate import ONE_STAGE, Candidate
from shardc.planner.small_program import Subject
from shardc.schedule import schedules

MOST_ROWS = 1024
LONGEST_TP = 64
LEAST_PART = 128  # of a sequence, on one rank
VIRTUAL = (2, 4, 8)
BUCKETS = (100 * 2**20, 400 * 2**20)  # beside the hardware's own
RECOMPUTED = ("none", "selective", "full")


@dataclass(frozen=True)
class Limits:
    """What is given: ranks, bytes of memory, rows of a step, tokens of a row; and by field what the user pins.

    `reduce` are the dtypes that gradients may be summed in, beside that of the plan.
    """

    gpus: int
    memory: float
    batch: int
    length: int
    pinned: dict[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])
    reduce: tuple[str, ...] = ()

    def allows(self, name: str, value: object) -> bool:
        return name not in self.pinned or value in self.pinned[name]


def candidates(subject: Subject, limits: Limits, *, varied: bool = True) -> Iterator[Candidate]:
    """Every candidate; without `varied`, one for all its `variants`."""
    layers = sum(run.count for run in subject.runs)
    reduce = None if subject.kept.precision is None else subject.kept.precision.reduce
    replicas = int(str(limits.pinned.get("dp_replicate", (1,))[0]))
    for pp, data, ep, cp, tp in _meshes(subject, limits, layers):
        if limits.batch % (data * ep) or data % replicas:
            continue
        dp, sequences = data // replicas, (True, False) if tp > 1 and subject.placements.streams else (False,)
        for rows in _divisors(limits.batch // (data * ep)):
            if rows > MOST_ROWS or (rows & (rows - 1) and rows * data * ep != limits.batch):
                continue
            m = limits.batch // (data * ep * rows)
            for schedule, virtual in _schedules(limits, pp, m, layers):
                for zero in _levels(limits, dp * ep * cp, pp == 1 and m == 1):
                    for recompute in RECOMPUTED:
                        for sequence in sequences:
                            candidate = Candidate(
                                *(pp, dp, ep, cp, tp, sequence, rows, m, schedule, virtual, zero, recompute),
                                reduce,
                                limits.pinned.get("bucket", (True,))[0],  # type: ignore[arg-type]
                                replicas,
                            )
                            if all(limits.allows(name, getattr(candidate, name)) for name in limits.pinned):
                                yield candidate
                                yield from variants(candidate, limits) if varied else ()


def variants(c: Candidate, limits: Limits) -> Iterator[Candidate]:
    """The same work under other ways of storage, which hold no less: over part of dp, in larger buckets, and with
    gradients summed in other dtypes."""
    dp = [c.dp] if not c.zero or "dp" in limits.pinned or "dp_replicate" in limits.pinned else _divisors(c.dp)
    shards = [d for d in dp if d > 1 or d == c.dp]
    alone = c.copies * c.dp_replicate == 1  # then storage sends nothing
    buckets = (c.bucket,) if alone or "bucket" in limits.pinned else (c.bucket, *BUCKETS)
    reduces = dict.fromkeys((c.reduce, *(limits.reduce if c.reduce is not None else ())))
    for shard in shards:
        for bucket in buckets:
            for reduce in reduces:
                if (shard, bucket, reduce) != (c.dp, c.bucket, c.reduce):
                    split = c.dp_replicate * c.dp // shard
                    yield replace(c, dp=shard, dp_replicate=split, bucket=bucket, reduce=reduce)


def _levels(limits: Limits, copies: int, overlap: bool) -> tuple[int, ...]:
    """Levels of storage. 1 and 2 are one program: of a step of one microbatch no rank then holds whole gradients."""
    pinned = limits.pinned.get("zero", ())
    middle = next((int(str(z)) for z in pinned if z in (1, 2)), 2 if overlap else 1)
    return (0, middle, 3) if copies > 1 else (0,)


def _meshes(subject: Subject, limits: Limits, layers: int) -> Iterator[tuple[int, int, int, int, int]]:
    placements = subject.placements
    for tp in _divisors(limits.gpus) if placements.has("tp") else [1]:
        for ep in _divisors(limits.gpus // tp) if placements.has("ep") else [1]:
            for cp in _divisors(limits.gpus // (tp * ep)) if placements.has("cp") else [1]:
                if tp > LONGEST_TP or (cp > 1 and (limits.length % (2 * cp) or limits.length // cp < LEAST_PART)):
                    continue
                for pp in _divisors(limits.gpus // (tp * ep * cp)):
                    if pp == 1 or pp <= layers:
                        yield pp, limits.gpus // (tp * ep * cp * pp), ep, cp, tp


def _schedules(limits: Limits, pp: int, microbatches: int, layers: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [(ONE_STAGE, 1)]
    found = [("1f1b", 1)]
    found += [("interleaved", v) for v in VIRTUAL if pp * v <= layers and microbatches % pp == 0]
    if microbatches >= 2 * pp:  # of fewer, no steady state fills the bubble
        found += [("zb-h1", 1)] + ([("zb-v", 2)] if 2 * pp <= layers else [])
    name = limits.pinned.get("schedule", ("1f1b",))[0]
    if isinstance(name, str) and name in schedules.names() and name not in {schedule for schedule, _ in found}:
        virtual = limits.pinned.get("virtual", (schedules.default_virtual(name),))[0]
        found.append((name, int(str(virtual))))
    return found


def _divisors(count: int) -> Sequence[int]:
    return [d for d in range(1, count + 1) if count % d == 0]
