"""Splits a stage's backward in two by reachability: dgrad, which earlier stages wait for, and wgrad.

    dgrad    every call that a gradient which leaves the stage depends on
    wgrad    the other calls of backward: they make sums over microbatches, which no other stage reads

Every call is in exactly one part, so nothing runs twice. Values of dgrad that wgrad reads are kept for it. Where no
gradient leaves, as in the first stage, all calls are in wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from shardc.ir.graph import operands, producer
from shardc.partition.step_analysis import result_values


def split_backward(
    calls: Sequence[fx.Node], leaves_stage: Callable[[fx.Node], bool]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls of dgrad and of wgrad, each in order, given a stage's backward in order and which values leave it."""
    backward_calls = set(calls)
    dgrad_calls: set[fx.Node] = set()
    for call in reversed(calls):
        if call in dgrad_calls or any(map(leaves_stage, result_values(call))):
            dgrad_calls.add(call)
            dgrad_calls.update(source for v in operands(call) if (source := producer(v)[0]) in backward_calls)
    return [call for call in calls if call in dgrad_calls], [call for call in calls if call not in dgrad_calls]
