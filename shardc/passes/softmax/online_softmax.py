"""online_softmax: a softmax over a sharded dim meets its group once, not once for each of its statistics.

    m = all_reduce(amax(x), max)                       m_i = amax(x)           f_i = m_i, but finite
    s = all_reduce(sum(exp(x - m)), sum)        ->     s_i = sum(exp(x - f_i))
    t = all_reduce(sum(where(hot, x, 0) - m), sum)     t_i = sum(where(hot, x, 0))
                                                       all_gather of [m_i, s_i, t_i], 3 numbers a row and rank, or 2
                                                       m = max m_i,  s = sum s_i exp(f_i - m),  t = sum t_i - m

    x = [1, 3 | 2, -inf], the bar between two ranks: (m_i, s_i) = (3, 1 + e^-2), (2, 1)
    m = 3,  s = (1 + e^-2) e^0 + 1 e^-1 = 1.503

So cross-entropy with a vocabulary in shards reads its logits before one small all-gather and after it. Who reads
exp(x - m) besides, as softmax and its gradient do, has exp(x - f_i), times a number a row that also makes up for the
shard's own maximum: the exponentials are taken once. f_i is finite, so a shard of -inf alone adds 0 and not NaN; where
the single device has NaN, so has every rank. t is only there where one collective less is had for it: a sum over
classes that is first summed over tokens is a single number to all-reduce, but a number a token to gather.

The rule: collectives saved, times the bytes that a link sends while an empty one runs (`Hardware.collective_seconds`,
10 MB), must outweigh what is sent more. A rank sends k (g-1) n bytes to gather k statistics of n bytes in a group of g, and
2 (g-1)/g n to all-reduce one. The same up to g = 2; in larger groups more, but few: 8192 tokens of 3 float32 over 8
ranks are 672 KiB instead of 168, for two starts.

Needs a localized body: a shard's statistics are no tensors that a rule could place. (A maximum or sum that is not
resolved is pending over the axes; laid side by side, what is pending is one dim more, which the axes shard.) Ensures
the same values but for rounding, under the same names; fewer collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.collectives import collective
from shardc.ir.graph import Graph, info, op_name, operands, type_of, update
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops import collectives, local
from shardc.ir.provenance import NO_CAUSE, Cause, Derivation
from shardc.ir.types import Atom, Dim, TensorType
from shardc.passes.base import Pass
from shardc.passes.softmax.statistics import Pending, Picked, Softmax, Total, find

aten = torch.ops.aten


@dataclass(frozen=True)
class OnlineSoftmax(Pass):
    """One all-gather for the statistics of each softmax over a sharded dim, where that costs less."""

    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        tops = [node for node in graph.calls() if node.target is collectives.all_reduce and node.args[1] == "max"]
        for top in tops:
            position = {node: i for i, node in enumerate(graph.fx.nodes)}
            softmax = find(graph, top, position)
            chosen = None if softmax is None else worth(graph, softmax, self.hardware)
            if chosen is not None:
                _Rewriting(graph, chosen).run()
                graph.erase_dead()
        return graph


def worth(graph: Graph, softmax: Softmax, hardware: Hardware = DEFAULT) -> Softmax | None:
    """The softmax with those sums over classes that are worth gathering; None if nothing is."""

    def sent(nodes: Sequence[fx.Node]) -> int:
        every = [collective(graph, node) for node in nodes]
        return sum(transfer.bytes_per_rank for transfer in every if transfer is not None)

    latency = hardware.collective_seconds("all_reduce", 0, hardware.group_of(graph.mesh, softmax.axes))
    start = (latency or hardware.collective_start_seconds) * hardware.bytes_per_second(softmax.axes)
    statistic_bytes = type_of(softmax.top).local_bytes(graph.mesh) * (graph.mesh.size(softmax.axes) - 1)
    picked = tuple(
        p for p in softmax.picked if statistic_bytes - sent(p.pending.reduced) <= start * len(p.pending.reduced)
    )
    replaced = [softmax.top, *(node for total in softmax.totals for node in total.pending.reduced)]
    if 2 * statistic_bytes - sent(replaced) > start * (len(replaced) - 1):
        return None
    return replace(softmax, picked=picked)


class _Rewriting:
    def __init__(self, graph: Graph, softmax: Softmax) -> None:
        self.graph, self.mesh, self.softmax = graph, graph.mesh, softmax
        self.name = info(softmax.top).name
        self.base = self.name.rpartition(".")[0]
        self.type = type_of(softmax.top)  # of a statistic
        self.shape = list(self.type.local_shape(self.mesh))
        ranks = self.mesh.size(softmax.axes)
        self.sharded_dim, self.ranks_dim = (Atom(ranks, softmax.axes),), (Atom(ranks),)
        self.like = softmax.top  # whose phase and source what is put has
        self.memo: dict[fx.Node, fx.Node] = {}

    def run(self) -> None:
        softmax, first = self.softmax, self.softmax.totals[0]
        moved = dict.fromkeys(node for picked in softmax.picked for node in picked.late)
        for node in sorted(moved, key={n: i for i, n in enumerate(self.graph.fx.nodes)}.__getitem__):
            softmax.top.prepend(node)
        for hot, target in {p.where.args[0]: p.target for p in softmax.picked}.items():
            if self.countable():
                self.count_from_own(hot, target)  # type: ignore[arg-type]
        with self.graph.fx.inserting_before(softmax.top):
            self.floor = self.finite(softmax.top.args[0], "floor")
            # Padding is -inf already, for the maximum: it adds nothing to the sum.
            shifted = self.put(aten.sub.Tensor, (softmax.masked, self.floor), type_of(first.exp), "shifted")
            self.exp = self.put(aten.exp.default, (shifted,), type_of(first.exp), "exp")
            total = self.resummed(None, first.pending.value, self.exp)
            # One read of the logits for all that several losses pick from them.
            picks = {p.where.args[0]: p for p in reversed(softmax.picked)}
            masked = {hot: self.masked(p) for hot, p in picks.items()}
            rows = self.gathered([softmax.top.args[0], total, *masked.values()])
            row = dict(zip(masked, rows[2:], strict=True))
            top = self.put(aten.amax.default, (rows[0], [len(self.shape)], False), self.type, "top")
            self.heights = self.finite(rows[0], "heights")
        self.sums, self.rows = rows[1], row
        _swap(self.graph, softmax.top, top)
        shifts = [top if p.shift is softmax.top else p.shift for p in (*softmax.totals, *softmax.picked)]
        for part, shift in zip((*softmax.totals, *softmax.picked), shifts, strict=True):
            with self.graph.fx.inserting_before(part.pending.value):
                value = self.total(shift) if isinstance(part, Total) else self.picked(part, shift)
                value = self.reshaped(value, type_of(part.pending.value))
            self.resolve(part.pending, value)
            if isinstance(part, Total):
                self.readers(part, shift)

    # ------------------------------------------------------------------ before the ranks meet
    def finite(self, x: Any, name: str) -> fx.Node:
        """A maximum as what to subtract. Where a loss takes care of infinite ones, +inf is made finite as well."""
        most = torch.finfo(self.type.dtype).max
        if all(total.shift is self.softmax.top for total in self.softmax.totals):
            return self.put(aten.clamp_min.default, (x, -most), type_of(x), name)
        return self.put(aten.clamp.default, (x, -most, most), type_of(x), name)

    def countable(self) -> bool:
        """Does a shard hold columns one after another?"""
        atoms = type_of(self.softmax.x).dims[self.softmax.dims[0]]
        return len(atoms) == 1 and atoms[0].axes == self.softmax.axes

    def count_from_own(self, hot: fx.Node, target: fx.Node) -> None:
        """Number the columns from the shard's first one: a kernel then need not read their numbers."""
        atoms = type_of(self.softmax.x).dims[self.softmax.dims[0]]
        numbers = next(operand for operand in operands(hot) if operand is not target)
        type, size, strides = type_of(numbers), atoms[0].size, list[int]()
        for axis in atoms[0].axes:
            size = -(-size // self.mesh.size(axis))
            strides.append(size)
        with self.graph.fx.inserting_before(hot):
            count = TensorType(type.dtype, (atoms,))
            columns = self.put(aten.arange.default, (size,), count, dtype=type.dtype)
            columns = self.put(aten.view.default, (columns, list(type.local_shape(self.mesh))), type, "columns")
            scalar = TensorType(torch.int64, ())
            first = self.put(local.axis_offset, (list(self.softmax.axes), strides), scalar, "first")
            lower = self.put(aten.sub.Tensor, (target, first), type_of(target), "target")
        hot.args = (columns, lower)

    def masked(self, picked: Picked) -> fx.Node:
        hot, (_, _, otherwise) = picked.where.args[0], picked.where.args
        where = self.put(picked.where.target, (hot, self.softmax.x, otherwise), type_of(picked.where), "where")
        # Cut by one axis, only columns past the last one are padding, and no target.
        last = self.countable() and len(self.softmax.axes) == 1
        return self.resummed(None if last else picked.mask, picked.pending.value, where)

    def resummed(self, mask: fx.Node | None, total: fx.Node, x: fx.Node) -> fx.Node:
        """The same sum over other values."""
        if mask is not None:
            x = self.put(mask.target, (x, *mask.args[1:]), type_of(mask), "mask_pad")
        return self.put(total.target, (x, *total.args[1:]), type_of(total), "sum")

    def gathered(self, values: Sequence[Any]) -> list[fx.Node]:
        """All-gathers each statistic; the last dim of the result counts the ranks."""
        type, shape = self.with_dims(self.sharded_dim, ()), [1, 1, *self.shape]
        parts = [self.put(aten.view.default, (value, shape), type, "part") for value in values]
        count = (Atom(len(values)),)
        shard_statistics = self.put(aten.cat.default, (parts, 1), self.with_dims(self.sharded_dim, count), "statistics")
        type = self.with_dims(self.ranks_dim, count)
        atoms, ranks = list(type_of(shard_statistics).local_atoms(self.mesh)), self.ranks_dim[0].size
        args = (shard_statistics, list(self.softmax.axes), atoms, 0, ranks, list(type.local_shape(self.mesh)))
        every = self.put(collectives.all_gather, args, type)
        name = self.graph.unique(self.name.replace(".all_reduce", ".all_gather"))
        cause = Cause.joined(info(node).cause for node in (self.softmax.top, *self.reduced()))
        update(every, name=name, cause=cause, origin=Derivation("replacement", self.name))
        last = len(self.shape) + 1
        type = TensorType(self.type.dtype, (count, *self.type.dims, self.ranks_dim))
        turned = self.put(aten.permute.default, (every, [*range(1, last + 1), 0]), type, "permute")
        row = TensorType(self.type.dtype, (*self.type.dims, self.ranks_dim))
        return [self.put(aten.select.int, (turned, 0, i), row, "select") for i in range(len(values))]

    def reduced(self) -> list[fx.Node]:
        return [node for part in (*self.softmax.totals, *self.softmax.picked) for node in part.pending.reduced]

    # ------------------------------------------------------------------ after they have met
    def total(self, shift: fx.Node) -> fx.Node:
        """sum(exp(x - shift)) over all shards."""
        row = type_of(self.heights)
        column = TensorType(self.type.dtype, (*self.type.dims, ()))
        lower = self.put(aten.view.default, (shift, [*self.shape, 1]), column, "view")
        scale = self.put(aten.exp.default, (self.put(aten.sub.Tensor, (self.heights, lower), row),), row)
        scaled = self.put(aten.mul.Tensor, (self.sums, scale), row)
        return self.put(aten.sum.dim_IntList, (scaled, [len(self.shape)]), self.type)

    def picked(self, picked: Picked, shift: fx.Node) -> fx.Node:
        """The target's x - shift; 0 where the target is no class."""
        value = self.put(aten.sum.dim_IntList, (self.rows[picked.where.args[0]], [len(self.shape)]), self.type)
        lower = self.put(aten.sub.Tensor, (value, shift), self.type)
        flag = type_of(picked.target).with_dtype(torch.bool)
        low = self.put(aten.ge.Scalar, (picked.target, 0), flag)
        high = self.put(aten.lt.Scalar, (picked.target, picked.columns), flag)
        in_range = self.put(aten.bitwise_and.Tensor, (low, high), flag)
        return self.put(aten.where.ScalarOther, (in_range, lower, 0.0), self.type)

    def resolve(self, pending: Pending, value: fx.Node) -> None:
        """The value in the place of a pending sum; what carried that on has nothing pending any more."""
        axes = set(self.softmax.axes)
        name = info(pending.value).name
        _swap(self.graph, pending.value, value)
        update(value, name=name)
        for node in pending.carriers:
            about, type = info(node), type_of(node)
            update(
                node,
                type=type.place(type.placement, [p for p in type.partial if p[0] not in axes]),
                passes=tuple(a for a in about.passes if a not in axes),
                fallback=tuple(f for f in about.fallback if f[0] not in axes),
            )
        for node in pending.reduced:
            _swap(self.graph, node, node.args[0])  # type: ignore[arg-type]

    def readers(self, total: Total, shift: fx.Node) -> None:
        """What else reads exp(x - shift): exp(x - f_i) times a number a row, and no exponential is taken again."""
        old = total.exp
        if total.mask is not None and not total.mask.users:
            self.graph.fx.erase_node(total.mask)
        position = {node: i for i, node in enumerate(self.graph.fx.nodes)}
        for user in sorted(old.users, key=position.__getitem__):
            self.like = user if user.op == "call_function" else self.softmax.top
            with self.graph.fx.inserting_before(user):
                number = self.number(user, old)
                if number is None:
                    user.replace_input_with(old, self.whole(old, shift))
                    continue
                type = self.with_dims(self.sharded_dim)
                part = self.put(aten.view.default, (number, [1, *self.shape]), type, "part")
                factor = self.put(user.target, (self.scale(shift), part), type)
                user.target = aten.mul.Tensor
                user.args = (self.exp, self.spread(factor, type_of(old)))
        self.like = self.softmax.top

    def number(self, user: fx.Node, old: fx.Node) -> fx.Node | None:
        """What a call multiplies or divides by, if that is a number a row."""
        if user.target not in (aten.mul.Tensor, aten.div.Tensor) or len(user.args) != 2 or user.kwargs:
            return None
        first, second = user.args
        other = second if first is old else first
        if not isinstance(other, fx.Node) or (first is not old and user.target is aten.div.Tensor):
            return None
        type = type_of(other)
        small = type.local_shape(self.mesh) == tuple(self.shape) and type.dtype == self.type.dtype
        return other if small and not type.partial else None

    def scale(self, shift: fx.Node) -> fx.Node:
        """exp(f_i - shift), a number a row of each shard; 0 or more."""
        type = self.with_dims(self.sharded_dim)
        views = [self.put(aten.view.default, (v, [1, *self.shape]), type, "part") for v in (self.floor, shift)]
        return self.put(aten.exp.default, (self.put(aten.sub.Tensor, tuple(views), type),), type)

    def whole(self, old: fx.Node, shift: fx.Node) -> fx.Node:
        """exp(x - shift) itself, computed at its first use."""
        if old not in self.memo:
            factor = self.spread(self.scale(shift), type_of(old))
            self.memo[old] = self.put(aten.mul.Tensor, (self.exp, factor), type_of(old))
        return self.memo[old]

    def spread(self, factor: fx.Node, to: TensorType) -> fx.Node:
        """A number a row and shard, over the columns of the shard."""
        shape = list(to.local_shape(self.mesh))
        dims = list(to.dims)
        for d in self.softmax.dims:
            dims[d] = (Atom(shape[d]),) if shape[d] > 1 else ()
        type = TensorType(to.dtype, (self.sharded_dim, *dims))
        wide = self.put(aten.expand.default, (factor, [1, *shape]), type, "expand")
        return self.put(aten.view.default, (wide, shape), to, "view")

    # ------------------------------------------------------------------ helpers
    def with_dims(self, *first: Dim) -> TensorType:
        return TensorType(self.type.dtype, (*first, *self.type.dims))

    def reshaped(self, value: fx.Node, like: TensorType) -> fx.Node:
        """A dim that a sum does not keep goes."""
        resolved = like.place(like.placement, [p for p in like.partial if p[0] not in self.softmax.axes])
        shape = list(resolved.local_shape(self.mesh))
        return value if shape == self.shape else self.put(aten.view.default, (value, shape), resolved, "view")

    def put(self, target: Any, args: tuple[Any, ...], type: TensorType, name: str = "", **kwargs: Any) -> fx.Node:
        prefix = "d." if info(self.like).phase == "bwd" and not self.base.startswith("d.") else ""
        name = f"{prefix}{self.base}.{name or op_name(target).partition('.')[0]}"
        return self.graph.call(target, args, kwargs, like=self.like, type=type, name=name, cause=NO_CAUSE)


def _swap(graph: Graph, old: fx.Node, new: fx.Node) -> None:
    old.replace_all_uses_with(new)
    for table in (graph.activations, graph.gradients):
        table.update({name: new for name, value in table.items() if value is old})
    graph.fx.erase_node(old)
