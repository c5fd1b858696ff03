"""GroupNorm in kernels: the statistics where x is computed, the elementwise part where the result is read.

    %y, %mean, %rstd = native_group_norm(%x)   ->   %means, %squares = group_moments(%x)        a row is a channel
                                                    %mean, %rstd = group_stats(%means, %squares)      a few numbers
    %s = silu(%y)                                   %s = silu(group_apply(%x, %mean, %rstd, ...))

A channel's weight changes within a group, so a group cannot be a row of a kernel; a channel can. The kernel that
computes x (a bias, a residual) also computes the moments: x is then read once, and s is written once. Backward is split
likewise: the sums of each channel in one kernel, the gradient in another, with the activation's gradient rematerialised
in both.

The statistics are float32, and stay float32 for backward, as they are inside torch's kernels.
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
from shardc.ir.storages import operand_layouts
from shardc.ir.types import TensorType
from shardc.passes.fusion.analysis.iteration_space import Read, Shape
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, Temporary, lower

aten = torch.ops.aten
FORWARD, BACKWARD = aten.native_group_norm.default, aten.native_group_norm_backward.default
GROUP_NORMS = (FORWARD, BACKWARD)
NARROW = (torch.bfloat16, torch.float16, torch.float32)  # kernels reduce in float32


def split_group_norms(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Split group norms, in place, where kernels can read their memory."""
    norms = [
        node
        for node in graph.calls()
        if node.target in GROUP_NORMS and op_name(node.target) not in exclude and info(node).name not in exclude
    ]
    if not norms:
        return
    splitter = GroupNormSplitter(graph)
    for node in norms:
        tensors = [arg for arg in node.args if isinstance(arg, fx.Node) and type_of(arg).shape[2:]]
        if tensors and all(splitter.is_walkable(tensor) for tensor in tensors):
            with graph.fx.inserting_before(node):
                rewrite: Callable[..., None] = splitter.forward if node.target is FORWARD else splitter.backward
                rewrite(node, *node.args)


class GroupNormSplitter:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.layouts = graph, operand_layouts(graph)
        self.exact: dict[fx.Node, fx.Node] = {}  # statistics as forward returns them -> in float32

    def is_walkable(self, x: fx.Node) -> bool:
        shape = type_of(x).local_shape(self.graph.mesh)
        contiguous = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        actual = self.layouts[x].strides if x in self.layouts else contiguous
        strides = [s for s, n in zip(actual, shape, strict=True) if n > 1]
        return type_of(x).dtype in NARROW and strides == [s for s, n in zip(contiguous, shape, strict=True) if n > 1]

    def call(self, target: Any, *args: Any, like: fx.Node, type: TensorType) -> fx.Node:
        return self.graph.call(target, args, like=like, type=type)

    def call_with_results(self, target: Any, *args: Any, like: fx.Node, types: Sequence[TensorType]) -> list[fx.Node]:
        call = self.graph.call(target, args, like=like, type=None, results=tuple(types))
        items: list[fx.Node] = []
        for index, type in enumerate(types):
            items.append(self.graph.fx.call_function(operator.getitem, (call, index)))
            name = self.graph.unique(f"{info(call).name}.{index}")
            set_info(items[-1], replace(info(like), name=name, type=type, results=()))
        return items

    def per_group_type(self, x: fx.Node, groups: int) -> TensorType:
        """The type of one number per group of x. The groups are the major part of the channel dim."""
        batch, channels = type_of(x).dims[:2]
        size, atoms = 1, 0
        while size < groups:
            size *= channels[atoms].local(self.graph.mesh)
            atoms += 1
        return TensorType(torch.float32, (batch, channels[:atoms]))

    def replace_value(self, old: fx.Node, new: fx.Node) -> None:
        """Let a new value take the uses and the name of a result."""
        old.replace_all_uses_with(new)
        about, self.exact[new] = info(old), self.exact.get(old, old)
        set_info(old, replace(about, name=f"{about.name} (split)"))
        set_info(new, about)
        for table in (self.graph.activations, self.graph.gradients):
            table.update({name: new for name, value in table.items() if value is old})

    def erase(self, node: fx.Node) -> None:
        for item in list(node.users):
            self.graph.fx.erase_node(item)
        self.graph.fx.erase_node(node)

    def forward(
        self, node: fx.Node, x: fx.Node, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
    ) -> None:
        channel = TensorType(torch.float32, type_of(x).dims[:2])
        moments = self.call_with_results(GROUP_MOMENTS, x, like=node, types=[channel, channel])
        stats = self.call_with_results(
            GROUP_STATS, *moments, groups, hw, eps, like=node, types=[self.per_group_type(x, groups)] * 2
        )
        for value in results(node):
            if value is None:
                continue
            index, type = int(value.args[1]), type_of(value)  # type: ignore[arg-type]
            if index == 0:
                self.replace_value(value, self.call(GROUP_APPLY, x, *stats, weight, bias, groups, like=node, type=type))
                continue
            stat = stats[index - 1]
            if type.dtype != torch.float32:
                stat = self.graph.call(aten._to_copy.default, (stat,), {"dtype": type.dtype}, like=node, type=type)
            self.replace_value(value, stat)
            self.exact[stat] = stats[index - 1]
        self.erase(node)

    def backward(
        self, node: fx.Node, dy: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, weight: Any,
        n: int, c: int, hw: int, groups: int, wanted: Sequence[bool],
    ) -> None:  # fmt: skip
        channel = TensorType(torch.float32, type_of(x).dims[:2])
        stats = [self.exact.get(stat, stat) for stat in (mean, rstd)]
        sums = self.call_with_results(GROUP_SUMS, dy, x, *stats, groups, like=node, types=[channel, channel])
        for value in results(node):
            if value is None:
                continue
            index, type = int(value.args[1]), type_of(value)  # type: ignore[arg-type]
            if index == 0:
                count = c // groups * hw
                groups_of = [self.per_group_type(x, groups)] * 2
                means = self.call_with_results(GROUP_MEANS, *sums, weight, groups, count, like=node, types=groups_of)
                args = (dy, x, *stats, weight, *means, groups)
                self.replace_value(value, self.call(GROUP_SLOPE, *args, like=node, type=type))
                continue
            exact = replace(type, dtype=torch.float32)
            total = self.call(aten.sum.dim_IntList, sums[index - 1], [0], like=node, type=exact)
            if type.dtype != torch.float32:
                total = self.graph.call(aten._to_copy.default, (total,), {"dtype": type.dtype}, like=node, type=type)
            self.replace_value(value, total)
        self.erase(node)


# ---------------------------------------------------------------------- as kernels
def _group_shape(m: LoweringBuilder, x: Operand, groups: int) -> Shape:
    """(batch, groups, channels of a group, positions)"""
    shape = m.shape_of(x)
    if len(shape) < 3 or math.prod(shape[2:]) == 1:
        raise NotLowerable
    return (shape[0], groups, shape[1] // groups, math.prod(shape[2:]))


def _per_group(m: LoweringBuilder, x: Operand, group_shape: Shape) -> Read | float | int | bool:
    return m.broadcast(x, (*group_shape[:2], 1, 1), group_shape)


def _per_channel(m: LoweringBuilder, x: Operand, group_shape: Shape) -> Read | float | int | bool:
    return m.broadcast(x, (1, *group_shape[1:3], 1), group_shape)


def _normalized(m: LoweringBuilder, x: Operand, mean: Operand, rstd: Operand, group_shape: Shape) -> Temporary:
    m.shape = group_shape
    values, average, scale = (
        m.broadcast(x, group_shape, group_shape),
        _per_group(m, mean, group_shape),
        _per_group(m, rstd, group_shape),
    )
    return m("mul", m("sub", values, average), scale)


@lower(GROUP_MOMENTS)
def group_moments(m: LoweringBuilder, x: Operand) -> tuple[Temporary, Temporary]:
    batch, _, channels, cols = _group_shape(m, x, 1)
    rows = (batch, channels, 1)
    m.shape = (batch, channels, cols)
    values = m("same", m.broadcast(x, m.shape, m.shape))
    mean = m("div", m.reduce("rsum", values, "row", rows, cols), float(cols), shape=rows)
    return mean, m.reduce("rsum", m("square", m.sub(values, mean)), "row", rows, cols)


@lower(GROUP_STATS)
def group_stats(
    m: LoweringBuilder, means: Operand, squares: Operand, groups: int, size: int, eps: float
) -> tuple[Temporary, Temporary]:
    batch, channels = m.shape_of(means)
    group_shape, rows, cols = (batch, groups, channels // groups), (batch, groups, 1), channels // groups
    m.shape = group_shape
    each, within = (m("same", m.broadcast(x, group_shape, group_shape)) for x in (means, squares))

    def total(value: Temporary) -> Temporary:
        return m.reduce("rsum", value, "row", rows, cols) if cols > 1 else value

    mean = m("div", total(each), float(cols), shape=rows)
    between = m("mul", total(m("square", m.sub(each, mean))), float(size), shape=rows)
    variance = m("div", m("add", total(within), between, shape=rows), float(cols * size), shape=rows)
    return mean, m("rsqrt", m("add", variance, eps, shape=rows), shape=rows)


@lower(GROUP_APPLY)
def group_apply(
    m: LoweringBuilder,
    x: Operand,
    mean: Operand,
    rstd: Operand,
    weight: Operand | None,
    bias: Operand | None,
    groups: int,
) -> Temporary:
    group_shape = _group_shape(m, x, groups)
    y = _normalized(m, x, mean, rstd, group_shape)
    y = y if weight is None else m("mul", y, _per_channel(m, weight, group_shape))
    return y if bias is None else m("add", y, _per_channel(m, bias, group_shape))


@lower(GROUP_SUMS)
def group_sums(
    m: LoweringBuilder, dy: Operand, x: Operand, mean: Operand, rstd: Operand, groups: int
) -> tuple[Temporary, Temporary]:
    group_shape = _group_shape(m, x, groups)
    rows, cols = (*group_shape[:3], 1), group_shape[3]
    hat = _normalized(m, x, mean, rstd, group_shape)
    grad = m("same", m.broadcast(dy, group_shape, group_shape))
    return m.reduce("rsum", m.mul(grad, hat), "row", rows, cols), m.reduce("rsum", grad, "row", rows, cols)


@lower(GROUP_MEANS)
def group_means(
    m: LoweringBuilder, hats: Operand, sums: Operand, weight: Operand | None, groups: int, count: int
) -> tuple[Temporary, Temporary]:
    batch, channels = m.shape_of(hats)
    group_shape, rows = (batch, groups, channels // groups), (batch, groups, 1)
    m.shape = group_shape

    def mean_of(value: Operand) -> Temporary:
        each = m("same", m.broadcast(value, group_shape, group_shape))
        if weight is not None:
            each = m("mul", each, m.broadcast(weight, (1, *group_shape[1:]), group_shape))
        total = m.reduce("rsum", each, "row", rows, group_shape[2]) if group_shape[2] > 1 else each
        return m("div", total, float(count), shape=rows)

    return mean_of(hats), mean_of(sums)


@lower(GROUP_SLOPE)
def group_slope(
    m: LoweringBuilder, dy: Operand, x: Operand, mean: Operand, rstd: Operand, weight: Operand | None,
    mean_hat: Operand, mean_dy: Operand, groups: int,
) -> Temporary:  # fmt: skip
    group_shape = _group_shape(m, x, groups)
    hat = _normalized(m, x, mean, rstd, group_shape)
    grad = m.broadcast(dy, group_shape, group_shape)
    scaled = m("same", grad) if weight is None else m("mul", grad, _per_channel(m, weight, group_shape))
    projection = m("mul", hat, _per_group(m, mean_hat, group_shape))
    return m(
        "mul",
        m.sub(m("sub", scaled, _per_group(m, mean_dy, group_shape)), projection),
        _per_group(m, rstd, group_shape),
    )
