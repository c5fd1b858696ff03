"""Overlaps collectives with compute: begun when their operand is available, waited for at the first read of the result.

    %w.gather = all_gather(%w)     ...     %y = linear(%x, %w.gather)
       begin                    other calls           wait, run

A process group runs its collectives on a stream of its own (gloo: in a thread). On a GPU the compute stream waits for
it, not Python. A reduction of gradients begins at its place in the program, and the optimizer waits for it. The result
of a gather is read at once, so a gather is prefetched: it begins up to `AHEAD` collectives early. At most `IN_FLIGHT`
are in flight, since each holds its operand and its result; before one more begins, the oldest is waited for.

The order depends on the body alone, so it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch

from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps
from shardc.ir.ops.context import current
from shardc.runtime.execute.instructions import CallInstruction
from shardc.runtime.execute.process_groups import PendingResult

AHEAD = 8
IN_FLIGHT = 8


class AsyncCommunicator(Protocol):
    """A communicator that can begin an exchange and wait for it later."""

    def begin(self, exchange: Exchange) -> PendingResult: ...


class Action(NamedTuple):
    """An action on instruction `at`, which then frees the slots `free`. The result of "begin" is a `PendingResult`."""

    kind: Literal["run", "begin", "wait", "free"]
    at: int
    free: tuple[int, ...] = ()


def schedule_overlap(instructions: Sequence[CallInstruction], first: int, last: int) -> list[Action]:
    """The actions for the instructions from `first` up to `last`, with begin and wait of collectives separated."""
    producer_of = {slot: index for index in range(first, last) for _, _, slot in instructions[index].yields}
    begins: dict[int, list[int]] = {}
    early_collectives: list[int] = []
    for index in range(first, last):
        if _overlaps(instructions[index]):
            ready = max((producer_of.get(slot, first - 1) + 1 for slot in instructions[index].reads), default=first)
            begins.setdefault(
                max(ready, early_collectives[-AHEAD] if len(early_collectives) >= AHEAD else first), []
            ).append(index)
            early_collectives.append(index)
    actions: list[Action] = []
    under_way: dict[int, int] = {}  # the slot of a result that has not arrived -> its collective; oldest first

    def wait(slot: int) -> None:
        actions.append(Action("wait", under_way.pop(slot)))

    def read(index: int) -> None:
        for slot in instructions[index].reads:
            if slot in under_way:
                wait(slot)

    begun: set[int] = set()
    for index in range(first, last):
        for collective in begins.get(index, ()):
            read(collective)
            if len(under_way) == IN_FLIGHT:
                wait(next(iter(under_way)))
            begun.add(collective)
            actions.append(Action("begin", collective, instructions[collective].free if collective == index else ()))
            under_way[_result(instructions[collective])] = collective
        if index not in begun:
            read(index)
            actions.append(Action("run", index, instructions[index].free))
        elif index not in begins.get(index, ()) and instructions[index].free:
            # It began early, but what it read may have been read by others since.
            actions.append(Action("free", index, instructions[index].free))
    for slot in list(under_way):
        wait(slot)
    return actions


def begin(steps: Callable[..., Steps], *args: Any) -> PendingResult:
    """Run a collective up to its exchange. The returned function waits and completes it."""
    generator = steps(*args)
    arrival = cast(AsyncCommunicator, current().comm).begin(next(generator))

    def wait() -> torch.Tensor:
        try:
            generator.send(arrival())
        except StopIteration as done:
            result: torch.Tensor = done.value
            return result
        raise AssertionError("a collective meets its group once")

    return wait


def _overlaps(instruction: CallInstruction) -> bool:
    return (
        instruction.target in COLLECTIVES
        and len(instruction.yields) == 1
        and _result(instruction) not in instruction.free
    )


def _result(instruction: CallInstruction) -> int:
    return instruction.yields[0][2]
