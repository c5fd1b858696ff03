"""Runs instruction lists on symbols, and compares what comes out with the model run straight: knows nothing of proofs.

The machine is the strictest that lists are made for (rendezvous, blocking; see shardc/schedule/prove.py). Values are
hashes of how they were computed, so whatever goes wrong shows in the gradients, the losses or the update; or a rank
reads what is not there, or has no room for what arrives, or nobody can move.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from shardc.schedule.instructions import (
    Backward,
    Dgrad,
    Forward,
    Free,
    Gather,
    Instruction,
    Optimizer,
    Recv,
    ReduceGrads,
    Send,
    Wgrad,
)
from shardc.schedule.lists import RankLists
from shardc.schedule.pipeline import StagePart

Homes = dict[int, int]  # the rank that has a stage's parameters


class Broken(Exception):
    """The lists do not do what the model does."""


def homes_of(lists: RankLists) -> Homes:
    return {i.stage: rank for rank, listed in enumerate(lists.ranks) for i in listed if isinstance(i, Forward)}


def broken(lists: RankLists, homes: Homes, seed: int, interleavings: int = 3) -> str | None:
    """What is wrong with lists, or None. Any interleaving must tell the same."""
    found = [_attempt(lists, homes, random.Random(seed + n)) for n in range(interleavings)]
    assert len({why is None for why in found}) == 1, f"it depends on timing: {found}"
    return found[0]


def _attempt(lists: RankLists, homes: Homes, rng: random.Random) -> str | None:
    try:
        machine = Machine(lists, homes)
        machine.run(rng)
        machine.compare()
    except Broken as why:
        return str(why)
    return None


class Rank:
    def __init__(self, listed: tuple[Instruction, ...]) -> None:
        self.listed = listed
        self.at = 0
        self.values: dict[tuple[str, int | None], Any] = {}
        self.grads: dict[str, list[Any]] = defaultdict(list)
        self.summed: dict[str, list[Counter[Any]]] = defaultdict(list)
        self.results: Counter[Any] = Counter()
        self.updates: list[Any] = []
        self.waiting = 0  # transfers of the batch that is posted and not met yet
        self.posted = False

    def get(self, name: str, microbatch: int | None) -> Any:
        if (name, microbatch) not in self.values:
            raise Broken(f"no {name}#{microbatch}")
        return self.values[name, microbatch]

    def put(self, name: str, microbatch: int | None, term: Any) -> None:
        if (name, microbatch) in self.values:
            raise Broken(f"no room for {name}#{microbatch}")
        self.values[name, microbatch] = term

    def batch(self) -> Iterator[Instruction]:
        """The transfers that stand side by side from here on."""
        for i in self.listed[self.at :]:
            if not isinstance(i, Send | Recv):
                return
            yield i


class Machine:
    def __init__(self, lists: RankLists, homes: Homes) -> None:
        self.lists, self.homes, self.pipeline = lists, homes, lists.pipeline
        self.ranks = [Rank(listed) for listed in lists.ranks]
        self.sends: dict[tuple[int, int], list[tuple[Send, Any]]] = defaultdict(list)
        self.receives: dict[tuple[int, int], list[Recv]] = defaultdict(list)
        self.made = {name for stage in self.pipeline.stages for part in _parts(stage) for name in part.makes}

    def run(self, rng: random.Random) -> None:
        alive = [rank for rank, state in enumerate(self.ranks) if state.listed]
        while alive:
            rng.shuffle(alive)
            moved = [rank for rank in alive[: rng.randint(1, len(alive))] if self.step(rank)]
            moved = moved or [rank for rank in alive if self.step(rank)]
            if not moved:
                raise Broken("nobody can move")
            alive = [rank for rank in alive if self.ranks[rank].at < len(self.ranks[rank].listed)]

    def step(self, rank: int) -> bool:
        """Whether a rank got anywhere."""
        state = self.ranks[rank]
        if state.at == len(state.listed):
            return False
        i = state.listed[state.at]
        if isinstance(i, Send | Recv):
            return self.transfer(rank, state)
        if isinstance(i, ReduceGrads | Optimizer):
            return self.collective(rank, i)
        if isinstance(i, Gather):
            if self.homes.get(i.stage) != rank or not set(i.values) <= set(self.pipeline.stages[i.stage].gathers):
                raise Broken(f"{i} is not for rank {rank}")
            for name in i.values:
                state.put(name, None, ("gathered", len(state.updates)))
        elif isinstance(i, Free):
            for name in i.values:
                state.get(name, i.microbatch)
                del state.values[name, i.microbatch]
        else:
            self.compute(rank, state, i)
        state.at += 1
        return True

    # ---------------------------------------------------------------------- work
    def compute(self, rank: int, state: Rank, i: Forward | Backward | Dgrad | Wgrad) -> None:
        if self.homes.get(i.stage) != rank or not 0 <= i.microbatch < self.lists.microbatches:
            raise Broken(f"{i} cannot run on rank {rank}")
        stage = self.pipeline.stages[i.stage]
        for name in self.pipeline.part(i).reads:
            if name in stage.gathers and state.get(name, None) != ("gathered", len(state.updates)):
                raise Broken(f"stale {name}")
        scope: dict[str, Any] = {}

        def run(kind: str, part: StagePart) -> None:
            reads = tuple(
                scope[name]
                if name in scope
                else state.get(name, i.microbatch)
                if name in self.made
                else batch_term(name, i)
                for name in part.reads
            )
            term = hash((kind, i.stage, len(state.updates), reads))
            scope.update({name: hash((name, term)) for name in part.makes})
            for name in part.accumulates:
                state.grads[name].append(hash((name, term)))
            state.results.update((name, term) for name in part.results)

        match i:
            case Forward():
                run("forward", stage.forward)
            case Dgrad():
                run("dgrad", stage.dgrad)
            case Wgrad():
                run("wgrad", stage.wgrad)
            case Backward():
                run("dgrad", stage.dgrad)
                run("wgrad", stage.wgrad)
        for name in self.pipeline.part(i).makes:
            state.put(name, i.microbatch, scope[name])

    # ---------------------------------------------------------------------- communication
    def transfer(self, rank: int, state: Rank) -> bool:
        """Post the batch once; leave it when all of it has met."""
        if not state.posted:
            posted = list(state.batch())
            for i in posted:
                if not 0 <= i.peer < len(self.ranks) or i.peer == rank:
                    raise Broken(f"{i} on rank {rank}: no such peer")
            for i in posted:
                if isinstance(i, Send):
                    self.sends[rank, i.peer].append((i, state.get(i.value, i.microbatch)))
                else:
                    self.receives[i.peer, rank].append(i)
            state.posted, state.waiting = True, len(posted)
            self.meet()
            return True
        if state.waiting:
            return False
        state.at += len(list(state.batch()))
        state.posted = False
        return True

    def meet(self) -> None:
        for (source, to), sends in self.sends.items():
            receives = self.receives[source, to]
            while sends and receives:
                (sent, term), received = sends.pop(0), receives.pop(0)
                if sent.bytes != received.bytes:
                    raise Broken("a buffer of another size")
                self.ranks[to].put(received.value, received.microbatch, term)
                self.ranks[source].waiting -= 1
                self.ranks[to].waiting -= 1

    def collective(self, rank: int, i: ReduceGrads | Optimizer) -> bool:
        """The last to come does it for all."""
        if rank not in i.group or not set(i.group) <= set(range(len(self.ranks))):
            raise Broken(f"{i} is not for rank {rank}")
        members = [self.ranks[member] for member in i.group]
        here = [m.listed[m.at] if m.at < len(m.listed) else None for m in members]
        if any(getattr(other, "group", None) != i.group for other in here):
            return False
        if any(other != i for other in here):
            raise Broken(f"{here} meet")
        if isinstance(i, ReduceGrads):
            total = Counter(term for m in members for term in m.grads[i.value])
            for m in members:
                m.summed[i.value].append(total)
        else:
            for m in members:
                m.updates.append((i.group, _frozen(m)))
        for m in members:
            m.at += 1
        return True

    # ---------------------------------------------------------------------- what should come out
    def compare(self) -> None:
        grads, results = self.straight()
        for rank, state in enumerate(self.ranks):
            own = [stage for stage, home in self.homes.items() if home == rank]
            names = {n for stage in own for part in _parts(self.pipeline.stages[stage]) for n in part.accumulates}
            if state.values:
                raise Broken(f"left behind: {list(state.values)[:3]}")
            if {name: [grads[name]] for name in names} != dict(state.summed):
                raise Broken("wrong gradients")
            group = tuple(range(len(self.ranks))) if self.pipeline.clips else (rank,)
            if state.updates != ([(group, _frozen(state))] if self.pipeline.updates else []):
                raise Broken("wrong update")
        if sum((state.results for state in self.ranks), Counter()) != results:
            raise Broken("wrong results")

    def straight(self) -> tuple[dict[str, Counter[Any]], Counter[Any]]:
        """Gradients and results of the model, a microbatch at a time, on one device."""
        grads: dict[str, Counter[Any]] = defaultdict(Counter)
        results: Counter[Any] = Counter()
        stages = list(enumerate(self.pipeline.stages))
        for j in range(self.lists.microbatches):
            values: dict[str, Any] = {}
            parts = [(s, "forward", stage.forward) for s, stage in stages]
            for s, stage in reversed(stages):
                parts += [(s, "dgrad", stage.dgrad), (s, "wgrad", stage.wgrad)]
            for s, kind, part in parts:
                reads = tuple(values[n] if n in self.made else batch_term(n, Forward(s, j)) for n in part.reads)
                term = hash((kind, s, 0, reads))
                values.update({name: hash((name, term)) for name in part.makes})
                for name in part.accumulates:
                    grads[name][hash((name, term))] += 1
                results.update((name, term) for name in part.results)
        return grads, results


def batch_term(name: str, i: Forward | Backward | Dgrad | Wgrad) -> Any:
    return "batch", name, i.microbatch


def _parts(stage: Any) -> tuple[StagePart, StagePart, StagePart]:
    return stage.forward, stage.dgrad, stage.wgrad


def _frozen(state: Rank) -> Any:
    return {name: list(totals) for name, totals in state.summed.items()}
