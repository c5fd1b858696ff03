"""Breaks instruction lists, or tries to: drop, duplicate, swap, move, retarget; counts what the proof says to it."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from shardc.schedule.build import build
from shardc.schedule.instructions import Free, Gather, Instruction, Optimizer, Recv, ReduceGrads, Send
from shardc.schedule.lists import RankLists
from shardc.schedule.prove import prove
from tests.schedule.oracle import broken, homes_of
from tests.schedule.pipelines import PIPELINES

KINDS = ("drop", "duplicate", "swap", "neighbours", "move", "retarget")
BASES = [
    ("gpipe", 3, 1, 2, "plain"),
    ("1f1b", 3, 1, 4, "tied"),
    ("1f1b", 2, 1, 3, "skipping"),
    ("interleaved", 2, 2, 3, "sharded"),
    ("bfs", 2, 2, 2, "skipping"),
    ("zb-h1", 3, 1, 3, "skipping"),
    ("zb-h1", 2, 1, 2, "tied"),
    ("zb-v", 2, 2, 3, "tied"),
    ("zb-v", 1, 2, 2, "sharded"),
    ("dualpipe-v", 2, 2, 4, "plain"),
    ("auto", 3, 2, 3, "skipping"),
]


@dataclass
class Tally:
    """Mutants by kind: those that a symbolic run finds broken and those that it finds whole, as the proof has them."""

    refused: Counter[str] = field(default_factory=Counter[str])  # broken, and refused
    missed: Counter[str] = field(default_factory=Counter[str])  # broken, and accepted
    accepted: Counter[str] = field(default_factory=Counter[str])  # whole, and accepted
    wronged: Counter[str] = field(default_factory=Counter[str])  # whole, and refused
    codes: Counter[str] = field(default_factory=Counter[str])
    first: str = ""  # of those that the proof gets wrong


def judged(each: int, seed: int = 20260) -> Tally:
    """The proof against a symbolic run, on so many mutants of each kind and base."""
    rng, found = random.Random(seed), Tally()
    for name, p, v, m, model in BASES:
        lists = build(PIPELINES[model](p * v), name, m, v)
        homes = homes_of(lists)
        for kind in KINDS:
            for number in range(each):
                changed = mutant(lists, kind, rng)
                if number % 4 == 0:  # two faults may hide each other
                    changed = mutant(changed, kind, rng)
                why, proof = broken(changed, homes, seed=number), prove(changed)
                right, wrong = (found.refused, found.missed) if why else (found.accepted, found.wronged)
                (right if proof.ok == (why is None) else wrong)[kind] += 1
                if proof.ok != (why is None):
                    said = f"{kind} of {name} on {model}: {why or 'works'}, but the proof says: {proof}\n{changed}"
                    found.first = found.first or said
                found.codes.update({error.code for error in proof.errors})
    return found


def mutant(lists: RankLists, kind: str, rng: random.Random) -> RankLists:
    """The lists with one change of a kind."""
    rank = rng.choice([rank for rank, listed in enumerate(lists.ranks) if len(listed) > 1])
    listed = list(lists.ranks[rank])
    at = rng.randrange(len(listed))
    match kind:
        case "drop":
            del listed[at]
        case "duplicate":
            listed.insert(rng.choice([at, rng.randrange(len(listed))]), listed[at])
        case "swap":
            other = rng.randrange(len(listed))
            listed[at], listed[other] = listed[other], listed[at]
        case "neighbours":
            at = max(at, 1)
            listed[at - 1], listed[at] = listed[at], listed[at - 1]
        case "move":
            listed.insert(rng.randrange(len(listed)), listed.pop(at))
        case _:
            listed[at] = retargeted(listed[at], lists, rng)
    ranks = (*lists.ranks[:rank], tuple(listed), *lists.ranks[rank + 1 :])
    return replace(lists, ranks=ranks)


def retargeted(i: Instruction, lists: RankLists, rng: random.Random) -> Instruction:
    """The instruction with one field changed: to another peer, microbatch, stage, value or group."""
    ranks = range(-1, len(lists.ranks) + 1)
    microbatch = rng.randrange(-1, lists.microbatches + 1)
    names = sorted(lists.pipeline.producers)
    match i:
        case Send() | Recv():
            changes = [{"peer": rng.choice(ranks)}, {"microbatch": microbatch}, {"value": rng.choice(names)}]
            changes.append({"bytes": i.bytes + rng.choice([-1, 1])})
        case Gather():
            names = sorted(lists.pipeline.gather_stages)
            changes = [{"stage": rng.randrange(-1, len(lists.pipeline.stages) + 1)}, {"values": (rng.choice(names),)}]
        case ReduceGrads():
            changes = [{"group": group(lists, rng)}, {"value": rng.choice(sorted(lists.pipeline.accumulators))}]
        case Optimizer():
            changes = [{"group": group(lists, rng)}]
        case Free():
            some = tuple(name for name in i.values if rng.random() < 0.5)
            changes = [{"microbatch": microbatch}, {"values": some}, {"values": (rng.choice(names), *i.values[1:])}]
        case _:
            changes = [{"microbatch": microbatch}, {"stage": rng.randrange(-1, len(lists.pipeline.stages) + 1)}]
    return replace(i, **rng.choice(changes))


def group(lists: RankLists, rng: random.Random) -> tuple[int, ...]:
    return tuple(rank for rank in range(len(lists.ranks) + 1) if rng.random() < 0.5)
