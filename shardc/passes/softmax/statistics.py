"""What `online_softmax` looks for: a softmax over a sharded dim, and the collectives that it waits for.

    m = all_reduce(amax(x), max)        h: m, or what a safe softmax makes of it
    s = sum(exp(x - h))                 pending, through linear ops, up to one or more all_reduce(sum)
    t = sum(where(hot, x - h, 0))       likewise; `hot` says which class is the target

Needs a localized body. Everything is found from the all-reduce of the maximum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.graph import Graph, info, operands, type_of
from shardc.ir.ops import collectives, local
from shardc.ir.types import Axes

aten = torch.ops.aten
WIDE = (torch.float32, torch.float64)
VIEWS = (aten.view.default, aten.unsqueeze.default, aten.expand.default, local.shard_slice)


@dataclass(frozen=True)
class Pending:
    """A sum over the shards that is resolved later: the calls that carry it on, and the all-reduces that resolve it."""

    value: fx.Node
    carriers: tuple[fx.Node, ...]
    reduced: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Total:
    """sum(exp(x - shift)); `mask` is the call that clears padding, if there is one."""

    shift: fx.Node
    exp: fx.Node
    mask: fx.Node | None
    pending: Pending


@dataclass(frozen=True)
class Picked:
    """sum(where(column == target, x - shift, 0)), of so many columns."""

    shift: fx.Node
    where: fx.Node
    mask: fx.Node | None
    pending: Pending
    target: fx.Node
    columns: int
    late: tuple[fx.Node, ...]  # what it needs that comes after the maximum's all-reduce, in order


@dataclass(frozen=True)
class Softmax:
    """A softmax over a dim that `axes` shard."""

    top: fx.Node  # the all-reduce of the maximum
    x: fx.Node
    masked: fx.Node  # the same, padding -inf
    axes: Axes
    dims: tuple[int, ...]
    totals: tuple[Total, ...]
    picked: tuple[Picked, ...]


def find(graph: Graph, top: fx.Node, position: Mapping[fx.Node, int]) -> Softmax | None:
    """The softmax to which an all-reduced maximum belongs; `position` is the index of each node in the graph."""
    highest, axes = top.args[0], tuple(top.args[2])  # type: ignore[arg-type]
    if not isinstance(highest, fx.Node) or highest.target is not aten.amax.default or len(highest.args) != 3:
        return None
    if type_of(top).dtype not in WIDE or type_of(top).partial or not highest.args[2]:
        return None
    masked = highest.args[0]
    assert isinstance(masked, fx.Node)
    x = operands(masked)[0] if masked.target is local.mask_pad else masked
    if type_of(x).ragged:  # rows of experts have no parts of their own to merge
        return None
    dims = tuple(d % len(type_of(x).dims) for d in highest.args[1])  # type: ignore[union-attr]
    seed = Softmax(top, x, masked, axes, dims, (), ())
    shifts = [user for user in x.users if _shifted(graph, user, seed) and position[user] > position[top]]
    totals = [part for sub in shifts for part in _totals(graph, sub, seed)]
    picked = [part for sub in shifts for part in _picked(graph, sub, seed, position)]
    return Softmax(top, x, masked, axes, dims, tuple(totals), tuple(picked)) if totals else None


def _shifted(graph: Graph, sub: fx.Node, of: Softmax) -> bool:
    """x - h, with one h for each row."""
    if sub.target is not aten.sub.Tensor or len(sub.args) != 2 or sub.kwargs or sub.args[0] is not of.x:
        return False
    shift = sub.args[1]
    comparable = (
        isinstance(shift, fx.Node) and not type_of(shift).partial and type_of(shift).dtype == type_of(of.top).dtype
    )
    mesh = graph.mesh
    return comparable and type_of(shift).local_shape(mesh) == type_of(of.top).local_shape(mesh)  # type: ignore[arg-type]


def _totals(graph: Graph, sub: fx.Node, of: Softmax) -> Iterator[Total]:
    shift = sub.args[1]
    assert isinstance(shift, fx.Node)
    for exp in sub.users:
        if exp.target is aten.exp.default:
            yield from (Total(shift, exp, mask, pending) for mask, pending in _summed(exp, of))


def _picked(graph: Graph, sub: fx.Node, of: Softmax, position: Mapping[fx.Node, int]) -> Iterator[Picked]:
    shift = sub.args[1]
    assert isinstance(shift, fx.Node)
    for where in sub.users:
        if where.target is not aten.where.ScalarOther or where.args[1] is not sub or where.args[2] != 0:
            continue
        hot = where.args[0]
        assert isinstance(hot, fx.Node)
        target, late = _target(graph, hot, of), late_ancestors(hot, of.top, position)
        if target is None or late is None:
            continue
        columns = type_of(of.x).shape[of.dims[0]]
        for mask, pending in _summed(where, of):
            yield Picked(shift, where, mask, pending, target, columns, late)


def _summed(value: fx.Node, of: Softmax) -> Iterator[tuple[fx.Node | None, Pending]]:
    """The sums of a value over the softmax's dims, directly or with the padding cleared first."""
    for user in list(value.users):
        mask = user if user.target is local.mask_pad else None
        for total in list(mask.users) if mask is not None else [user]:
            if total.target is not aten.sum.dim_IntList or type_of(total).dtype != type_of(of.top).dtype:
                continue
            dims = tuple(d % len(type_of(of.x).dims) for d in total.args[1])  # type: ignore[union-attr]
            pending = settled(total, of.axes) if set(dims) == set(of.dims) and not total.kwargs.get("dtype") else None
            if pending is not None:
                yield mask, pending


def settled(value: fx.Node, axes: Axes) -> Pending | None:
    """Where a pending sum is resolved, if that is by all-reduces over just these axes, of it alone."""
    carriers: list[fx.Node] = []
    reduced: list[fx.Node] = []
    visited, todo = {value}, [value]
    while todo:
        for user in todo.pop().users:
            if user in visited:
                continue
            visited.add(user)
            if user.target is collectives.all_reduce:
                if user.args[1] != "sum" or tuple(user.args[2]) != axes:  # type: ignore[arg-type]
                    return None
                reduced.append(user)
            elif user.op == "call_function" and _pending(user, axes) and user.target not in collectives.COLLECTIVES:
                carriers.append(user)
                todo.append(user)
            else:
                return None
    self_contained = all(
        operand in visited for node in carriers for operand in operands(node) if _pending(operand, axes)
    )
    return Pending(value, tuple(carriers), tuple(reduced)) if self_contained and reduced else None


def _pending(value: fx.Node, axes: Axes) -> bool:
    type = info(value).type
    return type is not None and type.partial_axes.issuperset(axes)


def _target(graph: Graph, hot: fx.Node, of: Softmax) -> fx.Node | None:
    """What the columns' numbers are compared with, in a comparison that at most one column of a row passes."""
    if hot.target is not aten.eq.Tensor or len(of.dims) != 1:
        return None
    dim, shape = of.dims[0], type_of(of.x).shape
    for numbers, target in (hot.args, hot.args[::-1]):
        if not isinstance(numbers, fx.Node) or not isinstance(target, fx.Node):
            continue
        sizes = type_of(numbers).shape
        along = {d - len(sizes): n for d, n in enumerate(sizes) if n != 1} == {dim - len(shape): shape[dim]}
        counted = numbers
        while counted.target in VIEWS:
            counted = operands(counted)[0]
        every = counted.target is aten.arange.default and counted.args == (shape[dim],)
        fits = type_of(target).local_shape(graph.mesh) == type_of(of.top).local_shape(graph.mesh)
        if along and every and fits and not type_of(target).partial:
            return target
    return None


def late_ancestors(value: fx.Node, top: fx.Node, position: Mapping[fx.Node, int]) -> tuple[fx.Node, ...] | None:
    """The ancestors of a value that come after `top`, the value included; None if `top` is an ancestor."""
    ancestors: set[fx.Node] = set()
    todo = [value]
    while todo:
        node = todo.pop()
        if node is top:
            return None
        if node not in ancestors and position[node] > position[top]:
            ancestors.add(node)
            todo += node.all_input_nodes
    return tuple(sorted(ancestors, key=position.__getitem__))
