"""Kernels store what attention reads as attention's results lie in memory: [batch, rows, heads, head].

    %q = fused([%x, ...], "rope[2,32,4096|64](...){...}->bf16[2,32,4096,128]")
    ->
    %fused_rope = fused([%x, ...], "rope[2,4096,32|64](...){...}->bf16[2,4096,32,128]")
    %q = transpose(%fused_rope, 1, 2)                                  bf16[2, 32, 4096, 128]

GPU kernels of attention give results that lie as their queries do, and gradients as their operands, while `sdpa`
promises [batch, rows, heads, head]. With queries in another order, three results of each layer would be copied.

A kernel's arithmetic stays as it is. Only the addresses of its stores change, and the order in which an elementwise
kernel goes through rows: that of its stores. Values that anything but attention reads stay where they are, and so do
outputs, as what a pipeline's stage keeps for its backward is.

Needs a graph with its kernels. Ensures the same values under the same names, in as much memory.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import fx

from kernels_triton.generated.op import FUSED
from kernels_triton.ir.access_map import AccessMap
from kernels_triton.ir.kernel import INDEXED, Kernel, Output
from kernels_triton.ir.table import OPS
from kernels_triton.ir.text import parse, text
from shardc.ir.graph import Graph, info, producer, type_of, update
from shardc.ir.ops.attention import SDPA, SDPA_BWD
from shardc.ir.types import TensorType

ORDER = (0, 2, 1, 3)  # [batch, heads, rows, head] -> [batch, rows, heads, head], and back
OPERANDS = {SDPA: 3, SDPA_BWD: 4}  # the first operands of each: q, k, v; the gradient, q, k, v


def store_as_attention_reads(graph: Graph) -> None:
    """Rewrite the kernels, in place, whose results attention reads."""
    outputs = set(graph.output_values)
    for target, count in OPERANDS.items():
        for call in graph.calls_of(target):
            for value in dict.fromkeys(cast("Sequence[fx.Node]", call.args[:count])):
                if value.target is operator.getitem and value not in outputs and all(map(_is_attention, value.users)):
                    _reorder(graph, value)


def _is_attention(call: fx.Node) -> bool:
    return call.target in OPERANDS


def _reorder(graph: Graph, value: fx.Node) -> None:
    call, index = producer(value)
    if call.target is not FUSED:  # templates store in the order of their rows
        return
    kernel = reordered(parse(str(call.args[1])), index)
    if kernel is None:
        return
    about, type = info(value), type_of(value)
    stored = replace(type, dims=tuple(type.dims[d] for d in ORDER))
    with graph.fx.inserting_after(value):
        view = graph.call(torch.ops.aten.transpose.int, (value, 1, 2), like=value, type=type)
    graph.replace_value(value, view)
    update(view, name=about.name)
    update(value, name=graph.unique(f"{about.name}.rows"), type=stored)
    call.args = (call.args[0], text(kernel))
    types = list(cast("Sequence[TensorType]", info(call).results))
    types[index] = stored
    update(call, results=tuple(types))


def reordered(kernel: Kernel, index: int) -> Kernel | None:
    """The kernel that stores result `index` in that order; None if it is in that order already, or cannot be."""
    output = kernel.outputs[index]
    if len(output.shape) != 4 or output.padded or 1 in output.shape[1:3]:
        return None
    maps = [_reordered_map(store.access_map, kernel.space, output.shape) for store in output.stores]
    stores = tuple(replace(s, access_map=to) for s, to in zip(output.stores, maps, strict=True) if to is not None)
    if len(stores) < len(maps):
        return None
    outputs = list(kernel.outputs)
    outputs[index] = Output(output.dtype, tuple(output.shape[d] for d in ORDER), stores)
    changed = replace(kernel, outputs=tuple(outputs))
    is_elementwise = not any(OPS[step.op].reduces or step.op in INDEXED for step in kernel.steps)
    return _in_order_of_stores(changed, stores[0].access_map) if is_elementwise else changed


def _reordered_map(access_map: AccessMap, space: Sequence[int], shape: Sequence[int]) -> AccessMap | None:
    """Where elements of a tensor lie if its dims are in the new order; None if no strides say so, since a dim of the
    space goes through several dims of the tensor."""
    before = [math.prod(shape[d + 1 :]) for d in range(4)]
    after = [math.prod(shape[other] for other in ORDER[ORDER.index(d) + 1 :]) for d in range(4)]
    first = [access_map.offset // before[d] % shape[d] for d in range(4)]
    last, strides = list(first), list[int]()
    for stride, size in zip(access_map.strides, space, strict=True):
        if not stride:
            strides.append(0)
            continue
        dim = next((d for d in range(4) if shape[d] > 1 and abs(stride) >= before[d]), None)
        if dim is None or stride < 0 or stride % before[dim]:
            return None
        step = stride // before[dim]
        last[dim] += step * (size - 1)
        strides.append(step * after[dim])
    if any(top >= size for top, size in zip(last, shape, strict=True)):
        return None
    return AccessMap(sum(at * weight for at, weight in zip(first, after, strict=True)), tuple(strides))


def _in_order_of_stores(kernel: Kernel, stores: AccessMap) -> Kernel:
    """The kernel with the rows of its space in the order in which they are stored."""
    first, last = kernel.batch, len(kernel.space) - 1
    rows = sorted(range(first, last), key=lambda dim: -stores.strides[dim])
    order = (*range(first), *rows, last)

    def moved(access_map: AccessMap) -> AccessMap:
        return AccessMap(access_map.offset, tuple(access_map.strides[d] for d in order))

    inputs = tuple(replace(x, access_map=moved(x.access_map)) for x in kernel.inputs)
    outputs = tuple(
        replace(y, stores=tuple(replace(s, access_map=moved(s.access_map)) for s in y.stores)) for y in kernel.outputs
    )
    return replace(kernel, space=tuple(kernel.space[d] for d in order), inputs=inputs, outputs=outputs)
