"""What activations are live when, in a graph that is not localized yet, for any order of its calls.

A view holds the storage of what it views, so bytes are counted by storage, each one once: from the call that makes
it to the last call that reads it or a view of it. Which results are views is read off the ops' schemas; `cost.storages`
knows it to the byte, but only of a localized body.

    x = mm(a, b)      made here                       32 KiB
    t = transpose(x)  the same storage                 0
    y = add(t, 1)     x dies after this, if t does    32 KiB
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of
from shardc.ir.microbatch import before_microbatches
from shardc.ir.schema import schema_of


@lru_cache(maxsize=4096)
def is_view(op: Any) -> bool:
    """Do the results of an op share the storage of its first operand?"""
    if op is torch.ops.aten._unsafe_view.default:  # a view that its schema does not own up to
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(op).returns)


def owners(graph: Graph) -> dict[fx.Node, fx.Node]:
    """For each value, the value for which its storage was allocated."""
    owner: dict[fx.Node, fx.Node] = {n: n for n in graph.placeholders}
    for call in graph.calls():
        viewed = operands(call)[:1] if is_view(call.target) else []
        for value in results(call):
            if value is not None:
                owner[value] = owner[viewed[0]] if viewed else value
    return owner


def kept_anyway(graph: Graph, owner: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """Storages that no choice of ours frees: inputs, what the optimizer reads (gradients), what outputs hold, and casts
    of weights that all microbatches read."""
    updates = (v for call in graph.calls() if info(call).phase == "opt" for v in operands(call))
    early = (v for call in before_microbatches(graph) for v in results(call) if v is not None)
    return {*graph.placeholders, *(owner[v] for v in (*graph.output_values, *updates, *early))}


def activation_bytes(graph: Graph, owner: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, int]:
    """Bytes on one rank of each storage that forward and backward allocate for themselves."""
    storages = {v for v in owner.values() if info(v).phase != "opt"} - kept_anyway(graph, owner)
    return {v: type_of(v).local_bytes(graph.mesh) for v in storages}


@dataclass(frozen=True)
class Step:
    """One call of a schedule: the storages that it reads and makes, by any key."""

    reads: Sequence[Hashable]
    makes: Sequence[Hashable]


def live_bytes(steps: Sequence[Step], size: Mapping[Hashable, int]) -> list[int]:
    """Bytes held during each step, operands and results included. Storages without a size do not count."""
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for index, step in enumerate(steps):
        for key in step.makes:
            first.setdefault(key, index)
            last[key] = index
        for key in step.reads:
            last[key] = index
    change = [0] * (len(steps) + 1)
    for key, index in first.items():
        change[index] += size.get(key, 0)
        change[last[key] + 1] -= size.get(key, 0)
    return list(accumulate(change))[:-1]
