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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import fx

import kernels_triton.generated.inplace_call  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers what runs in place)
from kernels_triton.generated.op import FUSED
from kernels_triton.ir.text import text
from kernels_triton.match.op import OPS
from shardc.ir.graph import Graph, Phase, ValueInfo, info, insert, keep_atoms, producer, set_info, type_of
from shardc.passes.fusion.analysis.iteration_space import contiguous_runs
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.emit.kernel_builder import KernelCache

LARGE_OPERAND = 1 << 16  # elements
SLOW_SUMS = range(17, 256)  # rows
PHASES: tuple[Phase, ...] = get_args(Phase)


def is_profitable(group: FusionGroup) -> bool:
    """Should the group become a kernel? A single operation already is one in torch, and a good one unless it
    broadcasts or sums many rows."""
    several = len(group.calls) > 1 or len(group.prims) > 1
    return bool(group.reads) and (several or _broadcasts(group) or _sums_rows(group))


def _broadcasts(group: FusionGroup) -> bool:
    """Is a large operand read beside one that is repeated? torch then loads the elements of both one by one."""
    (prim,) = group.prims
    is_contiguous = {read.runs == contiguous_runs(prim.size) for read in prim.reads}
    return prim.over == "point" and prim.op != "cat" and prim.size >= LARGE_OPERAND and is_contiguous == {True, False}


def _sums_rows(group: FusionGroup) -> bool:
    """Are columns summed, as for a bias's gradient? On an H200 torch's kernel takes 1.5 times as long for 8192 rows of
    4096 bfloat16 numbers, 1.1 for 16,384, 2.2 for 2048, 3.1 for 768, and 1.9 for 4 rows of 4 million. Of 64 and 128
    rows it is the faster one (CUDA graphs, torch 2.11)."""
    (prim,) = group.prims
    return prim.op == "csum" and prim.size >= LARGE_OPERAND and prim.size // prim.cols not in SLOW_SUMS


@dataclass(eq=False)
class _NewCall:
    """A call that the body does not have: a kernel, or the permutation of an operand in memory. `reads` are values of
    the body, and permutations."""

    target: Any
    reads: list[fx.Node | _NewCall]
    arguments: tuple[Any, ...]  # after the operands
    info: ValueInfo
    results: tuple[fx.Node, ...] = ()  # the values of the body that it yields; none of a permutation


_Call = fx.Node | _NewCall
_Place = tuple[int, bool, int]


class Emitter:
    """Writes the groups of a fusion graph into new graphs. Kernels are built once."""

    def __init__(self, fusion_graph: FusionGraph, templates: Collection[str] = tuple(OPS)) -> None:
        self.fusion_graph = fusion_graph
        self.cache = KernelCache(fusion_graph.body, fusion_graph.lowerings, templates)
        barriers = set(fusion_graph.barriers)
        self.places: dict[_Call, _Place] = {
            call: (fusion_graph.barrier_epoch[i], i in barriers, i) for i, call in enumerate(fusion_graph.calls)
        }

    def emit(self, groups: Sequence[FusionGroup]) -> tuple[Graph, list[int]]:
        """A graph that calls each group's kernel instead of the group's calls; and the position of each kernel."""
        body = self.fusion_graph.body
        graph, table = body.emptied()
        new_calls: list[_NewCall] = []
        kernels: list[_NewCall] = []
        places = dict(self.places)
        for group in groups:
            new_calls += self._kernel_calls(graph, group)
            kernels.append(new_calls[-1])
            places[new_calls[-1]] = (group.barrier_epoch, False, group.calls[0])
        kernel_of = {value: call for call in kernels for value in call.results}
        sources = _sources_of_live_calls(body, kernel_of)
        calls: list[_Call] = [call for call in (*body.calls(), *new_calls) if call in sources]
        order = _ordered(calls, sources, places)
        read = {value for call in calls for value in _values_read(call)} | set(body.output_values)
        for call in order:
            self._write(graph, call, table, read)
        graph.finish_copy(body, table)
        position = {call: i for i, call in enumerate(order)}
        return graph, [position[call] for call in kernels]

    def _write(self, graph: Graph, call: _Call, table: dict[Any, fx.Node], read: set[fx.Node]) -> None:
        """Add a call and those of its results that something reads."""
        if isinstance(call, fx.Node):
            node = graph.append_copy(call, table)
            for item in call.users if info(call).type is None else ():
                if item in read:
                    graph.append_copy(item, table)
                else:
                    keep_atoms(node, item)
            return
        operands = [table[value] for value in call.reads]
        node = insert(graph.fx, call.target, (operands if call.results else operands[0], *call.arguments))
        set_info(node, call.info)
        table[call] = node
        for number, value in enumerate(call.results):
            if value in read:
                table[value] = insert(graph.fx, operator.getitem, (node, number))
                set_info(table[value], info(value))
            else:
                keep_atoms(node, value)

    def _kernel_calls(self, graph: Graph, group: FusionGroup) -> list[_NewCall]:
        """The call of a group's kernel, after those that permute its operands."""
        built = self.cache.build(group.prims, group.constraint, group.outputs)
        nodes = [self.fusion_graph.calls[i] for i in group.calls]
        permuted: dict[fx.Node, fx.Node | _NewCall] = {
            value: self._in_memory_order(graph, value) for value in dict.fromkeys(built.inputs)
        }
        first = info(nodes[0])
        ranks = [PHASES.index(self.fusion_graph.phases[i]) for i in group.calls]
        phase = PHASES[max(ranks)]
        about = info(nodes[ranks.index(max(ranks))])
        prefix = f"d.{about.fqn}" if phase == "bwd" and about.fqn else "d" if phase == "bwd" else about.fqn
        prefix = ".".join(filter(None, ("opt", first.fqn))) if phase == "opt" else prefix
        name = graph.unique(".".join(filter(None, (prefix, built.kernel.name))))
        types = tuple(type_of(value) for value in built.outputs)
        call_info = ValueInfo(
            name,
            None,
            types,
            about.fqn,
            about.source,
            about.source_text,
            phase=phase,
            constant=all(info(producer(value)[0]).constant for value in built.outputs),
            cause=about.cause,
            origin=about.origin if all(info(node).is_recomputed for node in nodes) else None,
        )
        inputs = [permuted[value] for value in built.inputs]
        target = OPS.get(built.kernel.name, FUSED)
        kernel = _NewCall(target, inputs, (text(built.kernel),), call_info, built.outputs)
        return [*(call for call in permuted.values() if isinstance(call, _NewCall)), kernel]

    def _in_memory_order(self, graph: Graph, value: fx.Node) -> fx.Node | _NewCall:
        """The operand with its dims in the order in which they lie in memory: a kernel reads memory in order."""
        order = self.fusion_graph.views.permuted.get(value)
        if order is None:
            return value
        type = type_of(value)
        type = replace(type, dims=(*[type.dims[d] for d in order], *type.dims[type.ndim :]))
        permute = torch.ops.aten.permute.default
        return _NewCall(permute, [value], (list(order),), graph.info_like(producer(value)[0], permute, type))


def _values_read(call: _Call) -> list[fx.Node]:
    """The values of the body that a call reads."""
    return call.all_input_nodes if isinstance(call, fx.Node) else [v for v in call.reads if isinstance(v, fx.Node)]


def _sources_of_live_calls(body: Graph, kernel_of: Mapping[fx.Node, _NewCall]) -> dict[_Call, set[_Call]]:
    """The calls on which the body's outputs depend, each with those whose results it reads."""
    sources: dict[_Call, set[_Call]] = {}

    def sources_of(values: Iterable[fx.Node]) -> set[_Call]:
        return {kernel_of[v] if v in kernel_of else producer(v)[0] for v in values if v.op != "placeholder"}

    todo = list(sources_of(body.output_values))
    while todo:
        call = todo.pop()
        if call not in sources:
            sources[call] = sources_of(_values_read(call))
            if isinstance(call, _NewCall):
                sources[call].update([read for read in call.reads if isinstance(read, _NewCall)])
            todo += sources[call]
    return sources


def _ordered(
    calls: Sequence[_Call], sources: Mapping[_Call, set[_Call]], places: Mapping[_Call, _Place]
) -> list[_Call]:
    """The calls in order: each after its operands, and among those that are ready, the one with the earliest place."""
    waiting = {call: set(sources[call]) for call in calls}
    barriers = sorted((call for call in calls if call in places and places[call][1]), key=places.__getitem__)
    for first, second in pairwise(barriers):
        waiting[second].add(first)
    readers: dict[_Call, list[_Call]] = {}
    for call in calls:
        for source in waiting[call]:
            readers.setdefault(source, []).append(call)
    key = {call: places.get(call) for call in calls}
    for call in reversed(calls):  # a permuted operand comes right before its reader
        if key[call] is None:
            key[call] = min(k for user in readers[call] if (k := key[user]) is not None)
    numbers = {call: number for number, call in enumerate(calls)}
    ready = [(key[call], number, call) for call, number in numbers.items() if not waiting[call]]
    heapq.heapify(ready)  # type: ignore[arg-type]
    order: list[_Call] = []
    while ready:
        _, _, call = heapq.heappop(ready)  # type: ignore[type-var]
        order.append(call)
        for reader in readers.get(call, ()):
            waiting[reader].discard(call)
            if not waiting[reader]:
                heapq.heappush(ready, (key[reader], numbers[reader], reader))  # type: ignore[type-var]
    assert len(order) == len(calls), "the merged graph has a cycle"
    return order
