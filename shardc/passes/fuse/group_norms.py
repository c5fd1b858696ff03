"""GroupNorm in kernels: statistics where x is made, and what is done element by element where it is read.

    %y, %mean, %rstd = native_group_norm(%x)   ->   %means, %squares = group_moments(%x)        a row is a channel
                                                    %mean, %rstd = group_stats(%means, %squares)      a few numbers
    %s = silu(%y)                                   %s = silu(group_apply(%x, %mean, %rstd, ...))

A channel's weight changes within a group, so that a group is no row of a kernel; a channel is. What makes x (a bias, a
residual) yields the moments too: x is then read once, and s is written once. Backward likewise: the sums of each
channel in one kernel, the gradient in another, and the activation's gradient made again in both.

The statistics are float32 and stay so for backward, as they are inside of torch's kernels.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, results, set_info, type_of
from shardc.ir.ops.group_norm import GROUP_APPLY, GROUP_MEANS, GROUP_MOMENTS, GROUP_SLOPE, GROUP_STATS, GROUP_SUMS
from shardc.ir.storages import strides
from shardc.ir.types import TensorType
from shardc.passes.fuse.spaces import Read, Shape
from shardc.passes.fuse.units import Inner, Make, Operand, Unfit, lower

aten = torch.ops.aten
FORWARD, BACKWARD = aten.native_group_norm.default, aten.native_group_norm_backward.default
NARROW = (torch.bfloat16, torch.float16, torch.float32)  # kernels reduce in float32


def split_group_norms(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Rewrite them, in place, where kernels can walk their memory."""
    found = [
        node
        for node in graph.calls()
        if node.target in (FORWARD, BACKWARD) and op_name(node.target) not in exclude and info(node).name not in exclude
    ]
    if not found:
        return
    split = Splitting(graph)
    for node in found:
        tensors = [one for one in node.args if isinstance(one, fx.Node) and type_of(one).shape[2:]]
        if tensors and all(split.lies_well(one) for one in tensors):
            with graph.fx.inserting_before(node):
                rewrite: Callable[..., None] = split.forward if node.target is FORWARD else split.backward
                rewrite(node, *node.args)


class Splitting:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.strides = graph, strides(graph)
        self.exact: dict[fx.Node, fx.Node] = {}  # statistics as forward gives them -> in float32

    def lies_well(self, x: fx.Node) -> bool:
        shape = type_of(x).local_shape(self.graph.mesh)
        own = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        lies = [s for s, n in zip(self.strides.get(x, own), shape, strict=True) if n > 1]
        return type_of(x).dtype in NARROW and lies == [s for s, n in zip(own, shape, strict=True) if n > 1]

    def put(self, target: Any, *args: Any, like: fx.Node, type: TensorType) -> fx.Node:
        return self.graph.call(target, args, like=like, type=type)

    def pair(self, target: Any, *args: Any, like: fx.Node, types: Sequence[TensorType]) -> list[fx.Node]:
        call = self.graph.call(target, args, like=like, type=None, results=tuple(types))
        items: list[fx.Node] = []
        for at, type in enumerate(types):
            items.append(self.graph.fx.call_function(operator.getitem, (call, at)))
            name = self.graph.unique(f"{info(call).name}.{at}")
            set_info(items[-1], replace(info(like), name=name, type=type, results=()))
        return items

    def group(self, x: fx.Node, groups: int) -> TensorType:
        """A number a group of x, whose channels are groups, major, of channels."""
        batch, channels = type_of(x).dims[:2]
        size, atoms = 1, 0
        while size < groups:
            size *= channels[atoms].local(self.graph.mesh)
            atoms += 1
        return TensorType(torch.float32, (batch, channels[:atoms]))

    def takes(self, old: fx.Node, new: fx.Node) -> None:
        """The place and the name of a result."""
        old.replace_all_uses_with(new)
        about, self.exact[new] = info(old), self.exact.get(old, old)
        set_info(old, replace(about, name=f"{about.name} (split)"))
        set_info(new, about)
        for table in (self.graph.activations, self.graph.gradients):
            table.update({name: new for name, value in table.items() if value is old})

    def done(self, node: fx.Node) -> None:
        for item in list(node.users):
            self.graph.fx.erase_node(item)
        self.graph.fx.erase_node(node)

    def forward(
        self, node: fx.Node, x: fx.Node, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
    ) -> None:
        channel = TensorType(torch.float32, type_of(x).dims[:2])
        moments = self.pair(GROUP_MOMENTS, x, like=node, types=[channel, channel])
        stats = self.pair(GROUP_STATS, *moments, groups, hw, eps, like=node, types=[self.group(x, groups)] * 2)
        for value in results(node):
            if value is None:
                continue
            at, type = int(value.args[1]), type_of(value)  # type: ignore[arg-type]
            if at == 0:
                self.takes(value, self.put(GROUP_APPLY, x, *stats, weight, bias, groups, like=node, type=type))
                continue
            stat = stats[at - 1]
            if type.dtype != torch.float32:
                stat = self.graph.call(aten._to_copy.default, (stat,), {"dtype": type.dtype}, like=node, type=type)
            self.takes(value, stat)
            self.exact[stat] = stats[at - 1]
        self.done(node)

    def backward(
        self, node: fx.Node, dy: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, weight: Any,
        n: int, c: int, hw: int, groups: int, wanted: Sequence[bool],
    ) -> None:  # fmt: skip
        own = type_of(x)
        channel = TensorType(torch.float32, own.dims[:2])
        stats = [self.exact.get(one, one) for one in (mean, rstd)]
        sums = self.pair(GROUP_SUMS, dy, x, *stats, groups, like=node, types=[channel, channel])
        for value in results(node):
            if value is None:
                continue
            at, type = int(value.args[1]), type_of(value)  # type: ignore[arg-type]
            if at == 0:
                count = c // groups * hw
                groups_of = [self.group(x, groups)] * 2
                means = self.pair(GROUP_MEANS, *sums, weight, groups, count, like=node, types=groups_of)
                args = (dy, x, *stats, weight, *means, groups)
                self.takes(value, self.put(GROUP_SLOPE, *args, like=node, type=type))
                continue
            exact = replace(type, dtype=torch.float32)
            total = self.put(aten.sum.dim_IntList, sums[at - 1], [0], like=node, type=exact)
            if type.dtype != torch.float32:
                total = self.graph.call(aten._to_copy.default, (total,), {"dtype": type.dtype}, like=node, type=type)
            self.takes(value, total)
        self.done(node)


# ---------------------------------------------------------------------- as kernels
def _space(m: Make, x: Operand, groups: int) -> Shape:
    """Batch, groups, channels of a group, positions."""
    shape = m.shape_of(x)
    if len(shape) < 3 or math.prod(shape[2:]) == 1:
        raise Unfit
    return (shape[0], groups, shape[1] // groups, math.prod(shape[2:]))


def _per_group(m: Make, x: Operand, space: Shape) -> Read | float | int | bool:
    return m.spread_over(x, (*space[:2], 1, 1), space)


def _per_channel(m: Make, x: Operand, space: Shape) -> Read | float | int | bool:
    return m.spread_over(x, (1, *space[1:3], 1), space)


def _hat(m: Make, x: Operand, mean: Operand, rstd: Operand, space: Shape) -> Inner:
    m.shape = space
    own, average, scale = m.spread_over(x, space, space), _per_group(m, mean, space), _per_group(m, rstd, space)
    return m("mul", m("sub", own, average), scale)


@lower(GROUP_MOMENTS)
def group_moments(m: Make, x: Operand) -> tuple[Inner, Inner]:
    batch, _, channels, cols = _space(m, x, 1)
    rows = (batch, channels, 1)
    m.shape = (batch, channels, cols)
    own = m("same", m.spread_over(x, m.shape, m.shape))
    mean = m("div", m.reduce("rsum", own, "row", rows, cols), float(cols), shape=rows)
    return mean, m.reduce("rsum", m("square", m.sub(own, mean)), "row", rows, cols)


@lower(GROUP_STATS)
def group_stats(m: Make, means: Operand, squares: Operand, groups: int, size: int, eps: float) -> tuple[Inner, Inner]:
    batch, channels = m.shape_of(means)
    space, rows, cols = (batch, groups, channels // groups), (batch, groups, 1), channels // groups
    m.shape = space
    each, own = (m("same", m.spread_over(one, space, space)) for one in (means, squares))

    def total(value: Inner) -> Inner:
        return m.reduce("rsum", value, "row", rows, cols) if cols > 1 else value

    mean = m("div", total(each), float(cols), shape=rows)
    apart = m("mul", total(m("square", m.sub(each, mean))), float(size), shape=rows)
    variance = m("div", m("add", total(own), apart, shape=rows), float(cols * size), shape=rows)
    return mean, m("rsqrt", m("add", variance, eps, shape=rows), shape=rows)


@lower(GROUP_APPLY)
def group_apply(
    m: Make, x: Operand, mean: Operand, rstd: Operand, weight: Operand | None, bias: Operand | None, groups: int
) -> Inner:
    space = _space(m, x, groups)
    y = _hat(m, x, mean, rstd, space)
    y = y if weight is None else m("mul", y, _per_channel(m, weight, space))
    return y if bias is None else m("add", y, _per_channel(m, bias, space))


@lower(GROUP_SUMS)
def group_sums(m: Make, dy: Operand, x: Operand, mean: Operand, rstd: Operand, groups: int) -> tuple[Inner, Inner]:
    space = _space(m, x, groups)
    rows, cols = (*space[:3], 1), space[3]
    hat = _hat(m, x, mean, rstd, space)
    grad = m("same", m.spread_over(dy, space, space))
    return m.reduce("rsum", m.mul(grad, hat), "row", rows, cols), m.reduce("rsum", grad, "row", rows, cols)


@lower(GROUP_MEANS)
def group_means(
    m: Make, hats: Operand, sums: Operand, weight: Operand | None, groups: int, count: int
) -> tuple[Inner, Inner]:
    batch, channels = m.shape_of(hats)
    space, rows = (batch, groups, channels // groups), (batch, groups, 1)
    m.shape = space

    def mean_of(value: Operand) -> Inner:
        each = m("same", m.spread_over(value, space, space))
        if weight is not None:
            each = m("mul", each, m.spread_over(weight, (1, *space[1:]), space))
        total = m.reduce("rsum", each, "row", rows, space[2]) if space[2] > 1 else each
        return m("div", total, float(count), shape=rows)

    return mean_of(hats), mean_of(sums)


@lower(GROUP_SLOPE)
def group_slope(
    m: Make, dy: Operand, x: Operand, mean: Operand, rstd: Operand, weight: Operand | None,
    mean_hat: Operand, mean_dy: Operand, groups: int,
) -> Inner:  # fmt: skip
    space = _space(m, x, groups)
    hat = _hat(m, x, mean, rstd, space)
    grad = m.spread_over(dy, space, space)
    own = m("same", grad) if weight is None else m("mul", grad, _per_channel(m, weight, space))
    along = m("mul", hat, _per_group(m, mean_hat, space))
    return m("mul", m.sub(m("sub", own, _per_group(m, mean_dy, space)), along), _per_group(m, rstd, space))
