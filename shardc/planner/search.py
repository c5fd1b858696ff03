"""The search: all candidates of a number of ranks are priced, and the promising ones by compiled layers.

1  every factorisation of the ranks into pp, dp, ep, cp and tp, with the microbatches, schedules, storage levels and
   recomputation that it allows (`space`)
2  one small program for each (tp, cp, ep): one row, nothing recomputed
3  every candidate is priced by what follows from that: rows as they scale on one rank, recomputation as forward run
   again; HOPE makes it err on the fast side
4  the fastest that fits is taken up, and the layers as it places them are compiled; all candidates with these
   layers are priced anew. Until the fastest has compiled layers, and is faster than SLACK of all others that are
   not compiled
5  hybrid storage, larger buckets and other dtypes of sums change only what storage sends, and hold more: they are
   priced for those candidates that would be the fastest if they sent nothing for storage
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.hardware import Hardware
from shardc.planner.candidate import Candidate
from shardc.planner.inner import Inner
from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.small_program import Subject
from shardc.planner.space import Limits, candidates, variants
from shardc.planner.step_costs import Estimate, estimate

SLACK = 0.02
FAR = 1.3
HOPE = 0.97  # of the seconds that follow


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
    for candidate in candidates(subject, limits, varied=False):
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
        work = _least_work(costs.total(), subject.hardware)
        near = [c for c in members if least_seconds(c, work) <= best * FAR]
        outcome.far += len(members) - len(near)
        priced[inner] = _priced(subject, near, costs, guess=True)
        fastest = min(
            best_of(priced[inner], limits.memory),
            best_of(_varied(subject, limits, priced[inner], costs), limits.memory),
        )
        best = min(best, fastest)
        heapq.heappush(guesses, (fastest, number, inner))
    best, meshes, fastest_of = math.inf, set[object](), dict[Inner, float]()
    while guesses and guesses[0][0] < math.inf:
        if guesses[0][0] > best * (1 + SLACK) and len(meshes) >= top:
            break
        guess, number, inner = heapq.heappop(guesses)
        # Without sequence parallelism as much is sent, and more is computed.
        if (twin := fastest_of.get(replace(inner, sequence=True), 0.0)) > guess and not inner.sequence:
            heapq.heappush(guesses, (twin, number, inner))
            continue
        costs = subject.costs(inner)
        if isinstance(costs, ShardcError):
            outcome.refused[inner] = costs
            continue
        compiled = _priced(subject, [p.candidate for p in priced[inner]], costs)
        compiled += _varied(subject, limits, compiled, costs, best)
        outcome.priced += compiled
        fastest_of[inner] = best_of(compiled, limits.memory)
        best = min(best, fastest_of[inner])
        meshes |= {kind_of(p.candidate) for p in compiled if p.estimate.memory.total <= limits.memory}
    outcome.guessed = [p for _, _, inner in guesses for p in priced[inner]]
    outcome.compiles = subject.compiles
    return outcome


def _priced(subject: Subject, members: Sequence[Candidate], costs: LayerCosts, guess: bool = False) -> list[Priced]:
    return [Priced(c, estimate(c, costs, subject.hardware, subject.numbers), guess) for c in members]


def _varied(
    subject: Subject, limits: Limits, priced: Sequence[Priced], costs: LayerCosts, best: float = math.inf
) -> list[Priced]:
    """Other ways of storage of those that fit, and that might be the fastest if they sent nothing for it."""
    best = min(best, best_of(priced, limits.memory))
    varied: list[Candidate] = []
    for p in priced:
        c, e = p.candidate, p.estimate
        least = e.seconds - e.data - e.gathered * (1 + (c.pp - 1) / c.microbatches)
        if e.memory.total <= limits.memory and least <= best * (1 + SLACK):
            varied += variants(c, limits)
    return _priced(subject, varied, costs, any(p.guess for p in priced))


def best_of(priced: Sequence[Priced], memory: float) -> float:
    return min((p.seconds for p in priced if p.estimate.memory.total <= memory), default=math.inf)


def kind_of(c: Candidate) -> object:
    """What a ranking tells apart: the mesh, the level of storage, what is recomputed."""
    return c.pp, c.dp_replicate * c.dp, c.ep, c.cp, c.tp, c.zero, c.recompute


def least_seconds(c: Candidate, work: float) -> float:
    """What a candidate's work and its pipeline's bubble take, given the seconds of a microbatch on one rank."""
    bubble = 0.0 if c.schedule.startswith("zb") else (c.pp - 1) / c.virtual
    return work * (c.microbatches + bubble) / c.pp


def _least_work(part: Part, hardware: Hardware) -> float:
    """Seconds of a microbatch, its products as fast as power lets them be."""
    return part.seconds - (1 - 1 / hardware.tables.power.most) * part.products


def _streams(subject: Subject, inner: Inner) -> bool:
    return inner.tp > 1 and subject.placements.streams


def _compiled(subject: Subject, rows: int) -> LayerCosts:
    costs = subject.costs(Inner(rows=rows))
    if not isinstance(costs, ShardcError):
        return costs
    if len(subject.traces) > 0 and 1 not in subject.traces:
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
        products, kept = part.products * scale("products") * HOPE, part.kept * scale("kept")
        if inner.recompute == "full":
            backward, kept = backward + 0.7 * forward, min(kept, part.boundary * inner.rows)
            products *= 1.2
        elif inner.recompute == "selective":
            backward, kept = backward + 0.05 * forward, 0.4 * kept
        return replace(
            part,
            forward=forward,
            backward=backward,
            sent=part.sent * inner.rows,
            products=products,
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
