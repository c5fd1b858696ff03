"""settle_partials: decide where each pending sum is resolved, by one minimum cut an axis.

Needs: assignments. Ensures: `info.passes` of each op that runs on pending sums; types say exactly what
each op then produces.

Resolving at once is wrong (the input gradients of q, k and v would each be all-reduced, instead of their
sum), as late as possible is wrong too (a sum that passes a broadcast multiply grows). For an axis let V be
the values that can be pending sums over it. Value v becomes two vertices, v_p (v as a pending sum) and
v_r (v resolved), joined by an edge that costs what resolving v costs: the start of a collective, and the
bytes of an all-reduce, or half of them when all who read it want it sharded. The source feeds the values
an op generates pending; consumers that cannot work on pending sums pull v_r to the sink; linear consumers
tie v_r to their own result's w_p, so that they either run on all their inputs pending or on none. Ties
resolve early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import networkx as nx
import torch
from networkx.algorithms.flow import boykov_kolmogorov
from torch import fx

from shardc.ir.equal_layers import LayerView
from shardc.ir.graph import Graph, info, operands, producer, results, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.attention_keys import SDPA_KEYS
from shardc.ir.types import Axes, TensorType
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass, split_of
from shardc.passes.normalize.decompositions.table import HALF
from shardc.passes.sharding.atomize import UPDATES
from shardc.passes.sharding.casts import narrow_gradients
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule

FORBIDDEN = 2**60
SOURCE, SINK = "source", "sink"


@dataclass(frozen=True)
class SettlePartials(Pass):
    """Choose, for every linear op, whether it runs on pending sums.

    `reduce` is the dtype to sum parameters' gradients over ranks in: in float32 none is resolved before its cast.
    """

    reduce: torch.dtype | None = None
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        ops = [_Op(n, project(n)) for n in graph.calls() if find_rule(n.target) is not None]
        ops = [op for op in ops if not all(info(v).constant for v in op.sources)]
        passing: dict[_Op, list[str]] = {op: [] for op in ops}
        late = narrow_gradients(graph) if self.reduce == torch.float32 else set[fx.Node]()
        repeated = {v for v in in_microbatch(graph) if producer(v)[0].target is not ACCUMULATE}
        for axis in graph.mesh.names:
            for op in _cut(graph, ops, axis, repeated, late, self.hardware):
                passing[op].append(axis)
        _finish(graph, ops, passing)
        return graph


class _Op:
    """A call with its projection and split, looked up once."""

    __slots__ = ("delayed", "node", "outs", "projection", "sources", "split")

    def __init__(self, node: fx.Node, projection: Projection):
        self.node = node
        self.projection = projection
        self.sources = operands(node)
        self.outs = results(node)
        self.split = split_of(node, projection)
        self.delayed = {axis: projection.names.index(f) for axis, f in info(node).fallback}

    def uses(self, axis: str) -> bool:
        return any(axis in axes for axes in self.split.values())

    def wants(self, operand: int, axis: str) -> bool:
        """The op needs this operand sharded over the axis."""
        return any(axis in self.split.get(p, ()) for p in self.projection.operands[operand])

    def passing(self, pending: set[fx.Node], axis: str) -> tuple[int, ...]:
        """The operands that the op would run on as pending sums; none if it cannot."""
        if self.uses(axis):
            return ()
        return linear_in(self.sources, [v in pending for v in self.sources], self.projection)


def linear_in(sources: list[fx.Node], pending: list[bool], projection: Projection) -> tuple[int, ...]:
    """Which of the operands that are pending an op may be run on: of a sum all, if all are, of a product one.

    Of a product's two it is the gradient, and the other is resolved.
    """
    if projection.linear == "joint":
        return tuple(range(len(sources))) if sources and all(pending) else ()
    able = [i for i in projection.linear if i < len(sources) and pending[i]]
    return tuple(sorted(able, key=lambda i: (info(sources[i]).phase != "bwd", i))[:1])


@dataclass(frozen=True)
class Joined:
    """Values of a graph with few layers that stand for all: those of the layers between which others are left out are
    one, and as dear as all of them. Else it could seem cheaper to leave a sum to a layer that counts once."""

    alike: Mapping[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])
    counts: Mapping[fx.Node, int] = field(default_factory=dict[fx.Node, int])

    @classmethod
    def of_layers(cls, graph: Graph) -> Joined:
        alike, counts = dict[fx.Node, fx.Node](), dict[fx.Node, int]()
        for units in graph.units:
            members = LayerView(graph, units.path, units.period).members
            here, there = (members.get(unit, {}) for unit in (units.first, units.last))
            alike |= {there[key]: value for key, value in here.items() if key in there}
            counts |= dict.fromkeys(here.values(), 2 + len(units.removed))
        return cls(alike, counts)

    def of(self, value: fx.Node) -> fx.Node:
        return self.alike.get(value, value)

    def count(self, value: fx.Node) -> int:
        return self.counts.get(value, 1)

    def vertex(self, vertex: object) -> object:
        return (self.of(vertex[0]), vertex[1]) if isinstance(vertex, tuple) else vertex


def _cut(
    graph: Graph, ops: list[_Op], axis: str, repeated: set[fx.Node], late: set[fx.Node], hardware: Hardware
) -> list[_Op]:
    """The ops that run on sums pending over the axis.

    Parts of attention on halves are summed in float32, before they are cast. What is `repeated` would be resolved once
    a microbatch; what is `late` waits, unless its reader cannot.
    """
    generated: set[fx.Node] = set()
    pending: set[fx.Node] = set()
    readable: set[fx.Node] = set()  # those that a reader may take as they are: what is annotated is resolved at birth
    eligible: dict[_Op, tuple[int, ...]] = {}
    joined = Joined.of_layers(graph)
    users: dict[fx.Node, list[tuple[_Op, int]]] = {}
    by_result: dict[fx.Node, _Op] = {}
    for op in ops:  # topological: an op's operands are classified before it
        for k, v in enumerate(op.outs):
            if v is None:
                continue
            by_result[v] = op
            if "sum" in {kind for a, kind in op.projection.partial(op.split, k) if a == axis}:
                generated.add(v)
                pending.add(v)
        through = op.passing(readable, axis)
        if through:
            eligible[op] = through
            pending.update(v for v in op.outs if v is not None)
        readable.update(v for v in op.outs if v in pending and v not in graph.seeds and not _is_wide(op))
        for i, v in enumerate(op.sources):
            if v in pending:
                users.setdefault(v, []).append((op, i))
    if not eligible:
        return []
    outputs = {v: p for p, v in zip(graph.outputs, graph.output_values, strict=True)}
    twins = graph.input_nodes()
    twin_sharded = {v: axis in type_of(twins[p.name]).axes for v, p in outputs.items() if p.role in UPDATES}
    latency = hardware.collective_seconds("all_reduce", 0, hardware.group_of(graph.mesh, (axis,)))
    start = round((latency or hardware.collective_start_seconds) * hardware.bytes_per_second((axis,)))
    chosen: list[_Op] = []
    for values in _components(eligible, users):
        if all(i not in eligible.get(op, ()) for v in values for op, i in users.get(v, [])):
            continue

        def near(joined: Joined, values: list[fx.Node] = values) -> set[object]:
            """What is resolved late, where values stand for others."""
            network = _Network()
            for value in values:
                v = joined.of(value)
                uses = users.get(value, [])
                resolved = [(op, i) for op, i in uses if i not in eligible.get(op, ())]
                waiting = [op for op, i in uses if i in eligible.get(op, ())]
                sharded = [op.wants(i, axis) for op, i in resolved]
                sharded += [True for op in waiting if axis in op.delayed]
                sharded += [twin_sharded[value]] if value in twin_sharded else []
                once = bool(sharded) and all(sharded)
                times = joined.count(v) * (graph.microbatches if value in repeated else 1)
                cost = times * (type_of(v).local_bytes(graph.mesh) * (1 if once else 2) + start)
                network.add((v, "p"), (v, "r"), FORBIDDEN if value in late else cost)
                if value in generated:
                    network.add(SOURCE, (v, "p"))
                else:
                    network.add((v, "p"), SINK, joined.count(v))  # ties resolve early
                if value in outputs or resolved or value in graph.seeds:
                    network.add((v, "r"), SINK)
                for op in waiting:
                    outs = [joined.of(w) for w in op.outs if w is not None]
                    for w, other in zip(outs, [*outs[1:], *outs[:1]], strict=True):
                        network.add((v, "r"), (w, "p"))
                        network.add((w, "p"), (v, "p"))
                        network.add((w, "p"), (other, "p"))  # a call's results are all pending, or none
            return network.near()

        late_ones = near(Joined())
        if graph.units and near(joined) != {joined.vertex(vertex) for vertex in late_ones}:
            raise UnequalError(f"{info(values[0]).name} would be summed elsewhere if there were all layers")
        if not late_ones:
            continue
        for op in {op for v in values for op, i in users.get(v, []) if i in eligible.get(op, ())}:
            if all((w, "p") in late_ones for w in op.outs if w is not None):
                chosen.append(op)
    return chosen


def _is_wide(op: _Op) -> bool:
    """Does the call compute parts of attention on halves?"""
    return op.node.target is SDPA_KEYS and type_of(op.sources[0]).dtype in HALF


class _Network:
    """A network of vertices, which are numbered as they appear, so that the networks of equal layers are equal."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {SOURCE: 0, SINK: 1}
        self._edges: dict[tuple[int, int], int | None] = {}

    def add(self, tail: object, head: object, capacity: int | None = None) -> None:
        """An edge of a capacity, or of an infinite one; of one that is there already, a capacity is set."""
        numbers = self._numbers
        edge = numbers.setdefault(tail, len(numbers)), numbers.setdefault(head, len(numbers))
        if capacity is None:
            self._edges.setdefault(edge, None)
        else:
            self._edges[edge] = capacity

    def near(self) -> set[object]:
        """The vertices on the source's side of the minimum cut, of several cuts that of the most vertices. None where
        nothing is joined to the source, or to the sink."""
        numbers = _near(tuple((*edge, capacity) for edge, capacity in self._edges.items()))
        return {vertex for vertex, number in self._numbers.items() if number in numbers}


@lru_cache(maxsize=256)
def _near(edges: tuple[tuple[int, int, int | None], ...]) -> frozenset[int]:
    network: nx.DiGraph[int] = nx.DiGraph()
    for tail, head, capacity in edges:
        network.add_edge(tail, head, **({} if capacity is None else {"capacity": capacity}))
    if 0 not in network or 1 not in network:
        return frozenset()
    # That cut is one, whatever flow is found; of many layers, this finds one in a third of preflow-push's time.
    _, (near, _) = nx.minimum_cut(network, 0, 1, flow_func=boykov_kolmogorov)
    return frozenset(near)


def _components(
    eligible: dict[_Op, tuple[int, ...]], users: dict[fx.Node, list[tuple[_Op, int]]]
) -> list[list[fx.Node]]:
    """Values tied by eligible ops; each group is a cut of its own. They are in the order of the users' table."""
    tied: dict[fx.Node, fx.Node] = {}

    def root(v: fx.Node) -> fx.Node:
        while tied[v] is not v:
            tied[v] = v = tied[tied[v]]
        return v

    for v, uses in users.items():
        tied.setdefault(v, v)
        for op, i in uses:
            if i in eligible.get(op, ()):
                for w in op.outs:
                    if w is not None:
                        tied.setdefault(w, w)
                        tied[root(w)] = root(v)
    groups: dict[fx.Node, list[fx.Node]] = {}
    for v in tied:
        groups.setdefault(root(v), []).append(v)
    return list(groups.values())


def _finish(graph: Graph, ops: list[_Op], passing: dict[_Op, list[str]]) -> None:
    """Give ops whose sums are resolved before them their fallback piece, and derive every produced type anew."""
    reader_orders = _ReaderOrders(graph)
    for op in reversed(ops):
        for axis, piece in op.delayed.items():
            if axis not in passing[op]:
                op.split[piece] = reader_orders.order(op, piece, (*op.split.get(piece, ()), axis))
        reader_orders.read(op)
    for op in ops:
        names = op.projection.names
        update(
            op.node,
            assignment=tuple((names[p], axes) for p, axes in op.split.items()),
            passes=tuple(passing[op]),
            fallback=(),
        )
        for k, v in enumerate(op.outs):
            if v is not None:
                update(v, type=produced(type_of(v), op.projection, op.split, tuple(passing[op]), k))


class _ReaderOrders:
    """How results are split by who reads them: several axes on one atom have an order, and another costs a move."""

    def __init__(self, graph: Graph) -> None:
        self.names = graph.mesh.names
        twins = graph.input_nodes()
        returned = zip(graph.outputs, graph.output_values, strict=True)
        self.by: dict[tuple[fx.Node, int], list[Axes]] = {}
        for v, twin in ((v, twins[port.name]) for port, v in returned if port.role in UPDATES):
            self._add(v, type_of(twin).placement)

    def read(self, op: _Op) -> None:
        for v, pieces in zip(op.sources, op.projection.operands, strict=True):
            self._add(v, [op.split.get(piece, ()) for piece in pieces])

    def _add(self, v: fx.Node, placement: Sequence[Axes]) -> None:
        for atom, axes in enumerate(placement):
            if len(axes) > 1:
                self.by.setdefault((v, atom), []).append(axes)

    def order(self, op: _Op, piece: int, axes: Axes) -> Axes:
        """The axes as a reader of the result has them, else as the mesh has."""
        for v, pieces in zip(op.outs, op.projection.results, strict=True):
            atoms = [i for i, p in enumerate(pieces) if p == piece] if v is not None else []
            for has in (has for i in atoms for has in self.by.get((v, i), ())):  # type: ignore[arg-type]
                if set(has) == set(axes):
                    return has
        return tuple(sorted(axes, key=self.names.index))


def produced(type: TensorType, projection: Projection, split: dict[int, Axes], passes: Axes, result: int) -> TensorType:
    """What an op yields: each atom over its piece's axes; pending sums of its own and those it passes on."""
    partial = [*projection.partial(split, result), *((axis, "sum") for axis in passes)]
    return type.place([split.get(p, ()) for p in projection.results[result]], partial)
