"""Which values share a storage, and what is live when.

A view holds the storage of what it views: saving a transpose saves the matrix. Bytes are therefore counted by
storage, each one once, from the call that makes it to the last call that reads it or a view of it:

    x = mm(a, b)      made here                       32 KiB
    t = transpose(x)  the same storage                 0
    y = add(t, 1)     x dies after this, if t does    32 KiB

Inputs and what the outputs hold are no activations: they outlive the step anyway.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.schema import schema_of


@lru_cache(maxsize=4096)
def is_view(op: Any) -> bool:
    """Do the results of an op share the storage of its first operand?"""
    if op is torch.ops.aten._unsafe_view.default:  # a view that its schema does not own up to
        return True
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(op).returns)


def owners(graph: Graph) -> dict[fx.Node, fx.Node]:
    """For each value, the one that its storage was made for."""
    found: dict[fx.Node, fx.Node] = {n: n for n in graph.placeholders}
    for call in graph.calls():
        viewed = operands(call)[:1] if is_view(call.target) else []
        for value in results(call):
            if value is not None:
                found[value] = found[viewed[0]] if viewed else value
    return found


@dataclass(frozen=True)
class Step:
    """One call of a schedule: the storages that it reads and makes, by any key."""

    reads: Sequence[Hashable]
    makes: Sequence[Hashable]


def profile(steps: Sequence[Step], size: Mapping[Hashable, int]) -> list[int]:
    """Live bytes during each step. Storages without a size do not count; what a step makes and nobody reads dies."""
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    for at, step in enumerate(steps):
        for key in step.makes:
            first.setdefault(key, at)
            last[key] = at
        for key in step.reads:
            last[key] = at
    change = [0] * (len(steps) + 1)
    for key, at in first.items():
        bytes = size.get(key, 0)
        change[at] += bytes
        change[last[key] + 1] -= bytes
    return list(accumulate(change))[:-1]


def activation_bytes(graph: Graph) -> list[int]:
    """Bytes of activations that one rank holds during each call of a graph."""
    owner = owners(graph)
    lasting = kept_forever(graph, owner)
    size = {v: type_of(v).local_bytes(graph.mesh) for v in set(owner.values()) - lasting}
    return profile([step_of(call, owner) for call in graph.calls()], size)


def peak(graph: Graph) -> int:
    """The most bytes of activations that one rank holds at a time."""
    return max(activation_bytes(graph), default=0)


def kept_forever(graph: Graph, owner: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The storages that live whatever the schedule does: inputs, and those that outputs hold."""
    return {*graph.placeholders, *(owner[v] for v in graph.output_values)}


def step_of(call: fx.Node, owner: Mapping[fx.Node, fx.Node]) -> Step:
    return Step(_keys(operands(call), owner), _keys((v for v in results(call) if v is not None), owner))


def _keys(values: Iterable[fx.Node], owner: Mapping[fx.Node, fx.Node]) -> list[Hashable]:
    return [owner[v] for v in values]
