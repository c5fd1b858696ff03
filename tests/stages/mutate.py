"""Breaks instruction lists, or tries to: drop, duplicate, swap, move, retarget."""

import random
from dataclasses import replace

from shardc.stages.instructions import Free, Gather, Instruction, Optimizer, Recv, ReduceGrads, Send
from shardc.stages.lists import RankLists

KINDS = ("drop", "duplicate", "swap", "neighbours", "move", "retarget")


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
    names = sorted(lists.pipeline.makers)
    match i:
        case Send() | Recv():
            changes = [{"peer": rng.choice(ranks)}, {"microbatch": microbatch}, {"value": rng.choice(names)}]
            changes.append({"bytes": i.bytes + rng.choice([-1, 1])})
        case Gather() | ReduceGrads():
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
