"""pick_columns: cross-entropy reads and changes one number a row, where its graph compares and selects whole rows.

    %hit = eq(%columns, %label)              [N, V]: true at labels' columns
    %own = where(%hit, %shifted, 0)
    %picked = sum(%own, [1])           ->    %picked = pick_column(%shifted, %label)
    ...
    %one = where(%hit, %g, 0)
    %d = sub(%p, %one)                 ->    %d = subtract_at(%p, %label, %g)

The graph's form is what vocabularies are split by; a rank that has all columns needs neither mask nor selections. A
kernel makes both on its way, so that this is for programs without them. Whatever does not fit stays as it is: each of
the changes is made or not by itself.

A column is picked as soon as there are values: `exp`, their other reader, may then write over them. What is made
earlier for it (labels, %picked) is less than %shifted, which goes earlier, and what their other readers make is there
behind the pick anyway, so that no rank holds more.

Needs a localized body, or a part of one. Ensures the same values under the same names, bit by bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, producer, type_of, update
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.columns import PICK_COLUMN, SUBTRACT_AT
from shardc.ir.types import TensorType
from shardc.passes.base import Pass

aten = torch.ops.aten


@dataclass(frozen=True)
class PickColumns(Pass):
    """Take masks of labels' columns out of a graph, if `enabled`."""

    enabled: bool = True

    def run(self, graph: Graph) -> Graph:
        hits = [hit for hit in graph.calls_of(aten.eq.Tensor) if _column(hit) is not None] if self.enabled else []
        if not any(_change(own) for hit in hits for own in hit.users):
            return graph
        table: dict[fx.Node, fx.Node] = {}
        graph = graph.copy(table)
        for hit in hits:
            for own in list(table[hit].users):
                changed = _change(own)
                if changed is not None:
                    _replace(graph, *changed)
        graph.erase_dead()
        for pick in graph.calls_of(PICK_COLUMN):
            _pick_early(graph, pick)
        return graph


def _column(hit: fx.Node) -> fx.Node | None:
    """The column of each row that a mask [N, V] is true at; None of what is no such mask."""
    if hit.target is not aten.eq.Tensor or hit.kwargs or not all(isinstance(arg, fx.Node) for arg in hit.args):
        return None
    row, column = hit.args
    assert isinstance(row, fx.Node)
    assert isinstance(column, fx.Node)
    shape = type_of(hit).shape
    columns = row.args[0] if row.target is aten.view.default else None
    if not isinstance(columns, fx.Node) or columns.target is not aten.arange.default or len(shape) != 2:
        return None
    whole = columns.args == (shape[1],) and type_of(columns).dtype == type_of(column).dtype == torch.int64
    whole = whole and not any(atom.axes for atom in type_of(hit).dims[1])
    fits = type_of(row).shape == (1, shape[1]) and type_of(column).shape == (shape[0], 1)
    fits = fits and type_of(column).dims[0] == type_of(hit).dims[0]
    return column if whole and fits else None


def _change(own: fx.Node) -> tuple[fx.Node, Any, tuple[fx.Node, ...]] | None:
    """The one reader of a selection by such a mask; the op that takes its place, and what that reads."""
    if own.target is not aten.where.ScalarOther or own.kwargs or own.args[2] != 0 or len(own.users) != 1:
        return None
    hit, chosen, _ = own.args
    column = _column(hit) if isinstance(hit, fx.Node) else None
    (reader,) = own.users
    if column is None or not isinstance(chosen, fx.Node) or reader.op == "output" or _is_sum(own):
        return None
    if reader.target is aten.sum.dim_IntList and type_of(chosen).shape == type_of(own).shape:
        dims, keeps = reader.args[1], reader.args[2:] == (True,) or reader.kwargs == {"keepdim": True}
        same = type_of(reader).dtype == type_of(chosen).dtype and len(reader.args) + len(reader.kwargs) == 3
        return (reader, PICK_COLUMN, (chosen, column)) if dims in ([1], [-1]) and keeps and same else None
    if reader.target is aten.sub.Tensor and not reader.kwargs and reader.args[1] is own:
        values = reader.args[0]
        if not isinstance(values, fx.Node) or type_of(values).shape != type_of(own).shape or _is_sum(values):
            return None
        same = type_of(values).dtype == type_of(chosen).dtype == type_of(reader).dtype
        if same and type_of(chosen).shape == type_of(column).shape:
            return reader, SUBTRACT_AT, (values, column, chosen)
    return None


def _is_sum(value: fx.Node) -> bool:
    """Is a value pending, or ragged?"""
    type = type_of(value)
    return type != TensorType(type.dtype, type.dims)


def _replace(graph: Graph, reader: fx.Node, op: Any, read: tuple[fx.Node, ...]) -> None:
    about, rows = info(reader), type_of(read[1]).dims[0]
    names = ["n"] if len(rows) == 1 else [f"n.{number}" for number in range(len(rows))]
    split = tuple((name, atom.axes) for name, atom in zip(names, rows, strict=True) if atom.axes)
    with graph.fx.inserting_before(reader):
        made = graph.call(op, read, like=reader, type=type_of(reader), assignment=split)
    graph.replace_value(reader, made)
    update(reader, name=graph.unique(f"{about.name}.before"))
    update(made, name=about.name)


def _pick_early(graph: Graph, pick: fx.Node) -> None:
    """Move a pick, and what it needs for that, behind the call that makes its values, if its other readers then read
    them last, make what later calls read, and nothing is awaited earlier."""
    values, between, node, mesh = operands(pick)[0], list[fx.Node](), pick, graph.mesh
    while node.op == "call_function" and node is not values:
        between.append(node)
        node = node.prev
    others = set(values.users) - {pick}
    are_held = all(not set(other.users).issubset(between) for other in others)
    if node.op != "call_function" or not others.issubset(between) or not are_held:
        return
    needed, moved = {pick}, list[fx.Node]()  # from the last one to the first
    for call in between:
        if call in needed:
            moved.append(call)
            needed.update(call.all_input_nodes)
    is_awaited = any(producer(node)[0].target in COLLECTIVES for node in needed)
    if is_awaited or any(info(call).type is None for call in moved):
        return
    if sum(type_of(call).local_bytes(mesh) for call in moved) <= type_of(values).local_bytes(mesh):
        for call in moved:
            values.append(call)
