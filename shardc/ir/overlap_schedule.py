"""When a rank begins its collectives and when it waits for them: the order in which it runs, frees and waits.

    %w.gather = all_gather(%w)     ...     %y = linear(%x, %w.gather)
       begin                    other calls           wait, run

A reduction of gradients begins at its place in the program, and the optimizer waits for it. The result of a gather is
read at once, so a gather is prefetched: it begins up to `AHEAD` collectives early. At most `IN_FLIGHT` are in flight,
since each holds its operand and its result; before one more begins, the oldest is waited for.

A reduction of gradients (`sums_gradients`) runs over a process group of its own where other collectives run along the
same axes: what comes after it does not wait behind it.

The order depends on the body alone, so it is the same on every rank. Executors run by it (`runtime.execute`), and the
memory report counts by it (`cost.memory`).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import fx

from shardc.ir.call_slots import CallSlots, SlottedCalls
from shardc.ir.graph import info
from shardc.ir.ops.buckets import UNPACK
from shardc.ir.ops.collectives import COLLECTIVES, all_reduce, reduce_scatter
from shardc.ir.ops.decomposed import DECOMPOSED

AHEAD = 8
IN_FLIGHT = 8
# What is no reader of a gradient, but makes what the optimizer reads.
PASS_ON = frozenset(
    (
        *(operator.getitem, UNPACK, torch.ops.aten.view.default, torch.ops.aten.transpose.int),
        *(torch.ops.aten.permute.default, torch.ops.aten._to_copy.default),
    )
)


class Action(NamedTuple):
    """An action on call `at`, which then frees the slots `free`. The result of "begin" is a `PendingResult`.

    "add" is a pipeline's alone: `terms`, of which the call makes the last, are added to their sums, by one call.
    """

    kind: Literal["run", "begin", "wait", "free", "add"]
    at: int
    free: tuple[int, ...] = ()
    terms: tuple[fx.Node, ...] = ()


def schedule_overlap(calls: Sequence[CallSlots], first: int, last: int) -> list[Action]:
    """The actions for the calls from `first` up to `last`, with begin and wait of collectives separated."""
    producer_of = {slot: index for index in range(first, last) for _, _, slot in calls[index].yields}
    readers: dict[int, list[int]] = {}
    for index in range(first, last):
        for slot in calls[index].reads:
            readers.setdefault(slot, []).append(index)

    def ready(index: int, slot: int) -> int:
        """Where a collective may begin, for one operand. What a collective brings is waited for there, so a step of a
        ring begins where others read what the step before has brought, or at its own place."""
        source = producer_of.get(slot)
        if source is None:
            return first
        others = [reader for reader in readers[slot] if not _overlaps(calls[reader])]
        return min(index, others[0]) if _overlaps(calls[source]) and others else source + 1

    begins: dict[int, list[int]] = {}
    for index, earliest in earliest_places(calls, first, last).items():
        begins.setdefault(max([earliest, *(ready(index, slot) for slot in calls[index].reads)]), []).append(index)
    actions: list[Action] = []
    under_way: dict[int, int] = {}  # the slot of a result that has not arrived -> its collective; oldest first

    def wait(slot: int) -> None:
        actions.append(Action("wait", under_way.pop(slot)))

    def read(index: int) -> None:
        for slot in calls[index].reads:
            if slot in under_way:
                wait(slot)

    begun: set[int] = set()
    for index in range(first, last):
        for collective in begins.get(index, ()):
            read(collective)
            if len(under_way) == IN_FLIGHT:
                wait(next(iter(under_way)))
            begun.add(collective)
            actions.append(Action("begin", collective, calls[collective].free if collective == index else ()))
            under_way[_result(calls[collective])] = collective
        if index not in begun:
            read(index)
            actions.append(Action("run", index, calls[index].free))
        elif index not in begins.get(index, ()) and calls[index].free:
            # It began early, but what it read may have been read by others since.
            actions.append(Action("free", index, calls[index].free))
    for slot in list(under_way):
        wait(slot)
    return actions


def earliest_places(calls: Sequence[CallSlots], first: int, last: int) -> dict[int, int]:
    """By each collective of the calls from `first` up to `last`, the call before which it may begin if its operand is
    there."""
    places: dict[int, int] = {}
    earlier: list[int] = []
    for index in range(first, last):
        if _overlaps(calls[index]):
            places[index] = earlier[-AHEAD] if len(earlier) >= AHEAD else first
            earlier.append(index)
    return places


def schedule_of(listed: SlottedCalls) -> list[Action]:
    """The actions of a whole graph: those before its microbatches, those of one, and those of the step."""
    return [action for part in listed.sections for action in schedule_overlap(listed.calls, part.start, part.stop)]


def sums_gradients(node: fx.Node) -> bool:
    """Is this a reduction whose result nothing reads before the optimizer, or the end of the step?"""
    if node.target not in (all_reduce, reduce_scatter):
        return False
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if user.target in PASS_ON:
                todo.append(user)
            elif user.op != "output" and info(user).phase != "opt":
                return False
    return True


@dataclass(frozen=True)
class Times:
    """For each call the index of the action at which it begins, its results arrive, and its operands are released."""

    actions: tuple[Action, ...]
    begun: tuple[int, ...]
    arrived: tuple[int, ...]
    read: tuple[int, ...]

    @property
    def end(self) -> int:
        return len(self.actions)


def times_of(actions: Sequence[Action], calls: int) -> Times:
    """A collective holds its operands until it is waited for, and their slots until its place in the program."""
    begun, arrived, read = ([0] * calls for _ in range(3))
    for now, action in enumerate(actions):
        if action.kind != "add":
            read[action.at] = now
        if action.kind in ("run", "begin"):
            begun[action.at] = now
        if action.kind in ("run", "wait"):
            arrived[action.at] = now
    return Times(tuple(actions), tuple(begun), tuple(arrived), tuple(read))


def _overlaps(call: CallSlots) -> bool:
    """Whether a call is a collective that others run beside: one that is decomposed has its own product beside it."""
    begins = call.node.target in COLLECTIVES and call.node.target not in DECOMPOSED
    return begins and len(call.yields) == 1 and _result(call) not in call.free


def _result(call: CallSlots) -> int:
    return call.yields[0][2]
