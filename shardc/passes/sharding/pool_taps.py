"""Poolings along a sequence, and rows at a stride, as moves of rows: each tap of a window reads one row of a chunk.

    avg_pool1d(x, 3, stride=2, padding=1)     (tap 0 + tap 1 + tap 2) / how many of them are rows
    max_pool1d(x, 3, stride=2)                the greatest of the taps, and where it was; of equal ones the first
    x[:, 1::3]                                tap 1 alone

Windows of as many rows each as the stride leaves are fetched by `rules.halo`, unless the sequence may be a zigzag. Of a
pooling of planes the other dim is pooled as it was: means of any windows, maxima of single elements. Gradients go the
same way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import Graph, results, type_of
from shardc.ir.schema import given
from shardc.passes.normalize.decompositions.table import Emit
from shardc.passes.sharding.strided_taps import MOST_TAPS, Phases

aten = torch.ops.aten
MEANS = (aten.avg_pool2d.default, aten.avg_pool2d_backward.default)
MAXIMA = (aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default)
POOLS = (*MEANS, *MAXIMA)
SLICES = (aten.slice.Tensor, aten.slice_backward.default)


def every_so_many(graph: Graph, node: fx.Node, lengths: Collection[int]) -> int | None:
    """Rows at a stride, or their gradient; how many they are."""
    args, back = given(node), node.target is aten.slice_backward.default
    shape = list(args["input_sizes"]) if back else list(type_of(args["self"]).shape)
    dim, step = args.get("dim", 0) % max(1, len(shape)), args.get("step", 1)
    if step == 1 or shape[dim] not in lengths or type_of(node).ragged:
        return None
    start, end, _ = slice(args.get("start"), args.get("end"), step).indices(shape[dim])
    length = len(range(start, end, step))
    if not length:
        return None
    e = Emit(graph, node)
    with graph.fx.inserting_before(node):
        phases = Phases(e, shape, dim, [start % step], step, start % step - start, length)
        y = phases.joined([args["grad_output"]]) if back else next(phases.read(args["self"]))
        graph.replace_value(node, e.cast(y, type_of(node).dtype))
    return length


@dataclass(frozen=True)
class _Window:
    """Along the dim of a sequence, window i reads rows i * stride - padding + tap * dilation."""

    dim: int
    taps: int
    stride: int
    padding: int
    dilation: int
    size: int
    length: int

    def phases(self, e: Emit, shape: Sequence[int]) -> Phases:
        taps = [j * self.dilation for j in range(self.taps)]
        return Phases(e, shape, self.dim, taps, self.stride, self.padding, self.length)

    @property
    def inside(self) -> bool:
        """Are all that windows read rows?"""
        return not self.padding and (self.length - 1) * self.stride + (self.taps - 1) * self.dilation < self.size


def pool(graph: Graph, node: fx.Node, lengths: Collection[int], even: Collection[int]) -> int | None:
    """A pooling, or its gradient; how many rows it yields. Of a sequence of an `even` length, ranks have runs of
    rows, and windows that tile it stay what they are."""
    args = given(node)
    x, y = args["self"], args.get("grad_output", results(node)[0] if "grad_output" not in args else None)
    if y is None or not type_of(x).dtype.is_floating_point or type_of(x).ragged:
        return None
    for side in (0, 1):
        window, other = (_side(args, x, y, i) for i in (side, 1 - side))
        alone = (other.taps, other.stride, other.padding) == (1, 1, 0)
        tiled = window.length * window.stride == window.size and window.size in even
        fits = window.size in lengths and 1 < window.taps <= MOST_TAPS and not tiled
        if fits and (alone or node.target in MEANS) and other.size not in lengths:
            e = Emit(graph, node)
            with graph.fx.inserting_before(node):
                _WRITE[node.target](graph, e, node, window, other)
            return window.length
    return None


def _side(args: dict[str, Any], x: fx.Node, y: fx.Node, side: int) -> _Window:
    def of(name: str, default: int) -> int:
        told = list(args.get(name) or [default])
        return told[side if len(told) > 1 else 0]

    kernel, dim = of("kernel_size", 1), type_of(x).ndim - 2 + side
    told = of("stride", kernel), of("padding", 0), of("dilation", 1)
    return _Window(dim, kernel, *told, type_of(x).shape[dim], type_of(y).shape[dim])


# ------------------------------------------------------------------------------------------------ means
def _counts(e: Emit, node: fx.Node, window: _Window) -> fx.Node | int:
    """How many elements each mean is of: a number for each window where they differ."""
    args = given(node)
    if args.get("divisor_override"):
        return args["divisor_override"]
    if window.inside:
        return window.taps
    numbers = e(aten.arange.default, window.length, dtype=torch.int64)
    start = e(aten.sub.Tensor, e.mul(numbers, window.stride), window.padding)
    around = window.padding if args.get("count_include_pad", True) else 0
    end = e(aten.clamp.default, e.add(start, window.taps), None, window.size + around)
    count = e.sub(end, e(aten.clamp.default, start, -around))
    return e.along(count, window.dim, type_of(args["self"]).ndim)


def _other_options(node: fx.Node, other: _Window) -> tuple[Any, ...]:
    """The pooling along the other dim alone."""
    args = given(node)
    told = [[n if d == other.dim else plain for d in (type_of(args["self"]).ndim - 2, type_of(args["self"]).ndim - 1)]
            for n, plain in ((other.taps, 1), (other.stride, 1), (other.padding, 0))]  # fmt: skip
    divisor = 1 if args.get("divisor_override") else None
    return *told, args.get("ceil_mode", False), args.get("count_include_pad", True), divisor


def _divided(e: Emit, x: fx.Node, count: fx.Node | int) -> fx.Node:
    return e.div(x, count if isinstance(count, int) else e.cast(count, type_of(x).dtype))


def _mean(graph: Graph, e: Emit, node: fx.Node, window: _Window, other: _Window) -> None:
    x, total = given(node)["self"], None
    for rows in window.phases(e, type_of(x).shape).read(e.wide(x)):
        total = rows if total is None else e.add(total, rows)
    assert total is not None
    y = _divided(e, total, _counts(e, node, window))
    if (other.taps, other.stride, other.padding) != (1, 1, 0):
        y = e(aten.avg_pool2d.default, y, *_other_options(node, other))
    graph.replace_value(node, e.cast(y, type_of(node).dtype))


def _mean_backward(graph: Graph, e: Emit, node: fx.Node, window: _Window, other: _Window) -> None:
    args = given(node)
    g, shape = e.wide(args["grad_output"]), type_of(args["self"]).shape
    if (other.taps, other.stride, other.padding) != (1, 1, 0):
        between = [window.length if d == window.dim else n for d, n in enumerate(shape)]
        like = e(aten.full.default, between, 0, dtype=type_of(g).dtype)
        g = e(aten.avg_pool2d_backward.default, g, like, *_other_options(node, other))
    part = _divided(e, g, _counts(e, node, window))
    y = window.phases(e, shape).joined([part] * window.taps)
    graph.replace_value(node, e.cast(y, type_of(node).dtype))


# ------------------------------------------------------------------------------------------------ maxima
def _row(e: Emit, window: _Window, tap: int, ndim: int) -> fx.Node:
    """Which row the tap of each window reads."""
    numbers = e.mul(e(aten.arange.default, window.length, dtype=torch.int64), window.stride)
    return e.along(e.add(numbers, tap * window.dilation - window.padding), window.dim, ndim)


def _maximum(graph: Graph, e: Emit, node: fx.Node, window: _Window, other: _Window) -> None:
    x = given(node)["self"]
    ndim, shape = type_of(x).ndim, type_of(x).shape
    taps = list(window.phases(e, shape).read(x))
    best, where = None, None
    for tap in reversed(range(window.taps)):  # of equal ones the first, of NaNs the last
        row, value, better = _row(e, window, tap, ndim), taps[tap], None
        if not window.inside:
            inside = e(aten.bitwise_and.Tensor, e(aten.ge.Scalar, row, 0), e(aten.lt.Scalar, row, window.size))
            value, better = e.where(inside, value, -math.inf), inside
        if best is None or where is None:
            best, where = value, e.expand(row, type_of(value).shape)
            continue
        known = e(aten.eq.Tensor, best, best)
        least = e(aten.bitwise_or.Tensor, e(aten.ge.Tensor, value, best), e(aten.ne.Tensor, value, value))
        least = e(aten.bitwise_and.Tensor, least, known)
        better = least if better is None else e(aten.bitwise_and.Tensor, least, better)
        best, where = e.where(better, value, best), e.where(better, row, where)
    assert best is not None
    assert where is not None
    if window.dim == ndim - 2:  # a place in the plane
        columns = e.along(e(aten.arange.default, shape[-1], dtype=torch.int64), ndim - 1, ndim)
        where = e.add(e.mul(where, shape[-1]), columns)
    for value, found in zip(results(node), (best, where), strict=True):
        if value is not None:
            graph.replace_value(value, found)


def _maximum_backward(graph: Graph, e: Emit, node: fx.Node, window: _Window, other: _Window) -> None:
    args = given(node)
    g, places, shape = args["grad_output"], args["indices"], type_of(args["self"]).shape
    if window.dim == len(shape) - 2:
        places = e(aten.div.Tensor_mode, places, shape[-1], rounding_mode="floor")
    parts = [e.where(e(aten.eq.Tensor, places, _row(e, window, tap, len(shape))), g, 0.0) for tap in range(window.taps)]
    y = window.phases(e, shape).joined(parts)
    graph.replace_value(node, e.cast(y, type_of(node).dtype))


_WRITE: dict[Any, Callable[[Graph, Emit, fx.Node, _Window, _Window], None]] = {
    MEANS[0]: _mean,
    MEANS[1]: _mean_backward,
    MAXIMA[0]: _maximum,
    MAXIMA[1]: _maximum_backward,
}
