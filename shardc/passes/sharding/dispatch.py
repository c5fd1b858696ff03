"""Where experts lie over an axis of tokens: which calls run at the experts, and how rows get there and back.

    %x  = gather_rows(...)                    : f32[(8@ep 16 2), 64; 4]    at the tokens
    %x' = dispatch_rows(%x, ...)              : f32[(8 16 2), 64; 4@ep]    at the experts
    %y' = expert_mm(silu(expert_mm(%x'...)))
    %y  = combine_rows(%y', ...)              : f32[(8@ep 16 2), 64; 4]    at the tokens again
    ungroup_rows(%y * %weight)

`assign` asks `calls_at_experts`, and gives each call the axes on rows, or on experts. `insert_reshards` then puts a
reshard wherever rows go from the one to the other, as for any operand that lies otherwise than its call needs it; and
`lower_reshards` makes it an exchange. So propagation, pending sums, stored parameters and gradients know nothing of
exchanges: they follow types.

Products, and what belongs to groups, run at the experts; rows are gathered and put back at the tokens. All between goes
row by row, and may run at either. The least is sent where a minimum cut divides the calls: a value that is made at one
and read at the other costs the bytes of its row. So results are weighted at the tokens, since weights are of a row and
results of its features; and so are their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import networkx as nx
from torch import fx

from shardc.ir.collectives import human_bytes
from shardc.ir.graph import Graph, info, operands, producer, results, type_of, update
from shardc.ir.mesh import Mesh
from shardc.ir.ops.exchange import (
    COMBINE_ROWS,
    DISPATCH_ROWS,
    EXCHANGE_COUNTS,
    EXCHANGED_PERM,
    GROUP_ENDS,
    ROW_MOVES,
    width_of,
)
from shardc.ir.ops.expert_capacity import COUNT_ROWS, LIMIT_ROWS, capacity_of
from shardc.ir.ops.experts import (
    EXPERT_MM,
    EXPERT_WGRAD,
    GATHER_ROWS,
    GROUP_ROWS,
    SPREAD_GROUPS,
    SUM_GROUPS,
    UNGROUP_ROWS,
)
from shardc.ir.provenance import Derivation
from shardc.ir.schema import given
from shardc.ir.types import Atom, Axes, Dim, TensorType
from shardc.passes.exchanged_rows import (
    by_experts,
    capacity_by,
    counts_of,
    experts_of,
    moved_axes,
    room_of,
    tokens_of,
)
from shardc.rules.projection import project

AT_EXPERTS = (EXPERT_MM, EXPERT_WGRAD, SPREAD_GROUPS, SUM_GROUPS)
AT_TOKENS = (GATHER_ROWS, UNGROUP_ROWS)


def readers_of(grouping: fx.Node) -> list[fx.Node]:
    """All calls that read rows of a grouping, in the order in which they are found."""
    found: dict[fx.Node, None] = {}
    todo = [value for value in results(grouping) if value is not None]
    while todo:
        for user in todo.pop().users:
            if user.op != "call_function" or user in found:
                continue
            found[user] = None
            todo += [value for value in results(user) if value is not None and type_of(value).ragged]
    return list(found)


def calls_at_experts(grouping: fx.Node) -> set[fx.Node]:
    """The calls that read rows of a grouping and run where its experts are."""
    readers = readers_of(grouping)
    reading, order = set(readers), {value for value in results(grouping) if value is not None}
    network: nx.DiGraph[object] = nx.DiGraph()
    for call in readers:
        if call.target in AT_TOKENS:
            network.add_edge("tokens", call)
        elif call.target in AT_EXPERTS:
            network.add_edge(call, "experts")
        else:
            network.add_edge("tokens", call, capacity=1)  # ties are run at the tokens, where there is no tail
    for value in {v: None for call in readers for v in operands(call) if type_of(v).ragged and v not in order}:
        made, read = producer(value)[0], [user for user in value.users if user in reading]
        if made not in reading:
            continue
        cost = len(readers) * _row_bytes(type_of(value)) + 1
        network.add_edge(made, ("there", value), capacity=cost)
        network.add_edge(("back", value), made, capacity=cost)
        for user in read:
            network.add_edge(("there", value), user)
            network.add_edge(user, ("back", value))
    if "tokens" not in network or "experts" not in network:
        return {call for call in readers if call.target in AT_EXPERTS}
    _, (_, far) = nx.minimum_cut(network, "tokens", "experts")
    return reading & far


def _row_bytes(type: TensorType) -> int:
    return type.numel() // max(1, math.prod(atom.size for atom in type.dims[0])) * type.dtype.itemsize


@dataclass(frozen=True)
class Sent:
    """Of a grouping, how its rows and groups lie at the tokens, and what is sent to the experts, over which axes."""

    rows: Dim
    experts: Dim
    axes: Axes
    at_experts: frozenset[fx.Node]  # calls
    offs: fx.Node | None

    def needed(self, call: fx.Node, value: fx.Node, type: TensorType) -> TensorType:
        """How a call needs the rows or groups of a value."""
        rows, experts = self.rows, self.experts
        if call in self.at_experts:
            rows, experts = tokens_of(rows, self.axes), experts_of(experts, self.axes)
        first, last = (experts, rows) if value is self.offs else (rows, experts)
        between = type.placement[len(first) : len(type.atoms) - len(last)]
        return type.place([*(a.axes for a in first), *between, *(a.axes for a in last)], type.partial)


def layers_of_experts(graph: Graph) -> list[list[object]]:
    """Of each layer whose rows are counted: the module, its experts as the sizes of atoms, and among how many ranks
    each of these is divided."""
    found = (node for node in graph.calls() if node.target is COUNT_ROWS and info(node).origin is None)
    counts = {info(node).name.removesuffix(".load"): node for node in found}
    layers: list[list[object]] = []
    for name, node in counts.items():
        products = [call for call in readers_of(graph.by_name(name)) if call.target is EXPERT_MM]
        experts = type_of(operands(products[0])[1]).dims[0] if products else (Atom(given(node)["experts"]),)
        sizes, ranks = [atom.size for atom in experts], [graph.mesh.size(atom.axes) for atom in experts]
        layers.append([info(node).fqn, sizes or [1], ranks or [1]])
    return layers


class Choice(NamedTuple):
    """How rows of a layer come to experts over an axis of theirs, and what a rank sends in a step for it, in bytes:
    with even routing by an all-to-all, and where tokens are gathered."""

    fqn: str
    form: str
    sent: int
    gathered: int

    def __str__(self) -> str:
        sent, gathered = f"all_to_all {human_bytes(self.sent)}", f"all_gather {human_bytes(self.gathered)}"
        first, other = (sent, gathered) if self.form == "all_to_all" else (gathered, sent)
        return f"{first} a rank and microbatch, and {other.partition(' ')[0]} would send {other.partition(' ')[2]}"


def bytes_of_forms(grouping: fx.Node, token_ranks: int, axes: Axes, mesh: Mesh) -> tuple[int, int]:
    """What a rank sends of a microbatch's grouping, forward and backward: by an all-to-all, and by gathering tokens.

    A token is sent once to each of the other ranks where it is gathered, and of its `each` rows those of other ranks'
    experts where they are sent; results come back likewise, summed over a token's rows where ranks have all of them.
    """
    group, (ids, *_) = mesh.size(axes), operands(grouping)
    rows = type_of(ids).numel() // token_ranks
    readers = readers_of(grouping)
    each = max((int(given(call)["each"]) for call in readers if call.target is GATHER_ROWS), default=1)
    gathered = rows * type_of(ids).dtype.itemsize
    for call in readers:
        if call.target is GATHER_ROWS:
            gathered += type_of(operands(call)[0]).numel() * type_of(call).dtype.itemsize // token_ranks
        elif call.target is UNGROUP_ROWS:
            row, number = _row_bytes(type_of(call)), type_of(call).dtype.itemsize
            gathered += rows * row // (each if row > number else 1)  # a weight's gradient is of a row
    far, experts, width = calls_at_experts(grouping), given(grouping)["experts"], rows / group
    if ids.target is LIMIT_ROWS:
        width = width_of(rows, -(-experts // group), capacity_of(rows, experts, given(ids)["factor"]))
    order = {value for value in results(grouping) if value is not None}
    row = 0
    for value in {v: None for call in readers for v in operands(call) if type_of(v).ragged and v not in order}:
        elsewhere = {user in far for user in value.users if user in set(readers)} - {producer(value)[0] in far}
        row += _row_bytes(type_of(value)) * len(elsewhere)
    counts = 4 * experts / group
    return math.ceil((row * width + counts) * (group - 1)), gathered * (group - 1)


# ---------------------------------------------------------------------- lowering
def is_exchange(before: TensorType, after: TensorType) -> bool:
    """Does a reshard move rows, or where their groups end, between tokens and experts?"""
    return any(before.placement[i] != after.placement[i] for i in before.bound_atoms)


def exchanged(type: TensorType, need: TensorType) -> TensorType:
    """The type after the exchange alone that brings rows to where they are needed."""
    bound = type.bound_atoms
    return type.place([(need if i in bound else type).placement[i] for i in range(len(type.atoms))], type.partial)


class Exchanges:
    """Lowers reshards of rows; counts are exchanged once for each grouping."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.grouping = dict(_groupings(graph))  # of a value
        self.counts: dict[tuple[fx.Node, Axes], fx.Node] = {}
        self.arrived: dict[fx.Node, int] = {}  # values at the experts, and for how many rows they have room

    def lower(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """What a reshard becomes, at the insertion point."""
        graph, mesh, before, after = self.graph, self.graph.mesh, type_of(source), type_of(node)
        grouping = self.grouping[source]
        perm, offs = results(grouping)
        assert offs is not None
        origin = info(node).origin or Derivation("moved", info(source).name)
        if source is offs:
            axes = tuple(after.dims[0][0].axes)
            counts = self._counted(grouping, offs, axes)
            ends = graph.call(GROUP_ENDS, (counts,), like=node, type=after, origin=origin)
            return _assigned(ends)
        axes = moved_axes(before, after)
        counts = self._counted(grouping, offs, axes)
        capacity = capacity_by(offs, mesh) or 0
        sent = source is perm or by_experts(before, axes) == after
        if sent and (room := room_of(before.dims[0], before.dims[-1], axes, capacity, mesh)):
            after = replace(after, room=room)
        rows = after.local_shape(mesh)[0]
        if source is perm:
            moved = _assigned(graph.call(EXCHANGED_PERM, (counts, rows), like=node, type=after, origin=origin))
        else:
            target = DISPATCH_ROWS if sent else COMBINE_ROWS
            name = f"{origin.of}.{'dispatch' if sent else 'combine'}"
            args = (source, offs, counts, list(axes), rows, capacity)
            moved = graph.call(target, args, like=node, type=after, name=name, origin=origin)
        if after.room:
            self.arrived[moved] = after.room
        return moved

    def make_room(self) -> None:
        """What is computed of rows that came by a capacity has room for as many."""
        todo = list(self.arrived.items())
        while todo:
            value, room = todo.pop()
            for user in value.users:
                if user.op != "call_function" or user.target in ROW_MOVES:
                    continue
                for result in results(user):
                    if result is not None and not type_of(result).room and _has_rows(type_of(result), value):
                        update(result, type=replace(type_of(result), room=room))
                        todo.append((result, room))

    def _counted(self, grouping: fx.Node, offs: fx.Node, axes: Axes) -> fx.Node:
        counts = self.counts.get((grouping, axes))
        if counts is None:
            type = counts_of(type_of(offs), axes, self.graph.mesh)
            reads = not capacity_by(offs, self.graph.mesh)
            args = (offs, list(axes), list(type.local_shape(self.graph.mesh)), reads)
            name = f"{info(offs).name}.exchange"
            origin = Derivation("moved", info(offs).name)
            with self.graph.fx.inserting_after(offs):
                counts = self.graph.call(EXCHANGE_COUNTS, args, like=offs, type=type, name=name, origin=origin)
            self.counts[grouping, axes] = counts
        return counts


def _has_rows(type: TensorType, like: fx.Node) -> bool:
    """Is the first dim of a type that of the rows of a value, and its last that of their groups?"""
    rows = type_of(like)
    return type.ragged == 1 and (type.dims[0], type.dims[-1]) == (rows.dims[0], rows.dims[-1])


def _groupings(graph: Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    for node in graph.calls():
        if node.target is GROUP_ROWS:
            for value in (v for v in results(node) if v is not None):
                yield value, node
            for reader in readers_of(node):
                yield from ((v, node) for v in results(reader) if v is not None and type_of(v).ragged)


def _assigned(call: fx.Node) -> fx.Node:
    """Says of a call how its pieces are split: as its operands lie."""
    projection = project(call)
    split = {
        piece: axes
        for value, pieces in zip(operands(call), projection.operands, strict=True)
        for piece, axes in zip(pieces, type_of(value).placement, strict=True)
        if axes and piece not in projection.blocked
    }
    update(call, assignment=tuple((projection.names[piece], axes) for piece, axes in split.items()))
    return call
