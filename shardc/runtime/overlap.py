"""Collectives beside compute: begun when their operand is there, waited for where their result is first read.

    %w.gather = all_gather(%w)     ...     %y = linear(%x, %w.gather)
       begin                    other calls           wait, run

What a process group is given runs on a stream of its own (over gloo, in a thread), and on a GPU it is the stream of
compute that waits for it, not Python. A reduction of gradients begins where the program has it and is waited for by the
optimizer; a gather is read at once, and so begins up to `AHEAD` collectives early. At most `IN_FLIGHT` are under way,
since each holds its operand and its result: before one more begins, the oldest is waited for.

All of this is read off the body, so the order is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch

from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps
from shardc.ir.ops.context import current
from shardc.runtime.groups import Arrival
from shardc.runtime.instructions import Instruction

AHEAD = 8
IN_FLIGHT = 8


class Begins(Protocol):
    """A communicator whose exchanges need not be waited for at once."""

    def begin(self, exchange: Exchange) -> Arrival: ...


class Action(NamedTuple):
    """What is done about instruction `at`; slots `free` are let go of then. The result of "begin" is an `Arrival`."""

    kind: Literal["run", "begin", "wait", "free"]
    at: int
    free: tuple[int, ...] = ()


def arranged(instructions: Sequence[Instruction], first: int, last: int) -> list[Action]:
    """The instructions from `first` up to `last` in order, the waits of their collectives apart."""
    made = {slot: at for at in range(first, last) for _, _, slot in instructions[at].yields}
    begins: dict[int, list[int]] = {}
    moves: list[int] = []
    for at in range(first, last):
        if _overlaps(instructions[at]):
            ready = max((made.get(slot, first - 1) + 1 for slot in instructions[at].reads), default=first)
            begins.setdefault(max(ready, moves[-AHEAD] if len(moves) >= AHEAD else first), []).append(at)
            moves.append(at)
    actions: list[Action] = []
    under_way: dict[int, int] = {}  # the slot of a result that has not arrived -> its collective; oldest first

    def wait(slot: int) -> None:
        actions.append(Action("wait", under_way.pop(slot)))

    def read(at: int) -> None:
        for slot in instructions[at].reads:
            if slot in under_way:
                wait(slot)

    begun: set[int] = set()
    for at in range(first, last):
        for one in begins.get(at, ()):
            read(one)
            if len(under_way) == IN_FLIGHT:
                wait(next(iter(under_way)))
            begun.add(one)
            actions.append(Action("begin", one, instructions[one].free if one == at else ()))
            under_way[_result(instructions[one])] = one
        if at not in begun:
            read(at)
            actions.append(Action("run", at, instructions[at].free))
        elif at not in begins.get(at, ()) and instructions[at].free:
            # It began early, but what it read may have been read by others since.
            actions.append(Action("free", at, instructions[at].free))
    for slot in list(under_way):
        wait(slot)
    return actions


def begin(steps: Callable[..., Steps], *args: Any) -> Arrival:
    """A collective up to where the ranks meet; what is returned does the rest."""
    generator = steps(*args)
    arrival = cast(Begins, current().comm).begin(next(generator))

    def finish() -> torch.Tensor:
        try:
            generator.send(arrival())
        except StopIteration as done:
            result: torch.Tensor = done.value
            return result
        raise AssertionError("a collective meets its group once")

    return finish


def _overlaps(one: Instruction) -> bool:
    return one.target in COLLECTIVES and len(one.yields) == 1 and _result(one) not in one.free


def _result(one: Instruction) -> int:
    return one.yields[0][2]
