"""View analysis: each value as elements of a base value's memory, so that kernels read through views.

    %t = transpose(%x, 1, 2)            f32[8, 4, 16, 64] of x, strides (4096, 64, 256, 1)
    %v = view(%t, [8, 4, 1024])         a copy, since no strides describe it: a base with memory of its own

torch itself computes the strides, on the meta device, once for each distinct view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from shardc.ir.graph import Graph, results, type_of
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.storages import Operand, operand_layouts
from shardc.passes.fusion.analysis.iteration_space import Read, Shape, Strides, strided_runs

aten = torch.ops.aten
META = torch.device("meta")
VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default),
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
}  # fmt: skip


class StridedView(NamedTuple):
    """Elements `offset + sum(strides * index)` of the memory of `base`."""

    base: fx.Node
    shape: Shape
    strides: Strides
    offset: int = 0

    def read(self, shape: Shape) -> Read | None:
        """The view as an operand that is broadcast to `shape`; None if it cannot be."""
        missing = len(shape) - len(self.shape)
        if missing < 0:
            return None
        strides = [0] * missing
        for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True):
            if have not in (1, want):
                return None
            strides.append(0 if have == 1 else stride)
        return Read(self.base, strided_runs(shape, tuple(strides)), self.offset)


class ViewAnalysis:
    """The view that every value of a localized body is."""

    def __init__(self, graph: Graph, fusible: Container[Any], layouts: Mapping[fx.Node, Operand] | None = None) -> None:
        """`layouts` are the graph's, where the caller knows them."""
        self.of: dict[fx.Node, StridedView] = {}
        self.permuted: dict[fx.Node, tuple[int, ...]] = {}  # bases whose dims lie in another order in memory
        self.copying_views: set[fx.Node] = set()  # calls of view ops that copy
        self.irregular: set[fx.Node] = set()  # bases that no kernel reads: their memory has gaps or overlaps
        meta_views: dict[Any, Any] = {}
        self.layouts = layouts = operand_layouts(graph) if layouts is None else layouts
        for node in graph.placeholders:
            shape = type_of(node).local_shape(graph.mesh)
            self.of[node] = StridedView(node, shape, _contiguous_strides(shape))
        kinds: dict[int, tuple[bool, bool]] = {}  # by the id of an op: is it a view, and can it be fused?
        for node in graph.calls():
            values = [value for value in results(node) if value is not None]
            if (kind := kinds.get(id(node.target))) is None:
                kind = kinds[id(node.target)] = (node.target in VIEWS, node.target in fusible)
            is_view, is_fusible = kind
            if is_view and (views := self._view(node, meta_views)) is not None:
                shapes = [type_of(value).local_shape(graph.mesh) for value in values]
                if [view.shape for view in views] == shapes:
                    self.of.update(zip(values, views, strict=True))
                    continue
            if is_view:
                self.copying_views.add(node)
            is_contiguous = is_view or is_fusible
            for value in values:
                operand = layouts[value]
                contiguous = _contiguous_strides(operand.shape)
                if is_contiguous or operand.strides == contiguous:
                    self.of[value] = StridedView(value, operand.shape, contiguous)
                else:
                    self.of[value] = StridedView(value, operand.shape, operand.strides)
                    self._record_layout(value)

    def readable(self, value: fx.Node) -> bool:
        """Does the base's memory have no gaps, so that a kernel can read it?"""
        return self.of[value].base not in self.irregular

    def _record_layout(self, value: fx.Node) -> None:
        """Record the layout of a value that does not lie in the order of its dims."""
        view = self.of[value]
        if (order := _dim_order(view)) is not None:
            self.permuted[value] = order
        elif strided_runs(view.shape, view.strides) not in (((math.prod(view.shape), 1),), ((1, 0),)):
            self.irregular.add(value)

    def _view(self, node: fx.Node, meta_views: dict[Any, Any]) -> list[StridedView] | None:
        """The view that each used result is; None if the call copies."""
        (source,) = node.all_input_nodes
        memory = self.of[source]
        key = (node.target, memory.shape, memory.strides, memory.offset, str(node.args[1:]), str(node.kwargs))
        if key not in meta_views:
            meta_views[key] = _meta_view(node, memory)
        if meta_views[key] is None:
            return None
        every: list[tuple[Shape, Strides, int]] = meta_views[key]
        used = [i for i, value in enumerate(results(node)) if value is not None]
        return [StridedView(memory.base, *every[i]) for i in used]


@torch.no_grad()
def _meta_view(node: fx.Node, memory: StridedView) -> list[tuple[Shape, Strides, int]] | None:
    reach = memory.offset + sum(s * (n - 1) for n, s in zip(memory.shape, memory.strides, strict=True)) + 1
    x = torch.empty(max(reach, 1), device=META).as_strided(memory.shape, memory.strides, memory.offset)
    kernel = cast("Callable[..., Any]", KERNELS.get(node.target, node.target))
    result = kernel(x, *node.args[1:], **node.kwargs)
    tensors: list[torch.Tensor] = list(result) if isinstance(result, (list, tuple)) else [result]
    storage = x.untyped_storage()
    if any(tensor.untyped_storage() is not storage for tensor in tensors):
        return None
    return [(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())) for tensor in tensors]


@lru_cache(maxsize=65536)
def _contiguous_strides(shape: Shape) -> Strides:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _dim_order(memory: StridedView) -> tuple[int, ...] | None:
    """The order of its dims in which the value is contiguous; None if there is none."""
    order = tuple(sorted(range(len(memory.shape)), key=lambda d: (-memory.strides[d], memory.shape[d] == 1)))
    shape = tuple(memory.shape[d] for d in order)
    runs = strided_runs(shape, tuple(memory.strides[d] for d in order))
    return order if runs == ((math.prod(shape), 1),) else None
