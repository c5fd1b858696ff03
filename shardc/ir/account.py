"""The account of a graph: what there is of its storages at each action of a rank that runs it, from what to what.

Without overlap each collective is waited for where it begins, as a simulation does, and an action is a call. With it,
actions are those of a rank of a job (`ir.overlap_schedule`, by which its executors run): collectives begin early, hold
their operands until they are waited for, and have buffers of their own (`ir.in_flight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from shardc.ir.buckets import with_buckets
from shardc.ir.call_slots import SlottedCalls, slotted_calls
from shardc.ir.graph import Graph, Port, info
from shardc.ir.in_flight import buffers_of
from shardc.ir.liveness import Life, lives
from shardc.ir.microbatch import sections
from shardc.ir.ops.accumulate import ADDS
from shardc.ir.ops.host_copies import on_host
from shardc.ir.overlap_schedule import Action, Times, schedule_of, times_of
from shardc.ir.small_sums import added_together
from shardc.ir.storages import Storage, storages, unread_bytes


@dataclass(frozen=True)
class Account:
    """`inputs` are the storages of inputs, live throughout; `lives`, in order of birth, count in `times.actions`. What
    lies on the host is among neither, but in `host_inputs` and `host_lives`."""

    calls: Sequence[fx.Node]
    of: dict[fx.Node, Storage]
    times: Times
    inputs: Sequence[tuple[Port, Storage]]
    lives: Sequence[Life]
    added: Mapping[fx.Node, int]  # term of a sum -> when it is added, if a call makes it
    host_inputs: Sequence[tuple[Port, Storage]]
    host_lives: Sequence[Life]

    @classmethod
    def split(
        cls,
        calls: Sequence[fx.Node],
        of: dict[fx.Node, Storage],
        times: Times,
        inputs: Sequence[tuple[Port, Storage]],
        lives: Sequence[Life],
        added: Mapping[fx.Node, int],
    ) -> Account:
        """An account of storages of which some lie on the host."""
        here, there = ([pair for pair in inputs if on_host(pair[1].value) == far] for far in (False, True))
        near, far = ([life for life in lives if on_host(life.storage.value) == far] for far in (False, True))
        return cls(calls, of, times, here, near, added, there, far)

    @property
    def moments(self) -> int:
        return len(self.times.actions)

    def call_at(self, moment: int) -> fx.Node:
        return self.calls[self.times.actions[moment].at]


def account_of(graph: Graph, *, overlap: bool, storage_of: dict[fx.Node, Storage] | None = None) -> Account:
    """With overlap, the terms of a pipeline's sums (outputs of role "sum") are added as soon as they are made,
    small ones together.
    `storage_of` are the storages of the graph, where the caller knows them."""
    run = sections(graph)
    of = with_buckets(graph, storages(graph) if storage_of is None else storage_of, run)
    if not overlap:
        calls = run.in_order(graph)
        order = tuple(range(len(calls)))
        input_storages, call_lives = lives(graph, calls, run, of)
        return Account.split(
            calls,
            of,
            Times(tuple(Action("run", index) for index in order), order, order, order),
            input_storages,
            call_lives,
            {},
        )
    listed = slotted_calls(graph)
    calls = [call.node for call in listed.calls]
    # Of several microbatches the last counts, which finds what the first has gathered.
    actions = [action for action in schedule_of(listed) if action.at not in listed.first]
    actions, added = with_additions(graph, listed, actions)
    times = times_of(actions, len(calls))
    input_storages, call_lives = lives(graph, calls, run, of, times)
    call_lives += buffers_of(graph, times, calls, call_lives)
    unread = unread_bytes(graph)
    for call, now in zip(calls, times.arrived, strict=True):
        if size := unread.get(call, 0):
            phase = info(call).phase
            call_lives.append(Life(Storage(call, size), now, now, phase, phase, False, False))
    call_lives.sort(key=lambda life: life.born)
    return Account.split(calls, of, times, input_storages, call_lives, added)


def with_additions(
    graph: Graph, listed: SlottedCalls, actions: Sequence[Action]
) -> tuple[list[Action], dict[fx.Node, int]]:
    """The actions, with those that add terms to a pipeline's sums, and at which of them each term is added."""
    terms = {v for port, v in zip(graph.outputs, graph.output_values, strict=True) if port.role == "sum"}
    made = [
        [value for value, _, _ in listed.calls[action.at].yields if value in terms]
        if terms and action.kind in ("run", "wait")
        else []
        for action in actions
    ]
    groups = added_together(graph, [value for values in made for value in values])
    behind = {group[-1]: tuple(group) for group in groups}
    waiting = {value for group in groups for value in group[:-1]}
    extended: list[Action] = []
    added: dict[fx.Node, int] = {}
    for action, values in zip(actions, made, strict=True):
        extended.append(action)
        for value in values:
            if value.target in ADDS:
                added[value] = len(extended) - 1  # by the call itself
            elif value not in waiting:
                together = behind.get(value, (value,))
                added |= dict.fromkeys(together, len(extended))
                extended.append(Action("add", action.at, terms=together))
    return extended, added
