"""merge_keys: how attention runs whose keys lie over axes that its rows do not: a cache, a long memory, few queries.

    all_gather      each rank is sent the other ranks' keys and values, and computes the same as they do
    merge           each rank has the softmax over its own keys, and ranks add these up, weighed by their log-sums

    cross-attention of 64 rows to 8192 keys over 4 ranks, both of 1 KiB a row:
        all_gather  2 (n-1)/n 8192 KiB = 12 MiB     merge  2 (n-1)/n 64 KiB = 96 KiB, and a quarter of the products

`merge` makes `sdpa_keys` of the call, whose result is a pending sum over the axes: what else is done with it,
`settle_partials` decides, as of a product's. In backward the gradient of the queries is one, and keys and values have
theirs where they lie. Sums are in float32: a call on halves is followed by a cast, behind the sum.

Where rows lie over the axes too, and not as keys do, as in a decoder whose own sequence is sharded, `merge` sends rows,
and their results are reduce-scattered: it is one more strategy beside those of `divide_attention`.

Needs the wishes of `propagate`. Ensures: forward and backward of a call say alike how they run. `chosen` is what was
chosen for each layer, and what each way costs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.graph import Graph, info, results, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_keys import SDPA_KEYS, SDPA_KEYS_BWD
from shardc.ir.ops.attention_sums import wide
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, TensorType
from shardc.passes.base import Pass
from shardc.passes.context.attention_times import BACKWARD
from shardc.passes.context.divide_attention import Cost, Divided, Strategy, Ways, nothing_divided

aten = torch.ops.aten
Keys = Literal["auto", "all_gather", "merge"]


@dataclass(frozen=True)
class MergeKeys(Pass):
    """Choose, call by call. `axes` are those that `keys` is said of; none: whichever shard keys and not rows.
    `strategy` is what is said of rows that lie over axes."""

    axes: Axes = ()
    keys: Keys = "auto"
    strategy: Strategy = "auto"
    hardware: Hardware = DEFAULT
    chosen: list[Divided] = field(default_factory=list[Divided], compare=False)

    def run(self, graph: Graph) -> Graph:
        self.chosen.clear()
        for node in [node for node in graph.calls() if node.target is SDPA]:
            axes = _axes(node)
            if not axes or (self.axes and not {*axes} <= {*graph.mesh.resolve(self.axes)}):
                continue
            call = _Call(graph, node, axes, self.hardware)
            if call.rows and self.keys != "merge" and (self.keys != "auto" or self.strategy != "auto"):
                continue  # as `divide_attention` is told
            costs = call.costs()
            best = min((cost for cost in costs if not cost.why), key=lambda cost: (cost.waits, cost.sent))
            if self.keys != "auto":
                best = next(cost for cost in costs if cost.strategy == self.keys)
            if best.strategy == "merge":
                call.take()
            elif call.rows:
                continue
            self.chosen.append(Divided(info(node).fqn, ".".join(graph.mesh.merged(axes)), best.strategy, costs))
        if self.keys != "auto" and not self.chosen:
            why = "no keys lie over an axis that rows do not"
            graph.diagnostics.append(nothing_divided(f"{{keys: {self.keys}}}", why))
        return graph


def _axes(node: fx.Node) -> Axes:
    """The axes of a call's keys, if none of them shards its queries, or all of them its rows, in another way; none
    where a rank's keys would be no runs."""
    args = given(node)
    q, k, v = (type_of(args[name]) for name in ("q", "k", "v"))
    first, *rest = k.dims[-2] or (Atom(1),)
    copied = isinstance(first.size, Blocks) and first.size.copied
    if k.dims[-2] != v.dims[-2] or any(atom.axes for atom in rest) or copied:
        return ()
    shared = {*first.axes} & q.axes
    of_rows = {axis for atom in q.dims[-2] for axis in atom.axes}
    apart = not shared or (shared == of_rows == {*first.axes} and q.shape[-2] != k.shape[-2])
    return first.axes if apart else ()


class _Call:
    """One call: what its ways cost, and how it is made to go by merging. `rows`: its rows lie over the axes too."""

    def __init__(self, graph: Graph, node: fx.Node, axes: Axes, hardware: Hardware) -> None:
        self.graph, self.mesh, self.node, self.axes, self.hardware = graph, graph.mesh, node, axes, hardware
        self.args = given(node)
        self.q, self.k, self.v = (type_of(self.args[name]) for name in ("q", "k", "v"))
        self.o, self.lse = results(node)
        calls = {user: None for value in (self.o, self.lse) if value is not None for user in value.users}
        self.backward = [call for call in calls if call.target is SDPA_BWD]
        self.size = self.mesh.size(axes)
        self.rows = bool({*axes} & self.q.axes)

    # ------------------------------------------------------------------ what it costs
    def costs(self) -> tuple[Cost, ...]:
        """Of each strategy."""
        if not self.rows:
            return (self._all_gather(), self._merge(()))
        others = Ways(self.graph, self.node, self.axes, self.hardware).costs()
        q, o = self._bytes(self.q), self._bytes(self.q) // self.q.shape[-1] * self.v.shape[-1]
        return (*others, self._merge((q, q, o, o) if self.backward else (q,)))  # in backward the result's gradient, too

    def _all_gather(self) -> Cost:
        """Keys and values are sent in forward, and again in backward; what a rank computes is what all do."""
        runs = 2 if self.backward else 1
        sizes = [self._bytes(self.k), self._bytes(self.v)] * runs
        seconds = sum(self._moved("all_gather", self.size * size) for size in sizes)
        return Cost("all_gather", (self.size - 1) * sum(sizes), _micro(seconds + (self.size - 1) * self._products()))

    def _merge(self, moved: Sequence[int]) -> Cost:
        """The log-sums are gathered, and the result, and in backward the gradient of the queries, all-reduced; or
        reduce-scattered, where rows lie over the axes and what they consist of, `moved`, is gathered."""
        whole, others = self._without(self.q), self.size - 1
        rows = math.prod(whole.local_shape(self.mesh)[:-1])
        sums = rows * wide(self.q.dtype).itemsize
        output = sums * self.v.shape[-1]
        reduced = [output, self._bytes(whole)][: 1 + bool(self.backward)]
        kind, passes = ("reduce_scatter", 1) if self.rows else ("all_reduce", 2)
        seconds = sum(self._moved(kind, size) for size in reduced)
        seconds += sum(self._moved("all_gather", self.size * size) for size in (sums, *moved))
        sent = others * sums + passes * others * sum(reduced) // self.size + others * sum(moved)
        more = others * output - 2 * others * output // self.size
        if not self.rows and more <= self.hardware.start_bytes(self.axes):  # as `pack_parts` does
            sent += more
            seconds -= self._moved("all_gather", self.size * sums) + self._moved("all_reduce", output)
            seconds += self._moved("all_gather", self.size * (sums + output))
        return Cost("merge", sent, _micro(seconds))

    def _without(self, type: TensorType) -> TensorType:
        return type.place([tuple(a for a in axes if a not in self.axes) for axes in type.placement])

    def _bytes(self, type: TensorType) -> int:
        return type.local_bytes(self.mesh)

    def _moved(self, kind: str, size: int) -> float:
        """Seconds of a collective along the keys' axes; `size` as `Hardware.collective_seconds` has it."""
        return self.hardware.collective_seconds(kind, size, self.hardware.group_of(self.mesh, self.axes))

    def _products(self) -> float:
        """Seconds that the products of a rank's keys take."""
        keys, width = self.k.local_shape(self.mesh)[-2], self.q.shape[-1]
        pairs = math.prod(self.q.local_shape(self.mesh)[:-1]) * keys
        flops = 2 * pairs * (width + self.v.shape[-1]) * (0.5 if self.args["causal"] else 1)
        return sum(
            self.hardware.attention_seconds(
                round(flops * (BACKWARD if backward else 1)),
                self.q.dtype,
                backward=backward,
                sequence=self.k.shape[-2],
                width=width,
            )
            for backward in (False, True)[: 1 + bool(self.backward)]
        )

    # ------------------------------------------------------------------ what is done
    def take(self) -> None:
        """Say of the call and of its backward that axes divide their keys."""
        for call in (self.node, *self.backward):
            known = given(call)
            told, window = [v for name, v in known.items() if name != "window"], known.get("window")
            call.target = SDPA_KEYS if call is self.node else SDPA_KEYS_BWD
            call.args = (*told, list(self.axes), *([window] if window else []))
        if self.o is not None and type_of(self.o).dtype != wide(self.q.dtype):
            self._cast(self.o)

    def _cast(self, o: fx.Node) -> None:
        """The result in float32, and behind it a cast, which all read that have read it."""
        narrow, about = type_of(o), info(o)
        declared = list(info(self.node).results)
        assert declared[0] is not None
        declared[0] = declared[0].with_dtype(wide(narrow.dtype))
        update(self.node, results=tuple(declared))
        readers = list(o.users)
        last = self.lse if self.lse is not None and self.lse.next is not o else o
        with self.graph.fx.inserting_after(last):
            cast = self.graph.call(aten._to_copy.default, (o,), {"dtype": narrow.dtype}, like=o, type=narrow)
        for reader in readers:
            reader.replace_input_with(o, cast)
        update(o, type=narrow.with_dtype(wide(narrow.dtype)), name=self.graph.unique(f"{about.name}.wide"))
        update(cast, name=about.name)
        for table in (self.graph.activations, self.graph.gradients):
            table.update({name: cast for name, value in table.items() if value is o})
        if o in self.graph.seeds:
            self.graph.seeds[cast] = self.graph.seeds.pop(o)
        if o in self.graph.priorities:
            self.graph.priorities[cast] = dict(self.graph.priorities[o])


def _micro(seconds: float) -> int:
    return math.ceil(seconds * 1e6)
