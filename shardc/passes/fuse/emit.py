"""Clusters written into the graph: one call each, whose results keep the names of the values that they are.

    %fused_add_tanh.0, %mlp.tanh = shardc.fused([%mlp.mm, %mlp.bias], "fused_add_tanh[...](...){...}->...")
    %bias_gelu, %mlp.gelu = shardc.bias_gelu([%mlp.mm, %mlp.bias], "bias_gelu[...](...){...}->...")

A kernel that computes what a template does is the template's op; every other is the generator's.

Calls are then put in order: barriers stay in theirs, everything else as near to where it was as its operands allow.
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

import kernels_triton.fused.into  # noqa: F401  # pyright: ignore[reportUnusedImport]  (says what runs in place)
from kernels_triton.fused.op import FUSED
from kernels_triton.fused.text import text
from kernels_triton.templates.op import OPS
from shardc.ir.graph import Graph, Phase, ValueInfo, info, insert, producer, set_info, type_of
from shardc.passes.fuse.again import Part
from shardc.passes.fuse.kernels import Kernels, Made
from shardc.passes.fuse.scene import Scene
from shardc.passes.fuse.spaces import whole

LARGE = 1 << 16  # elements
PHASES: tuple[Phase, ...] = get_args(Phase)


def worth(todo: Sequence[Part]) -> list[Part]:
    """The parts that become kernels: a single operation is one already, and a good one unless it broadcasts."""
    return [part for part in todo if part.reads and (len(part.calls) > 1 or len(part.prims) > 1 or _broadcasts(part))]


def _broadcasts(part: Part) -> bool:
    """Is a large operand read with one that is repeated? torch then loads the elements of both one by one."""
    (prim,) = part.prims
    parts = {read.blocks == whole(prim.size) for read in prim.reads}
    return prim.over == "point" and prim.op != "cat" and prim.size >= LARGE and parts == {True, False}


def emit(scene: Scene, todo: Sequence[Part], templates: Collection[str] = tuple(OPS)) -> list[int]:
    """Replace the calls of each part by its kernel, and put everything in order. At which call each kernel is then."""
    graph = scene.graph
    fixed = set(scene.barriers)
    homes = {scene.calls[i]: (scene.home[i], i in fixed, i) for i in range(scene.end)}
    replaced: dict[fx.Node, fx.Node] = {}
    calls: list[fx.Node] = []
    kernels: list[fx.Node] = []
    made = Kernels(graph, scene.memories, templates)
    for part in todo:
        call = _call(scene, part, made.of(part.prims, part.demand, part.outputs), replaced)
        kernels.append(call)
        homes[call] = (part.home, False, part.calls[0])
        calls += [scene.calls[i] for i in part.calls]
    for old, new in replaced.items():
        old.replace_all_uses_with(new)
    for table in (graph.activations, graph.gradients):
        table.update({name: replaced.get(value, value) for name, value in table.items()})
    _erase(graph, calls)
    graph.erase_dead()
    _reorder(graph, homes)
    at = {call: i for i, call in enumerate(graph.calls())}
    return [at[call] for call in kernels]


def _call(scene: Scene, part: Part, made: Made, replaced: dict[fx.Node, fx.Node]) -> fx.Node:
    """The kernel's call and its getitems, at the end of the graph for now."""
    graph, nodes = scene.graph, [scene.calls[i] for i in part.calls]
    first = info(nodes[0])
    phase = PHASES[max(PHASES.index(info(node).phase) for node in nodes)]
    with graph.fx.inserting_before(graph.output_node):
        lying = {value: _contiguous(scene, replaced.get(value, value), value) for value in dict.fromkeys(made.inputs)}
        inputs = [lying[value] for value in made.inputs]
        call = insert(graph.fx, OPS.get(made.kernel.name, FUSED), (inputs, text(made.kernel)))
        about = info(max(nodes, key=lambda node: PHASES.index(info(node).phase)))
        prefix = f"d.{about.fqn}" if phase == "bwd" and about.fqn else "d" if phase == "bwd" else about.fqn
        prefix = ".".join(filter(None, ("opt", first.fqn))) if phase == "opt" else prefix
        name = graph.unique(".".join(filter(None, (prefix, made.kernel.name))))
        types = tuple(type_of(value) for value in made.outputs)
        constant = all(info(producer(value)[0]).constant for value in made.outputs)
        own = ValueInfo(
            name,
            None,
            types,
            about.fqn,
            about.source,
            about.source_text,
            phase=phase,
            constant=constant,
            cause=about.cause,
        )
        set_info(call, own)
        for at, value in enumerate(made.outputs):
            item = insert(graph.fx, operator.getitem, (call, at))
            set_info(item, info(value))
            replaced[value] = item
    return call


def _contiguous(scene: Scene, value: fx.Node, base: fx.Node) -> fx.Node:
    """The operand as its memory lies, dims in that order: the kernel walks memory."""
    order = scene.memories.permuted.get(base)
    if order is None:
        return value
    type = type_of(base)
    permuted = replace(type, dims=tuple(type.dims[d] for d in order))
    return scene.graph.call(torch.ops.aten.permute.default, (value, list(order)), like=producer(base)[0], type=permuted)


def _erase(graph: Graph, calls: Sequence[fx.Node]) -> None:
    for call in reversed(calls):
        for item in [user for user in call.users if user.target is operator.getitem]:
            if not item.users:
                graph.fx.erase_node(item)


def _reorder(graph: Graph, homes: Mapping[fx.Node, tuple[int, bool, int]]) -> None:
    """Every call after its operands, and of those that may come next the one that came first."""
    calls = list(graph.calls())
    waiting = {call: {producer(v)[0] for v in call.all_input_nodes if v.op != "placeholder"} for call in calls}
    barriers = sorted((call for call in calls if call in homes and homes[call][1]), key=homes.__getitem__)
    for first, second in pairwise(barriers):
        waiting[second].add(first)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for call, sources in waiting.items():
        for source in sources:
            readers.setdefault(source, []).append(call)
    key = {call: homes.get(call) for call in calls}
    for call in reversed(calls):  # a permuted operand comes right before its reader
        if key[call] is None:
            key[call] = min(k for user in readers[call] if (k := key[user]) is not None)
    ready = [(key[call], at, call) for at, call in enumerate(calls) if not waiting[call]]
    heapq.heapify(ready)  # type: ignore[arg-type]
    number = {call: at for at, call in enumerate(calls)}
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
                heapq.heappush(ready, (key[reader], number[reader], reader))  # type: ignore[type-var]
    assert all(not sources for sources in waiting.values()), "the merged graph has a cycle"
