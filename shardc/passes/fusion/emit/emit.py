"""Writes fusion groups into the graph: one call each, whose results keep the names of the values that they replace.

    %fused_add_tanh.0, %mlp.tanh = shardc.fused([%mlp.mm, %mlp.bias], "fused_add_tanh[...](...){...}->...")
    %mlp.gelu = shardc.fused([%mlp.mm, %mlp.bias], "fused_add_gelu[...](...){...}->...")

A kernel that computes what a template does becomes the template's op; every other becomes `shardc.fused`.

Calls are then ordered. Barriers keep their order; every other call stays as near to its old place as its operands
allow.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import torch
from torch import fx

import kernels_triton.generated.inplace_call  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what runs in place)
from kernels_triton.generated.op import FUSED
from kernels_triton.ir.text import text
from kernels_triton.match.op import OPS
from shardc.ir.graph import Graph, Phase, ValueInfo, info, insert, producer, set_info, type_of
from shardc.passes.fusion.analysis.iteration_space import contiguous_runs
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.emit.kernel_builder import BuiltKernel, KernelCache

LARGE_OPERAND = 1 << 16  # elements
PHASES: tuple[Phase, ...] = get_args(Phase)


def is_profitable(group: FusionGroup) -> bool:
    """Should the group become a kernel? A single operation already is one in torch, and a good one unless it
    broadcasts."""
    return bool(group.reads) and (len(group.calls) > 1 or len(group.prims) > 1 or _broadcasts(group))


def _broadcasts(group: FusionGroup) -> bool:
    """Is a large operand read beside one that is repeated? torch then loads the elements of both one by one."""
    (prim,) = group.prims
    is_contiguous = {read.runs == contiguous_runs(prim.size) for read in prim.reads}
    return prim.over == "point" and prim.op != "cat" and prim.size >= LARGE_OPERAND and is_contiguous == {True, False}


def emit(
    fusion_graph: FusionGraph, groups: Sequence[FusionGroup], templates: Collection[str] = tuple(OPS)
) -> list[int]:
    """Replace the calls of each group by its kernel, and order all calls. Returns the position of each kernel."""
    graph = fusion_graph.body
    barriers = set(fusion_graph.barriers)
    places = {
        fusion_graph.calls[i]: (fusion_graph.barrier_epoch[i], i in barriers, i) for i in range(fusion_graph.call_count)
    }
    replaced: dict[fx.Node, fx.Node] = {}
    fused_calls: list[fx.Node] = []
    kernel_calls: list[fx.Node] = []
    cache = KernelCache(graph, fusion_graph.views, templates)
    for group in groups:
        built = cache.build(group.prims, group.constraint, group.outputs)
        call = _call(fusion_graph, group, built, replaced)
        kernel_calls.append(call)
        places[call] = (group.barrier_epoch, False, group.calls[0])
        fused_calls += [fusion_graph.calls[i] for i in group.calls]
    for old, new in replaced.items():
        old.replace_all_uses_with(new)
    for table in (graph.activations, graph.gradients):
        table.update({name: replaced.get(value, value) for name, value in table.items()})
    _erase(graph, fused_calls)
    graph.erase_dead()
    _reorder(graph, places)
    position = {call: i for i, call in enumerate(graph.calls())}
    return [position[call] for call in kernel_calls]


def _call(
    fusion_graph: FusionGraph, group: FusionGroup, built: BuiltKernel, replaced: dict[fx.Node, fx.Node]
) -> fx.Node:
    """The kernel's call and its getitems, at the end of the graph for now."""
    graph, nodes = fusion_graph.body, [fusion_graph.calls[i] for i in group.calls]
    first = info(nodes[0])
    phase = PHASES[max(PHASES.index(info(node).phase) for node in nodes)]
    with graph.fx.inserting_before(graph.output_node):
        permuted = {
            value: _in_memory_order(fusion_graph, replaced.get(value, value), value)
            for value in dict.fromkeys(built.inputs)
        }
        inputs = [permuted[value] for value in built.inputs]
        call = insert(graph.fx, OPS.get(built.kernel.name, FUSED), (inputs, text(built.kernel)))
        about = info(max(nodes, key=lambda node: PHASES.index(info(node).phase)))
        prefix = f"d.{about.fqn}" if phase == "bwd" and about.fqn else "d" if phase == "bwd" else about.fqn
        prefix = ".".join(filter(None, ("opt", first.fqn))) if phase == "opt" else prefix
        name = graph.unique(".".join(filter(None, (prefix, built.kernel.name))))
        types = tuple(type_of(value) for value in built.outputs)
        constant = all(info(producer(value)[0]).constant for value in built.outputs)
        call_info = ValueInfo(
            name,
            None,
            types,
            about.fqn,
            about.source,
            about.source_text,
            phase=phase,
            constant=constant,
            cause=about.cause,
            origin=about.origin if all(info(node).is_recomputed for node in nodes) else None,
        )
        set_info(call, call_info)
        for number, value in enumerate(built.outputs):
            item = insert(graph.fx, operator.getitem, (call, number))
            set_info(item, info(value))
            replaced[value] = item
    return call


def _in_memory_order(fusion_graph: FusionGraph, value: fx.Node, base: fx.Node) -> fx.Node:
    """The operand with its dims in the order in which they lie in memory: a kernel reads memory in order."""
    order = fusion_graph.views.permuted.get(base)
    if order is None:
        return value
    type = type_of(base)
    permuted = replace(type, dims=tuple(type.dims[d] for d in order))
    permute = torch.ops.aten.permute.default
    return fusion_graph.body.call(permute, (value, list(order)), like=producer(base)[0], type=permuted)


def _erase(graph: Graph, calls: Sequence[fx.Node]) -> None:
    for call in reversed(calls):
        for item in [user for user in call.users if user.target is operator.getitem]:
            if not item.users:
                graph.fx.erase_node(item)


def _reorder(graph: Graph, places: Mapping[fx.Node, tuple[int, bool, int]]) -> None:
    """Order the calls: each after its operands, and among those that are ready, the one with the earliest place."""
    calls = list(graph.calls())
    waiting = {call: {producer(v)[0] for v in call.all_input_nodes if v.op != "placeholder"} for call in calls}
    barriers = sorted((call for call in calls if call in places and places[call][1]), key=places.__getitem__)
    for first, second in pairwise(barriers):
        waiting[second].add(first)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for call, sources in waiting.items():
        for source in sources:
            readers.setdefault(source, []).append(call)
    key = {call: places.get(call) for call in calls}
    for call in reversed(calls):  # a permuted operand comes right before its reader
        if key[call] is None:
            key[call] = min(k for user in readers[call] if (k := key[user]) is not None)
    ready = [(key[call], number, call) for number, call in enumerate(calls) if not waiting[call]]
    heapq.heapify(ready)  # type: ignore[arg-type]
    numbers = {call: number for number, call in enumerate(calls)}
    last = graph.placeholders[-1] if graph.placeholders else None
    while ready:
        _, _, call = heapq.heappop(ready)  # type: ignore[type-var]
        for node in (call, *[user for user in call.users if user.target is operator.getitem]):
            if last is not None:
                last.append(node)
            last = node
        for reader in readers.get(call, ()):
            waiting[reader].discard(call)
            if not waiting[reader]:
                heapq.heappush(ready, (key[reader], numbers[reader], reader))  # type: ignore[type-var]
    assert all(not sources for sources in waiting.values()), "the merged graph has a cycle"
