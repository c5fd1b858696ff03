"""The search: all candidates of a number of ranks are priced, and the promising ones by compiled layers.

1  every factorisation of the ranks into pp, dp, ep, cp and tp, with the microbatches, schedules, storage levels and
   recomputation that it allows
2  one small program for each (tp, cp, ep): one row, nothing recomputed
3  every candidate is priced by what follows from that: rows as they scale on one rank, recomputation as forward run
   again; HOPE makes it err on the fast side
4  the fastest that fits is taken up, and the layers as it places them are compiled; all candidates with these
   layers are priced anew. Until the fastest has compiled layers, and is faster than SLACK of all others that are
   not compiled
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from shardc.ir.diagnostic import ShardcError, error
from shardc.planner.candidate import ONE_STAGE, Candidate
from shardc.planner.inner import Inner
from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.small_program import Subject
from shardc.planner.step_costs import Estimate, estimate

SLACK = 0.02
FAR = 1.3
MOST_ROWS = 1024
LONGEST_TP = 64
LEAST_PART = 128  # of a sequence, on one rank
VIRTUAL = (2, 4, 8)


@dataclass(frozen=True)
class Limits:
    """What is given: ranks, bytes of memory, rows of a step, tokens of a row; and by field what the user pins."""

    gpus: int
    memory: float
    batch: int
    length: int
    pinned: dict[str, tuple[object, ...]] = field(default_factory=dict[str, tuple[object, ...]])

    def allows(self, name: str, value: object) -> bool:
        return name not in self.pinned or value in self.pinned[name]


@dataclass(frozen=True)
class Priced:
    """A candidate and its estimate; a `guess`, where its layers were not compiled as it places them."""

    candidate: Candidate
    estimate: Estimate
    guess: bool = False

    @property
    def seconds(self) -> float:
        return self.estimate.seconds


@dataclass
class Outcome:
    """`priced` are those whose layers were compiled, `guessed` the rest; `refused` says what could not be compiled."""

    priced: list[Priced]
    guessed: list[Priced]
    refused: dict[Inner, ShardcError]
    compiles: int = 0
    far: int = 0  # candidates that cannot come near the best, by their work and their bubble alone

    def fitting(self, memory: float) -> list[Priced]:
        return sorted((p for p in self.priced if p.estimate.memory.total <= memory), key=lambda p: p.seconds)


def search(subject: Subject, limits: Limits, top: int = 1) -> Outcome:
    """Price all candidates, until so many kinds that fit have compiled layers.

    Raises ShardcError where the model compiles for no rank alone.
    """
    base = {rows: _compiled(subject, rows) for rows in (1, 4)}
    groups: dict[Inner, list[Candidate]] = defaultdict(list)
    for candidate in candidates(subject, limits):
        groups[candidate.inner].append(candidate)
    outcome = Outcome([], [], {})
    priced: dict[Inner, list[Priced]] = {}
    guesses: list[tuple[float, int, Inner]] = []
    best = math.inf
    for number, (inner, members) in enumerate(groups.items()):
        first = subject.costs(replace(inner, rows=1, recompute="none", sequence=_streams(subject, inner)))
        if isinstance(first, ShardcError):
            outcome.refused[inner] = first
            continue
        costs = derived(first, inner, base)
        work = _work(costs.total())
        near = [c for c in members if least_seconds(c, work) <= best * FAR]
        outcome.far += len(members) - len(near)
        priced[inner] = _priced(subject, near, costs, guess=True)
        fastest = _best(priced[inner], limits.memory)
        best = min(best, fastest)
        heapq.heappush(guesses, (fastest, number, inner))
    best, meshes = math.inf, set[object]()
    while guesses and guesses[0][0] < math.inf:
        if guesses[0][0] > best * (1 + SLACK) and len(meshes) >= top:
            break
        _, _, inner = heapq.heappop(guesses)
        costs = subject.costs(inner)
        if isinstance(costs, ShardcError):
            outcome.refused[inner] = costs
            continue
        compiled = _priced(subject, [p.candidate for p in priced[inner]], costs)
        outcome.priced += compiled
        best = min(best, _best(compiled, limits.memory))
        meshes |= {kind_of(p.candidate) for p in compiled if p.estimate.memory.total <= limits.memory}
    outcome.guessed = [p for _, _, inner in guesses for p in priced[inner]]
    outcome.compiles = subject.compiles
    return outcome


def _priced(subject: Subject, members: Sequence[Candidate], costs: LayerCosts, guess: bool = False) -> list[Priced]:
    return [Priced(c, estimate(c, costs, subject.hardware, subject.numbers), guess) for c in members]


def _best(priced: Sequence[Priced], memory: float) -> float:
    return min((p.seconds for p in priced if p.estimate.memory.total <= memory), default=math.inf)


def kind_of(c: Candidate) -> object:
    """What a ranking tells apart: the mesh, the level of storage, what is recomputed."""
    return c.mesh, c.zero, c.recompute


def least_seconds(c: Candidate, work: float) -> float:
    """What a candidate's work and its pipeline's bubble take, given the seconds of a microbatch on one rank."""
    return work * (c.microbatches + (c.pp - 1) / c.virtual) / c.pp


def _work(part: Part) -> float:
    return part.forward + part.backward


def _streams(subject: Subject, inner: Inner) -> bool:
    return inner.tp > 1 and subject.placements.streams


def _compiled(subject: Subject, rows: int) -> LayerCosts:
    costs = subject.costs(Inner(rows=rows))
    if not isinstance(costs, ShardcError):
        return costs
    if 2 in subject.traces and 1 not in subject.traces:
        hint = "pass a batch that runs with a single row too: for a batch norm, images that are not down to one place"
        raise error(
            "SC251", "the model runs on two rows, but not on one, by which layers are priced", hint=hint
        ) from costs
    raise costs


def derived(costs: LayerCosts, inner: Inner, base: Mapping[int, LayerCosts]) -> LayerCosts:
    """What layers may cost, by the program of one row that recomputes nothing: rows as they scale on one rank."""
    step = (inner.rows - 1) / 3

    def grown(part: Part, one: Part, four: Part) -> Part:
        def scale(name: str) -> float:
            first, later = getattr(one, name), getattr(four, name)
            return 1 + step * (later / first - 1) if first else float(inner.rows)

        forward = part.forward * scale("forward") * HOPE
        backward = part.backward * scale("backward") * HOPE
        kept = part.kept * scale("kept")
        if inner.recompute == "full":
            backward, kept = backward + 0.7 * forward, min(kept, part.boundary * inner.rows)
        elif inner.recompute == "selective":
            backward, kept = backward + 0.05 * forward, 0.4 * kept
        return replace(
            part,
            forward=forward,
            backward=backward,
            sent=part.sent * inner.rows,
            kept=kept,
            transient=0.8 * part.transient * scale("transient"),
            boundary=part.boundary * inner.rows,
            flops=part.flops * inner.rows,
        )

    runs = tuple(
        (grown(part, one, four), count)
        for (part, count), (one, _), (four, _) in zip(costs.runs, base[1].runs, base[4].runs, strict=True)
    )
    sent = {axis: seconds * inner.rows for axis, seconds in costs.collectives.items()}
    edges = [grown(getattr(costs, e), getattr(base[1], e), getattr(base[4], e)) for e in ("entry", "exit")]
    return LayerCosts(edges[0], edges[1], runs, sent)


HOPE = 0.97  # of the seconds that follow


def candidates(subject: Subject, limits: Limits) -> Iterator[Candidate]:
    """Every candidate that the ranks, the batch and the model's layers allow."""
    layers = sum(run.count for run in subject.runs)
    reduce = None if subject.kept.precision is None else subject.kept.precision.reduce
    for pp, dp, ep, cp, tp in _meshes(subject, limits, layers):
        if limits.batch % (dp * ep):
            continue
        for rows in _divisors(limits.batch // (dp * ep)):
            if rows > MOST_ROWS or (rows & (rows - 1) and rows * dp * ep != limits.batch):
                continue
            m = limits.batch // (dp * ep * rows)
            for schedule, virtual in _schedules(pp, m, layers):
                for zero in (0, 1, 3) if dp * ep * cp > 1 else (0,):
                    for recompute in ("none", "selective", "full"):
                        for sequence in (True, False) if tp > 1 and subject.placements.streams else (False,):
                            candidate = Candidate(
                                *(pp, dp, ep, cp, tp, sequence, rows, m, schedule, virtual, zero, recompute),
                                reduce,
                                dp * ep * cp > 1,
                            )
                            if all(limits.allows(name, getattr(candidate, name)) for name in limits.pinned):
                                yield candidate


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


def _schedules(pp: int, microbatches: int, layers: int) -> list[tuple[str, int]]:
    if pp == 1:
        return [(ONE_STAGE, 1)]
    virtual = [("interleaved", v) for v in VIRTUAL if pp * v <= layers and microbatches % pp == 0]
    return [("1f1b", 1), *virtual]


def _divisors(count: int) -> Sequence[int]:
    return [d for d in range(1, count + 1) if count % d == 0]
