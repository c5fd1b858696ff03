"""Which elements of whose memory a value is: views are looked through, so that a kernel reads what they look into.

    %t = transpose(%x, 1, 2)            f32[8, 4, 16, 64] of x, strides (4096, 64, 256, 1)
    %v = view(%t, [8, 4, 1024])         a copy, since no strides say that: memory of its own

torch itself is asked, on the meta device, once for each distinct view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from shardc.ir.graph import Graph, operands, results, type_of
from shardc.ir.ops.kernels import KERNELS
from shardc.ir.storages import strides as real_strides
from shardc.passes.fuse.spaces import Read, Shape, Strides, blocks

aten = torch.ops.aten
META = torch.device("meta")
VIEWS = {
    *(aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default),
    *(aten.transpose.int, aten.permute.default, aten.t.default, aten.unsqueeze.default, aten.expand.default),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int),
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int),
}  # fmt: skip


class Memory(NamedTuple):
    """Elements `offset + sum(strides * index)` of the memory of `base`."""

    base: fx.Node
    shape: Shape
    strides: Strides
    offset: int = 0

    def read(self, shape: Shape) -> Read | None:
        """As an operand that is broadcast to `shape`; None if it cannot be."""
        missing = len(shape) - len(self.shape)
        if missing < 0:
            return None
        strides = [0] * missing
        for have, want, stride in zip(self.shape, shape[missing:], self.strides, strict=True):
            if have not in (1, want):
                return None
            strides.append(0 if have == 1 else stride)
        return Read(self.base, blocks(shape, tuple(strides)), self.offset)


class Memories:
    """The memory of every value of a localized body."""

    def __init__(self, graph: Graph, fusible: Callable[[fx.Node], bool]) -> None:
        self.of: dict[fx.Node, Memory] = {}
        self.permuted: dict[fx.Node, tuple[int, ...]] = {}  # bases that lie in another order of their dims
        self.copies: set[fx.Node] = set()  # "views" that copy
        self.gaps: set[fx.Node] = set()  # bases whose memory no kernel walks: there are gaps in it, or it overlaps
        asked: dict[Any, Any] = {}
        real: Mapping[fx.Node, Strides] = real_strides(graph)
        for node in graph.placeholders:
            shape = type_of(node).local_shape(graph.mesh)
            self.of[node] = Memory(node, shape, _own(shape))
        for node in graph.calls():
            values = [value for value in results(node) if value is not None]
            if node.target in VIEWS and (made := self._view(node, asked)) is not None:
                shapes = [type_of(value).local_shape(graph.mesh) for value in values]
                if [one.shape for one in made] == shapes:
                    self.of.update(zip(values, made, strict=True))
                    continue
            if node.target in VIEWS:
                self.copies.add(node)
            kept = fusible(node) or node.target in VIEWS
            for value in values:
                shape = type_of(value).local_shape(graph.mesh)
                own = _own(shape)
                lies = own if kept else real.get(value, own)
                self.of[value] = Memory(value, shape, lies)
                if lies != own:
                    self._lies(value)

    def readable(self, value: fx.Node) -> bool:
        """Is the memory that it is a view of gapless, so that a kernel can walk it?"""
        return self.of[value].base not in self.gaps

    def _lies(self, value: fx.Node) -> None:
        """Note of a value how it lies, where that is not in the order of its dims."""
        home = self.of[value]
        if (order := _order(home)) is not None:
            self.permuted[value] = order
        elif blocks(home.shape, home.strides) not in (((math.prod(home.shape), 1),), ((1, 0),)):
            self.gaps.add(value)

    def _view(self, node: fx.Node, asked: dict[Any, Any]) -> list[Memory] | None:
        """What each result in use looks into; None if it is a copy."""
        (source,) = operands(node)
        memory = self.of[source]
        key = (node.target, memory.shape, memory.strides, memory.offset, str(node.args[1:]), str(node.kwargs))
        if key not in asked:
            asked[key] = _ask(node, memory)
        if asked[key] is None:
            return None
        every: list[tuple[Shape, Strides, int]] = asked[key]
        used = [i for i, value in enumerate(results(node)) if value is not None]
        return [Memory(memory.base, *every[i]) for i in used]


@torch.no_grad()
def _ask(node: fx.Node, memory: Memory) -> list[tuple[Shape, Strides, int]] | None:
    reach = memory.offset + sum(s * (n - 1) for n, s in zip(memory.shape, memory.strides, strict=True)) + 1
    x = torch.empty(max(reach, 1), device=META).as_strided(memory.shape, memory.strides, memory.offset)
    kernel = cast("Callable[..., Any]", KERNELS.get(node.target, node.target))
    found = kernel(x, *node.args[1:], **node.kwargs)
    every: list[torch.Tensor] = list(found) if isinstance(found, (list, tuple)) else [found]
    home = x.untyped_storage()
    if any(one.untyped_storage() is not home for one in every):
        return None
    return [(tuple(one.shape), one.stride(), int(one.storage_offset())) for one in every]


@lru_cache(maxsize=65536)
def _own(shape: Shape) -> Strides:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _order(memory: Memory) -> tuple[int, ...] | None:
    """The order of its dims in which a value is contiguous; None if there is none."""
    order = tuple(sorted(range(len(memory.shape)), key=lambda d: (-memory.strides[d], memory.shape[d] == 1)))
    shape = tuple(memory.shape[d] for d in order)
    own = blocks(shape, tuple(memory.strides[d] for d in order))
    return order if own == ((math.prod(shape), 1),) else None
