"""Cross-entropy on CPUs reads and changes one number a row, where its graph compares and selects whole rows.

    %hit = eq(%columns, %label)                    [N, V] labels' columns are true
    %shifted = sub(%logits, %largest)
    %exp = exp(%shifted)                           over %shifted
    %own = where(%hit, %shifted, 0)
    %picked = sum(%own, [1])                       gathered from %logits, less %largest
    ...
    %p = mul(%exp, %scale)                         over %exp
    %one = where(%hit, %g, 0)
    %d = sub(%p, %one)                             %g is subtracted from %p at the labels

The graph's form is what vocabularies are split by; a rank that has all columns needs neither mask nor selections. Each
number is the same, bit by bit. Whatever does not fit stays as it is, so each of the changes is made or not by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.arena import views
from shardc.ir.buckets import reduced_in_place
from shardc.ir.graph import type_of
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.runtime.execute.call_arguments import CallArguments, Slot
from shardc.runtime.execute.written_code import CodeLine

aten = torch.ops.aten


@dataclass(frozen=True)
class _Change:
    """What is called in the place of a node, and the values that it reads."""

    call: Callable[..., Tensor]
    reads: tuple[fx.Node, ...]


def picked(values: Tensor, column: Tensor, less: Tensor | None = None) -> Tensor:
    """[N, V] at the column of each row, [N, 1]; 0 where there is no such column."""
    there = (column >= 0) & (column < values.shape[1])
    found = values.gather(1, column.clamp(0, values.shape[1] - 1))
    return torch.where(there, found if less is None else found - less, 0.0)


def subtracted(values: Tensor, column: Tensor, amount: Tensor) -> Tensor:
    """Values [N, V], less an amount [N, 1] at the column of each row; they are overwritten."""
    there = (column >= 0) & (column < values.shape[1])
    return values.scatter_add_(1, column.clamp(0, values.shape[1] - 1), torch.where(there, -amount, 0.0))


def pick_columns(
    code: Sequence[CodeLine],
    node_of: Callable[[int], fx.Node],
    slots: Mapping[fx.Node, int],
    placed: Collection[fx.Node],
) -> list[CodeLine]:
    """The code with masks of labels' columns taken out. `slots` gives a value's slot, `placed` are values whose memory
    is chosen beforehand, or which leave the code."""
    nodes = [node_of(line[0]) for line in code]
    if not any(node.target is aten.eq.Tensor for node in nodes):
        return list(code)
    here, changes, gone = set(nodes), dict[fx.Node, _Change](), set[fx.Node]()
    for hit in dict.fromkeys(nodes):
        column = _column(hit)
        if column is None or hit in placed:
            continue
        for own in list(hit.users):
            change = _change(own, hit, column, here, placed)
            if change is not None:
                changes[change[0]] = change[1]
                gone.add(own)
        if all(user in gone for user in hit.users):
            gone.add(hit)
    if not changes:
        return list(code)
    overwritten = _overwritten(nodes, changes, gone, placed)
    last = {slots[value]: at for at, node in enumerate(nodes) if node in changes for value in changes[node].reads}
    rewritten: list[CodeLine] = []
    pending: tuple[int, ...] = ()
    for at, (line, node) in enumerate(zip(code, nodes, strict=True)):
        index, call, arguments, into, free = line
        free = (*pending, *free)
        if node in gone:
            pending = free
            continue
        pending = tuple(slot for slot in free if last.get(slot, -1) > at)
        free = tuple(slot for slot in free if last.get(slot, -1) <= at)
        if node in changes:
            call = changes[node].call
            arguments = CallArguments(tuple(Slot(slots[value]) for value in changes[node].reads), {})
        elif node in overwritten:
            arguments = arguments.with_named(out=Slot(slots[overwritten[node]]))
        rewritten.append((index, call, arguments, into, free))
    return rewritten


def kept(value: fx.Node, placed: Collection[fx.Node]) -> bool:
    """Whether a value's memory keeps what is in it for as long as somebody holds it: it has no place that others get
    later, and no collective sums in it."""
    source: Any = value
    while isinstance(source, fx.Node) and source.op == "call_function":
        if source in placed or any(reduced_in_place(user) for user in source.users):
            return False
        if source.target is operator.getitem or views(source):
            source = source.args[0]
        else:
            return True
    return isinstance(source, fx.Node) and source not in placed


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
    whole = columns.args == (shape[1],) and type_of(columns).dtype == torch.int64
    fits = type_of(row).shape == (1, shape[1]) and type_of(column).shape == (shape[0], 1)
    return column if whole and fits and type_of(column).dtype == torch.int64 else None


def _change(
    own: fx.Node, hit: fx.Node, column: fx.Node, here: Collection[fx.Node], placed: Collection[fx.Node]
) -> tuple[fx.Node, _Change] | None:
    """The reader of a selection by a mask, and what is called in its place."""
    if own.target is not aten.where.ScalarOther or own.kwargs or own.args[0] is not hit or own.args[2] != 0:
        return None
    if len(own.users) != 1 or own in placed:
        return None
    chosen, (reader,) = own.args[1], own.users
    if not isinstance(chosen, fx.Node) or reader not in here or own not in here or reader in placed:
        return None
    if reader.target is aten.sum.dim_IntList and reader.args in (((own, [1], True)), (own, [-1], True)):
        return reader, _picking(chosen, column, placed)
    if reader.target is aten.sum.dim_IntList and reader.args in ((own, [1]), (own, [-1])):
        return (reader, _picking(chosen, column, placed)) if reader.kwargs == {"keepdim": True} else None
    if reader.target is aten.sub.Tensor and not reader.kwargs and reader.args[1] is own:
        values = reader.args[0]
        if not isinstance(values, fx.Node):
            return None
        alike = type_of(values).shape == type_of(own).shape
        column_like = type_of(chosen).shape == type_of(column).shape
        if not (alike and column_like and values.target is aten.mul.Tensor and len(values.users) == 1):
            return None
        same = type_of(values).dtype == type_of(chosen).dtype == type_of(reader).dtype
        if same and values in here and values not in placed:
            return reader, _Change(subtracted, (values, column, chosen))
    return None


def _picking(chosen: fx.Node, column: fx.Node, placed: Collection[fx.Node]) -> _Change:
    """Where the memory of the logits is theirs, they are read later than in the graph, so that what is shifted need not
    be kept."""
    if chosen.target is aten.sub.Tensor and not chosen.kwargs:
        values, less = chosen.args
        if isinstance(values, fx.Node) and isinstance(less, fx.Node):
            same = type_of(values).shape == type_of(chosen).shape and type_of(less).shape == type_of(column).shape
            if same and type_of(values).dtype == type_of(less).dtype and kept(values, placed):
                return _Change(picked, (values, column, less))
    return _Change(picked, (chosen, column))


def _overwritten(
    nodes: Sequence[fx.Node], changes: Mapping[fx.Node, _Change], gone: Collection[fx.Node], placed: Collection[fx.Node]
) -> dict[fx.Node, fx.Node]:
    """Calls that may write over an operand that the code has made, and nothing reads after them: the exponential of the
    shifted logits, and the product that the gradient is made of."""
    places = {node: at for at, node in enumerate(nodes)}
    over: dict[fx.Node, fx.Node] = {}
    for change in changes.values():
        product = change.reads[0] if change.call is subtracted else None
        if product is None:
            continue
        exponential: Any = product.args[0]
        if not isinstance(exponential, fx.Node) or exponential.target is not aten.exp.default:
            continue
        shifted = exponential.args[0]
        for call, operand in ((product, exponential), (exponential, shifted)):
            if not isinstance(operand, fx.Node) or operand.target not in (aten.exp.default, aten.sub.Tensor):
                continue
            readers = [user for user in operand.users if user not in gone]
            readers += [n for n, other in changes.items() if operand in other.reads]
            same = type_of(operand).shape == type_of(call).shape and type_of(operand).dtype == type_of(call).dtype
            known = operand in places and call in places and not {operand, call} & set(placed)
            if any(views(user) or user.target in COLLECTIVES for user in readers):
                continue
            if same and known and all(user in places and places[user] <= places[call] for user in readers):
                over[call] = operand
    return over
