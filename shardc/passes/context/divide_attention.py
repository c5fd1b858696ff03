"""divide_attention: how attention runs whose rows lie over axes: what is sent, keys or heads, and when.

    all_gather      each rank is sent the other ranks' keys and values; backward sums their gradients where they lie
    ring            they travel round the ranks, a rank's at a time, while those that came before are computed
    all_to_all      for the time of attention heads are divided instead of rows: q, k, v and the result are sent
    hierarchical    of several axes: all_to_all along the last one, ring along the others

All of them are placements: of `sdpa` the rows are free, of `sdpa_ring` they lie as keys do, and of `sdpa_heads` they
are whole along its axes, where the wishes of its log-sums are made to lie over heads. So what is sent follows from
types, and each way is exact. A ring is for keys that lie over the axes of rows: those of the same sequence, or, as an
encoder's, of another one.

Needs the wishes of `propagate`; what `merge_keys` has taken is not its own. Ensures: attention says how it is divided,
in forward and backward alike. `chosen` is what was chosen for each layer, and what each way costs: bytes that a rank
sends in a microbatch, and the time that attention takes beyond a rank's share of its products (`attention_times`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import fx

from shardc.ir.blocks import Blocks
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info, results, type_of
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.mesh import Mesh
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.ops.attention_keys import SDPA_KEYS
from shardc.ir.ops.attention_rows import (
    SDPA_HEADS,
    SDPA_HEADS_BWD,
    SDPA_RING,
    SDPA_RING_BWD,
    reach,
)
from shardc.ir.ops.attention_sums import wide
from shardc.ir.schema import given
from shardc.ir.types import Axes
from shardc.passes.base import Pass
from shardc.passes.context.attention_times import Times
from shardc.passes.context.divided_heads import Groups, divided, wish
from shardc.rules.attention_rows import keys_are_rows, rows_text
from shardc.rules.projection import project

Strategy = Literal["auto", "ring", "all_gather", "all_to_all", "hierarchical"]


class Cost(NamedTuple):
    """Of a strategy: the bytes that a rank sends in forward and backward of a microbatch, and for how many microseconds
    its products wait or are those of others. Where `why` says something, it is not possible."""

    strategy: str
    sent: int
    waits: int
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"{self.strategy} cannot be: {self.why}"
        return f"{self.strategy} {human_bytes(self.sent)}, {self.waits} us"


class Divided(NamedTuple):
    """How the attention of a module is divided along axes, and what each way costs."""

    fqn: str
    axes: str
    strategy: str
    costs: tuple[Cost, ...]

    @classmethod
    def read(cls, said: Sequence[Any]) -> Divided:
        fqn, axes, strategy, costs = said
        return cls(fqn, axes, strategy, tuple(Cost(*cost) for cost in costs))  # type: ignore[arg-type]

    def plain(self) -> list[object]:
        return [self.fqn, self.axes, self.strategy, [list(cost) for cost in self.costs]]

    def __str__(self) -> str:
        first = next(cost for cost in self.costs if cost.strategy == self.strategy)
        others = "; ".join(str(cost) for cost in self.costs if cost is not first)
        return f"{first} along {self.axes} ({others})"


@dataclass(frozen=True)
class DivideAttention(Pass):
    """Choose, call by call. `axes` are those that the strategy is for; none: whichever shard a sequence."""

    axes: Axes = ()
    strategy: Strategy = "auto"
    hardware: Hardware = DEFAULT
    chosen: list[Divided] = field(default_factory=list[Divided], compare=False)

    def run(self, graph: Graph) -> Graph:
        self.chosen.clear()
        calls = [node for node in graph.calls() if node.target is SDPA]
        for node in calls:
            axes = self._axes(graph.mesh, node)
            if axes:
                self._divide(graph, node, axes)
        if self.strategy != "auto" and not self.chosen:
            calls = calls or [node for node in graph.calls() if node.target is SDPA_KEYS]
            why = "no rows of attention lie over its axes" if calls else "no module calls scaled_dot_product_attention"
            graph.diagnostics.append(nothing_divided(self.strategy, why, *calls[:1]))
        return graph

    def _axes(self, mesh: Mesh, node: fx.Node) -> Axes:
        """The axes of the rows of a call that the strategy is for."""
        lies = tuple(axis for atom in type_of(given(node)["q"]).dims[-2] for axis in atom.axes)
        named = mesh.resolve(self.axes) if self.axes else lies
        return tuple(axis for axis in lies if axis in named)

    def _divide(self, graph: Graph, node: fx.Node, axes: Axes) -> None:
        ways = Ways(graph, node, axes, self.hardware)
        costs = ways.costs()
        possible = [cost for cost in costs if not cost.why]
        best = min(possible, key=lambda cost: cost.waits)
        if self.strategy != "auto":
            asked = next(cost for cost in costs if cost.strategy == self.strategy)
            if asked.why:
                graph.diagnostics.append(_cannot(node, asked, "all_gather"))
            best = next(cost for cost in costs if cost.strategy == ("all_gather" if asked.why else self.strategy))
        ways.take(best.strategy)
        self.chosen.append(Divided(info(node).fqn, ".".join(graph.mesh.merged(axes)), best.strategy, tuple(costs)))


class Ways:
    """Of one call, what the ways of dividing it cost, and how it is made to go one of them."""

    def __init__(self, graph: Graph, node: fx.Node, axes: Axes, hardware: Hardware) -> None:
        self.graph, self.mesh, self.node, self.axes, self.hardware = graph, graph.mesh, node, axes, hardware
        self.args = given(node)
        self.window: list[int] = list(self.args.get("window", ()))
        self.q, self.k, self.v = (type_of(self.args[name]) for name in ("q", "k", "v"))
        o, self.lse = results(node)
        self.o = type_of(o) if o is not None else self.q
        calls = {user for value in (o, self.lse) if value is not None for user in value.users}
        self.backward = [call for call in calls if call.target is SDPA_BWD]
        self.first = o
        self.times = Times(graph.mesh, hardware, self.args, self.o, axes, bool(self.backward))

    # ------------------------------------------------------------------ what it costs
    def costs(self) -> list[Cost]:
        """Of each strategy."""
        return [self._all_gather(), self._ring(self.axes, "ring"), self._heads(self.axes, "all_to_all"), self._mixed()]

    def _runs(self) -> int:
        """How many times keys are sent, and their gradients: forward, and twice in backward."""
        return 3 if self.backward else 1

    def _all_gather(self) -> Cost:
        sent = self._runs() * (self.mesh.size(self.axes) - 1) * self.times.keys
        return Cost("all_gather", sent, _micro(self.times.all_gather()))

    def _ring(self, axes: Axes, name: str, heads: int = 1) -> Cost:
        if why := self._no_ring():
            return Cost(name, 0, 0, why)
        steps: list[float] = [1.0] * (self.mesh.size(axes) - 1)
        if self.window:  # of those that a rank has, how many travel in each
            text = rows_text(self.q.dims[-2])
            rows = int(Blocks.parse(text).local(axes, self.mesh))
            steps = [length / rows for length in reach(text, axes, self.window, self.mesh).values()]
        keys = self.times.keys
        # Gradients are sums, and travel as such.
        sums = keys * wide(self.k.dtype).itemsize // self.k.dtype.itemsize
        each = keys + (keys + sums if self.backward else 0)
        return Cost(name, round(sum(steps) * each), _micro(self.times.ring(axes, heads)))

    def _no_ring(self) -> str:
        rows, keys = self.q.dims[-2], self.k.dims[-2]
        alike = rows == keys
        if not keys_are_rows(self.q, self.k):
            alike = len(rows) == len(keys) == 1 and rows[0].axes == keys[0].axes
        if not alike or keys != self.v.dims[-2]:
            return "its keys do not lie as its rows do"
        if any(_copied(atom.size) for atom in keys):
            return "each rank has a block of its keys, which would be counted once a rank"
        if self.window and rows != keys:
            return "it has a window, and other keys than its rows"
        if not self.times.countable:
            return "axes divide an inner factor of its rows"
        return ""

    def _heads(self, axes: Axes, name: str) -> Cost:
        size, share = self.mesh.size(axes), self.times.share
        heads = divided(self.node, axes, self.mesh)
        if heads is None:
            count = math.prod(atom.local(self.mesh) for atom in self.q.dims[-3]) if self.q.ndim > 2 else 1
            return Cost(name, 0, 0, f"the heads of a rank, {count}, are too few for {size}")
        # Backward sends the result a second time, for the gradient of the weight that it meets, and gradients.
        moved = 2 * (share(self.q) + share(self.o)) + share(self.o)
        sent = moved * heads.queries * (size - 1)
        sent += (3 if heads.gathers else 2 * heads.keys) * self.times.keys * (size - 1)
        mask = self.args["mask"]
        if mask is not None and {*type_of(mask).axes} & {*axes}:
            sent += 2 * (size - 1) * type_of(mask).local_bytes(self.mesh)
        seconds = self.times.heads(axes, heads, products=axes == self.axes)
        return Cost(name, round(sent if self.backward else sent / 2), _micro(seconds))

    def _mixed(self) -> Cost:
        if len(self.axes) == 1:
            return Cost("hierarchical", 0, 0, "its rows lie over one axis")
        inner, outer = self.axes[-1:], self.axes[:-1]
        heads, ring = self._heads(inner, "hierarchical"), self._ring(outer, "hierarchical", self.mesh.size(inner))
        return Cost("hierarchical", heads.sent + ring.sent, heads.waits + ring.waits, heads.why or ring.why)

    # ------------------------------------------------------------------ what is done
    def take(self, strategy: str) -> None:
        """Say of the call and of its backward that they go this way."""
        heads: Axes = {"all_to_all": self.axes, "hierarchical": self.axes[-1:]}.get(strategy, ())
        if strategy == "all_gather":
            return
        ring = strategy in ("ring", "hierarchical")
        way = divided(self.node, heads, self.mesh) if heads else None
        groups = Groups(self.graph, self.node, way.times) if way is not None and way.times > 1 else None
        for call in (self.node, *self.backward):
            if groups is not None:
                groups.write(call)
            forward = call is self.node
            known = given(call)
            told, window = [v for name, v in known.items() if name != "window"], known.get("window")
            if ring:
                call.target = SDPA_RING if forward else SDPA_RING_BWD
            else:
                call.target = SDPA_HEADS if forward else SDPA_HEADS_BWD
            call.args = (*told, list(heads), *([window] if window else []))
        if groups is not None:
            groups.drop_unread()
        value, which = (self.lse, 1) if self.lse is not None else (self.first, 0)
        if value is not None and (way := divided(self.node, heads, self.mesh) if heads else None):
            # The axis that leaves rows first is the first to divide heads: no step of a reshard is a gather.
            wish(value, project(self.node).results[which], way.piece, heads[::-1])


def _copied(size: int) -> bool:
    return isinstance(size, Blocks) and size.copied


def _micro(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1e6))


def _cannot(node: fx.Node, asked: Cost, instead: str) -> Diagnostic:
    about = info(node)
    return Diagnostic(
        "SC240",
        f"attention of {about.fqn or 'the model'} goes by {instead}, not by {asked.strategy}: {asked.why}",
        "warning",
        location=about.source or None,
        source_text=about.source_text or None,
        fqn=about.fqn or None,
        hint="leave the strategy to auto, or give the axis another size",
    )


def nothing_divided(said: str, why: str, call: fx.Node | None = None) -> Diagnostic:
    """Of a plan that asks for a strategy, where no attention is for it."""
    about = info(call) if call is not None else None
    return Diagnostic(
        "SC240",
        f"the plan says context: {said}, and no attention is divided so: {why}",
        "warning",
        location=(about.source or None) if about else None,
        source_text=(about.source_text or None) if about else None,
        fqn=(about.fqn or None) if about else None,
        hint='shard the sequence, as in inputs: {input_ids: "dp, cp"}; or leave the key out',
    )
