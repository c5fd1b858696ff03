"""Do all ranks run the same job? Compared through its store, before the first group is made and anything can hang.

    a round    each rank takes a number; as many as there are ranks make a round, which has a name of its own. A round
               that a rank gave up is broken: who takes a number of it later takes another
    facts      text by name: versions, plan, program, seed, ...; each rank leaves their hashes, and reads everyone's
    agreed     a rank goes on when all have read and found the same, so that none goes on alone
    differing  where a hash differs, ranks leave the text, and each raises the same error (SC541), which quotes the
               first line that differs

Of several answers the right one is taken to be the most frequent; of equally frequent ones, the lowest rank's.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import Diagnostic, ShardcError, error
from shardc.ir.program import PlanRecord
from shardc.ir.version import VERSION

SHOWN = 160  # characters of a line in a message
READING = timedelta(seconds=10)  # that the ranks that differ wait for one another, so that each can say why it ends
HINTS = {
    "version of shardc": "install the same version of shardc on every machine",
    "version of torch": "install the same version of torch on every machine",
    "version of Python": "start every rank with the same Python",
    "device": "give every rank the same kind of device, or pass launch(device=...)",
    "program": "compile the same model, loss and optimizer on every rank: nothing of them may depend on the rank",
    "plan": "compile with the same plan, mesh and sample batch on every rank",
    "learning rates": "give every rank's optimizer the same learning rates",
    "random seed": "launch every rank with the same seed, or leave it to the plan",
    "checks": "pass the same check_every to launch on every rank",
}


def facts_of(plan: PlanRecord, rates: Mapping[str, torch.Tensor], seed: int, check_every: int) -> dict[str, str]:
    """What the ranks of a job must have in common, beside the program itself. Why there are kernels may differ: one
    rank's model lies on its own GPU, another's on the meta device."""
    options = {key: value for key, value in plan.items() if key not in ("text", "rates", "state", "fused_on")}
    return {
        "version of shardc": VERSION,
        "version of torch": torch.__version__,
        "version of Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "plan": "\n".join([str(plan.get("text", "")), *(f"{k}: {v}" for k, v in sorted(options.items()))]),
        "learning rates": ", ".join(f"{name}={float(rate)!r}" for name, rate in rates.items()),
        "random seed": str(seed),
        "checks": str(check_every),
    }


def agree(store: Any, rank: int, world: int, facts: Mapping[str, str], limit: timedelta) -> str:
    """Return where every rank has the same facts: a name for this launch, which no other launch of the job has.

    Every rank must call it. What the ranks leave in the store from then on belongs under that name: a store outlives a
    launch, and so does what an earlier one left there, addresses of its group among it.

    Raises ShardcError: SC541 names the ranks whose facts are others than most ranks', SC543 the ranks that did not come
    within the limit, or the end of the process that holds the store.
    """
    with _reached():
        meeting = _round(store, world)
        try:
            _agree(store, meeting, rank, world, facts, limit)
        except BaseException:  # an interruption too: the rank may launch again
            with suppress(dist.DistError):  # the store may be gone
                store.set(f"{meeting}/broken", "")
            raise
    return meeting


def _round(store: Any, world: int) -> str:
    """The name of the round that this rank is part of."""
    while True:
        meeting = f"launch/{(store.add('launches', 1) - 1) // world}"
        if not store.check([f"{meeting}/broken"]):
            return meeting


def _agree(store: Any, meeting: str, rank: int, world: int, facts: Mapping[str, str], limit: timedelta) -> None:
    if world == 1:
        return
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in facts.items()}
    answers = _exchanged(store, f"{meeting}/hashes", rank, world, hashes, limit)
    names = dict.fromkeys(name for answer in answers for name in answer)
    differing = [name for name in names if len({answer.get(name, "") for answer in answers}) > 1]
    if not differing:
        if store.add(f"{meeting}/agreed", 1) == world:
            store.set(f"{meeting}/all", "")
        try:
            store.wait([f"{meeting}/all"], limit)
        except dist.DistStoreError as failure:
            raise absent([], limit) from failure
        return
    texts = _exchanged(store, f"{meeting}/texts", rank, world, {n: facts.get(n, "") for n in differing}, limit)
    _await_readers(store, f"{meeting}/read", rank, world)
    raise ShardcError(*(_differs(name, [answer.get(name, "") for answer in texts]) for name in differing))


def sides(answers: Sequence[Any]) -> tuple[int, dict[Any, list[int]]]:
    """A rank of the majority, and by every other answer the ranks that gave it."""
    groups: dict[Any, list[int]] = {}
    for rank, answer in enumerate(answers):
        groups.setdefault(answer, []).append(rank)
    largest = max(groups.values(), key=len)  # the first of the longest
    return largest[0], {answer: ranks for answer, ranks in groups.items() if ranks is not largest}


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2, 5`, `ranks 8, 9, 10, 11 and 60 more`."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def absent(ranks: Sequence[int], limit: timedelta) -> ShardcError:
    """The error where ranks did not come to the launch."""
    ranks_named = f"{ranks_text(ranks)} of the job" if ranks else "some ranks of the job"
    message = f"{ranks_named} did not come to the launch within {limit.total_seconds():g} seconds"
    hint = "look for their last output: did they fail, or are they still compiling? then launch with a larger timeout"
    return error("SC543", message, hint=hint)


def _exchanged(
    store: Any, topic: str, rank: int, world: int, answer: Mapping[str, str], limit: timedelta
) -> list[dict[str, str]]:
    """Every rank's answer on a topic."""
    keys = [f"{topic}/{other}" for other in range(world)]
    store.set(keys[rank], json.dumps(dict(answer)))
    try:
        store.wait(keys, limit)
    except dist.DistStoreError as failure:
        raise absent([other for other, key in enumerate(keys) if not store.check([key])], limit) from failure
    return [json.loads(store.get(key)) for key in keys]


@contextmanager
def _reached() -> Generator[None]:
    """Raise ShardcError (SC543) where the store is gone."""
    try:
        yield
    except dist.DistNetworkError as failure:
        message = "the process that holds the job's store ended while this rank was at the launch"
        hint = "look for the last output of rank 0, or of the agent that started it: what ended it, it says itself"
        raise error("SC543", message, hint=hint) from failure


def _await_readers(store: Any, topic: str, rank: int, world: int) -> None:
    """Wait until every rank has read all answers: the store ends with the process that holds it."""
    keys = [f"{topic}/{other}" for other in range(world)]
    with suppress(dist.DistError):  # a rank that is gone has read it, or needs it no more
        store.set(keys[rank], "")
        store.wait(keys, READING)


def _differs(name: str, texts: Sequence[str]) -> Diagnostic:
    majority, others = sides(texts)
    different = sorted(rank for ranks in others.values() for rank in ranks)
    has = "has" if len(different) == 1 else "have"
    message = (
        f"{ranks_text(different)} {has} {'other' if name.endswith('s') else 'another'} {name} than rank {majority}"
    )
    lines = [
        line for text, ranks in others.items() for line in _first_difference(texts[majority], majority, text, ranks[0])
    ]
    return Diagnostic("SC541", message, cause="\n".join(lines), hint=HINTS.get(name))


def _first_difference(majority_text: str, rank: int, other_text: str, different: int) -> list[str]:
    for line, (a, b) in enumerate(zip_longest(majority_text.split("\n"), other_text.split("\n"))):
        if a != b:
            place = f", line {line + 1}" if "\n" in majority_text + other_text else ""
            return [f"rank {rank}{place}: {_window(a, b)}", f"rank {different}{place}: {_window(b, a)}"]
    return []


def _window(line: str | None, other: str | None) -> str:
    """A line, or of a long one the part around where the other one begins to differ."""
    if line is None:
        return "(ends before it)"
    line, start = line.strip(), 0
    if len(line) > SHOWN:
        same = next((i for i, (a, b) in enumerate(zip(line, (other or "").strip(), strict=False)) if a != b), 0)
        start = max(0, min(same - SHOWN // 2, len(line) - SHOWN))
    return ("..." if start else "") + line[start : start + SHOWN] + ("..." if start + SHOWN < len(line) else "")
