"""The two parts of a stage's backward, by reachability: what the stages before wait for, and the rest.

    dgrad    every call that a gradient which leaves the stage is made of
    wgrad    the other calls of backward: they make sums over microbatches, and nothing that another stage reads

Every call is in one of them, so that nothing runs twice; what wgrad reads of dgrad is kept for it. Where no gradient
leaves, as in the first stage, all is wgrad.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from shardc.ir.graph import operands, producer
from shardc.stages.anatomy import values_of


def split_backward(calls: Sequence[fx.Node], leaves: Callable[[fx.Node], bool]) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls of dgrad and of wgrad, each in order, given a stage's backward in order and which values leave it."""
    own = set(calls)
    needed: set[fx.Node] = set()
    for call in reversed(calls):
        if call in needed or any(map(leaves, values_of(call))):
            needed.add(call)
            needed.update(made for v in operands(call) if (made := producer(v)[0]) in own)
    return [call for call in calls if call in needed], [call for call in calls if call not in needed]
