"""Fuse: chains of pointwise ops, casts and reductions become kernels.

    %a = add(%mm, %b)                                               a kernel reads %mm, %b, %h
    %h1 = add(%a, %h)              ->   shardc.fused([...])         and writes %h1 and the norm
    %n = native_layer_norm(%h1)

1. analysis       facts about single values (`analysis`: iteration spaces, views, constants), each call as operations of
                  a kernel (`lowering`), and who reads what (`clustering/fusion_graph`)
2. legality       which calls may be one kernel: their spaces, the order of barriers (`cluster_dag`), and memory: each
                  merge by the bytes that it holds for longer (`memory_budget`), all of them by the peak (`repair`)
3. profitability  which legal merge saves most (`clustering`), what a kernel better recomputes (`rematerialize`), and
                  whether a group is worth a kernel (`is_profitable`)
4. emission       a new graph with a call for each kernel: a template's op where one matches, else `shardc.fused`;
                  what attention reads is stored as attention wants it (`attention_order`)

The first three run once. A graph whose kernels hold too much at the peak is repaired, not tried again: `repair` splits
what holds the bytes, and the groups are emitted anew. Only if a kernel of one call, which computes producers of its
operands, is what holds them, the graph is analysed once more without such kernels.

Needs a localized body, or a part of one. Ensures the same values under the same names, no higher peak of memory (beyond
`memory_budget.allowed_peak`), and collectives and products in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from torch import fx

from kernels_triton.match.op import OPS
from shardc.cost.memory import memory
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.gc_pause import gc_paused
from shardc.ir.graph import Graph
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.storages import Operand, extended
from shardc.ir.storages import layouts as layouts_of
from shardc.passes.base import Pass
from shardc.passes.fusion.clustering.batch_norms import SUM, has_channel_moments, join_channel_moments
from shardc.passes.fusion.clustering.clustering import Clustering, cluster_calls
from shardc.passes.fusion.clustering.excluded import check_excluded, excluded
from shardc.passes.fusion.clustering.fusion_graph import build_fusion_graph
from shardc.passes.fusion.clustering.memory_budget import MemoryBudget, allowed_peak
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.clustering.repair import Kernels
from shardc.passes.fusion.emit.attention_order import store_as_attention_reads
from shardc.passes.fusion.emit.emit import Emitter, is_profitable
from shardc.passes.fusion.lowering import activations as _pointwise
from shardc.passes.fusion.lowering import common as _lowerings
from shardc.passes.fusion.lowering import concat_slice as _parts
from shardc.passes.fusion.lowering import functions as _functions
from shardc.passes.fusion.lowering import integers as _integers
from shardc.passes.fusion.lowering import quotients as _quotients
from shardc.passes.fusion.lowering import reductions as _reductions
from shardc.passes.fusion.lowering import special as _special
from shardc.passes.fusion.lowering.group_norms import GROUP_NORMS, split_group_norms
from shardc.passes.fusion.lowering.padding import has_padding, lower_padding
from shardc.passes.fusion.lowering.softmaxes import SOFTMAX, restore_softmaxes, split_softmaxes

__all__ = ["Fuse", "Watch", "check_excluded", "fuse"]
_ = _functions, _integers, _lowerings, _parts, _pointwise, _quotients, _reductions, _special
MAX_ROUNDS = 64  # of repairs; few graphs need one
SPLIT = {SOFTMAX, *GROUP_NORMS}
Watch = Callable[[Clustering, list[FusionGroup]], None]  # the clusters, and the groups that become kernels


@dataclass(frozen=True)
class Fuse(Pass):
    """Fuse a body's pointwise ops and reductions into kernels. `exclude` holds patterns over ops, modules and values
    that stay calls; `templates` the templates that may replace a generated kernel, None all of them."""

    enabled: bool = True
    exclude: tuple[str, ...] = ()
    templates: tuple[str, ...] | None = None
    hardware: Hardware = DEFAULT

    def run(self, graph: Graph) -> Graph:
        return fuse(graph, self.exclude, self.templates, hardware=self.hardware) if self.enabled else graph


@gc_paused()
def fuse(
    graph: Graph,
    exclude: Collection[str] = (),
    templates: Collection[str] | None = None,
    watch: Watch | None = None,
    hardware: Hardware = DEFAULT,
) -> Graph:
    """A body with its kernels. The given graph is not changed. `watch` sees every emission, and the chosen one last.

    Where no repair brings the peak within its bound, nothing is fused, and a warning says so (SC217).
    """
    layouts, exclude = layouts_of(graph), excluded(graph, exclude)
    before = memory(graph, listed=False, storage_of=layouts.storages)
    rewritten, operands = _rewritten(graph, exclude, layouts.operands)
    for inline in (True, False):  # a value that a reader computes in parts holds its operands until then
        fusion_graph = build_fusion_graph(rewritten, exclude, inline, operands)
        clustering = cluster_calls(fusion_graph, MemoryBudget.of(graph, before, fusion_graph), hardware)
        emitter = Emitter(fusion_graph, _allowed_templates(exclude, templates))
        fused = _within_bound(clustering, emitter, allowed_peak(before.peak), watch)
        if fused is not None:
            store_as_attention_reads(fused)
            return fused
        if not fusion_graph.inlined:
            break
    graph = graph.copy()
    message = "nothing is fused: the kernels hold more at the peak than their calls do, as far as they were split"
    hint = "recompute, or exclude what runs at the peak: `shardc cost --memory` names it"
    graph.diagnostics.append(Diagnostic("SC217", message, "warning", hint=hint))
    return graph


def _within_bound(clustering: Clustering, emitter: Emitter, bound: int, watch: Watch | None) -> Graph | None:
    """The graph with the kernels of a clustering, repaired until its peak is within the bound; None if that fails."""
    kernels = Kernels.of(clustering)
    for round in range(MAX_ROUNDS):
        groups = [group for group in kernels.groups() if is_profitable(group)]
        if watch is not None:
            watch(clustering, groups)
        fused, positions = emitter.emit(groups)
        restore_softmaxes(fused)
        if memory(fused, listed=False).peak <= bound:
            return fused
        if not kernels.repair(groups, positions, memory(fused), bound, round):
            break
    return None


def _rewritten(
    graph: Graph, exclude: Collection[str], operands: dict[fx.Node, Operand]
) -> tuple[Graph, dict[fx.Node, Operand]]:
    """The body in the form that kernels compute: masks as selects, norms and softmaxes with their statistics; and its
    `operands`. It is a copy, or the given graph where nothing has to be rewritten."""
    targets = Counter([id(node.target) for node in graph.calls()])  # an op's own hash is written in Python
    is_split, is_padded = any(id(target) in targets for target in SPLIT), has_padding(targets)
    if not (is_split or is_padded or (id(SUM) in targets and has_channel_moments(graph))):
        return graph, operands
    table: dict[fx.Node, fx.Node] = {}
    graph = graph.copy(table)
    if "shardc.mask_pad" not in exclude:
        lower_padding(graph)
    split_softmaxes(graph, exclude)
    split_group_norms(graph, exclude)
    join_channel_moments(graph, exclude)
    if is_padded:  # calls read other values than they did
        return graph, layouts_of(graph).operands
    return graph, extended(graph, {table[value]: operand for value, operand in operands.items()})


def _allowed_templates(exclude: Collection[str], templates: Collection[str] | None) -> list[str]:
    names = OPS if templates is None else templates
    return [name for name in names if name not in exclude and f"shardc.{name}" not in exclude]
