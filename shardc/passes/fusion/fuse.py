"""Fuse: chains of pointwise ops, casts and reductions become kernels.

    %a = add(%mm, %b)                                               a kernel reads %mm, %b, %h
    %h1 = add(%a, %h)              ->   shardc.fused([...])         and writes %h1 and the norm
    %n = native_layer_norm(%h1)

    analysis     facts about single values: iteration spaces, views, constants, bytes moved
    lowering     each call as operations of a kernel
    clustering   which calls become one kernel: `fusion_graph` (who reads what), `clustering` (the search),
                 `cluster_dag` and `memory_budget` (is a merge legal?), `rematerialize` (what a kernel recomputes)
    emit         the graph with a call for each kernel: a template's op where one matches, else `shardc.fused`

Needs a localized body, or a part of one. Ensures the same values under the same names, no higher peak of memory (beyond
`memory_budget.allowed_peak`), and collectives and products in their order.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from kernels_triton.match.op import OPS
from shardc.cost.memory import memory
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.passes.base import Pass
from shardc.passes.fusion.analysis.traffic import traffic
from shardc.passes.fusion.clustering.batch_norms import join_channel_moments
from shardc.passes.fusion.clustering.clustering import Clustering, FusionLimits, cluster_calls
from shardc.passes.fusion.clustering.excluded import check_excluded, excluded
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph, build_fusion_graph
from shardc.passes.fusion.clustering.memory_budget import MemoryBudget, allowed_peak
from shardc.passes.fusion.clustering.rematerialize import FusionGroup, fusion_groups
from shardc.passes.fusion.emit.emit import Emitter, is_profitable
from shardc.passes.fusion.lowering import activations as _pointwise
from shardc.passes.fusion.lowering import common as _lowerings
from shardc.passes.fusion.lowering import concat_slice as _parts
from shardc.passes.fusion.lowering import functions as _functions
from shardc.passes.fusion.lowering import integers as _integers
from shardc.passes.fusion.lowering import quotients as _quotients
from shardc.passes.fusion.lowering import reductions as _reductions
from shardc.passes.fusion.lowering import special as _special
from shardc.passes.fusion.lowering.group_norms import split_group_norms
from shardc.passes.fusion.lowering.padding import lower_padding
from shardc.passes.fusion.lowering.softmaxes import restore_softmaxes, split_softmaxes

__all__ = ["Fuse", "Watch", "check_excluded", "fuse"]
_ = _functions, _integers, _lowerings, _parts, _pointwise, _quotients, _reductions, _special
MAX_TRIES = 16
MIN_GAIN_DIVISOR = 16  # a slightly higher peak is worth a 16th of the bytes moved
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


class _NearFit(NamedTuple):
    """A fused graph whose peak is slightly higher than before."""

    graph: Graph
    clustering: Clustering
    groups: list[FusionGroup]
    bytes: int


@contextmanager
def _gc_paused() -> Generator[None]:
    """The pass makes millions of small objects without cycles; collecting garbage would take a third of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_gc_paused()
def fuse(
    graph: Graph,
    exclude: Collection[str] = (),
    templates: Collection[str] | None = None,
    watch: Watch | None = None,
    hardware: Hardware = DEFAULT,
) -> Graph:
    """A body with its kernels. The given graph is not changed. `watch` sees every try, and the chosen one last.

    Where the kernels hold more at the peak than the calls did, the limits are tightened and fewer kernels are made.
    Where no try succeeds, nothing is fused, and a warning says so (SC217). A try whose peak is within `allowed_peak` is
    taken unless a later one saves nearly as much.
    """
    before = memory(graph)
    near_fit: _NearFit | None = None
    limits, exclude = FusionLimits(), excluded(graph, exclude)
    allowed_templates = [
        name
        for name in (OPS if templates is None else templates)
        if name not in exclude and f"shardc.{name}" not in exclude
    ]
    for _ in range(MAX_TRIES):
        fused = graph.copy()
        if "shardc.mask_pad" not in exclude:
            lower_padding(fused)
        split_softmaxes(fused, exclude)
        split_group_norms(fused, exclude)
        join_channel_moments(fused, exclude)
        fusion_graph = build_fusion_graph(fused, exclude | limits.excluded, limits.rematerialize)
        clustering = cluster_calls(fusion_graph, limits, MemoryBudget.of(graph, before, fusion_graph), hardware)
        groups = [group for group in fusion_groups(clustering, limits.rematerialize) if is_profitable(group)]
        if watch is not None:
            watch(clustering, groups)
        touched = [{info(value).name for value in (*group.outputs, *group.reads)} for group in groups]
        call_names = [info(node).name for node in fusion_graph.calls]
        fused, positions = Emitter(fusion_graph, allowed_templates).emit(groups)
        restore_softmaxes(fused)
        report = memory(fused)
        if report.peak <= before.peak:
            if near_fit is None or MIN_GAIN_DIVISOR * near_fit.bytes >= (MIN_GAIN_DIVISOR - 1) * traffic(fused).bytes:
                return fused
            break
        if near_fit is None and report.peak <= allowed_peak(before.peak):
            near_fit = _NearFit(fused, clustering, groups, traffic(fused).bytes)
        assert report.peak_at is not None
        live = {value.name for value in report.live}
        before_peak = [position <= report.peak_at.index for position in positions]
        limits = _tighten(limits, fusion_graph, groups, call_names, touched, live, before_peak)
        if near_fit is not None and (limits.unmerged or limits.excluded):
            break
    if near_fit is not None:
        if watch is not None:
            watch(near_fit.clustering, near_fit.groups)
        return near_fit.graph
    graph = graph.copy()
    message = f"nothing is fused: after {MAX_TRIES} tries kernels still hold more at the peak than their calls do"
    hint = "recompute, or exclude what runs at the peak: `shardc cost --memory` names it"
    graph.diagnostics.append(Diagnostic("SC217", message, "warning", hint=hint))
    return graph


def _tighten(
    limits: FusionLimits,
    fusion_graph: FusionGraph,
    groups: list[FusionGroup],
    call_names: list[str],
    touched: list[set[str]],
    live: set[str],
    before_peak: list[bool],
) -> FusionLimits:
    """Limits that forbid what raised the peak: calls that moved to another epoch, and whose operands or results are
    live at the peak; or else the kernel that runs at the peak."""
    epoch = fusion_graph.barrier_epoch
    moved = {
        i
        for group, names, is_early in zip(groups, touched, before_peak, strict=True)
        if not live.isdisjoint(names)
        for i in group.calls
        if (epoch[i] > group.barrier_epoch if is_early else epoch[i] < group.barrier_epoch)
    }
    if limits.extend_lifetimes:
        return replace(limits, extend_lifetimes=False)
    if not moved <= limits.pinned:
        return replace(limits, pinned=limits.pinned | moved)
    if limits.horizontal:
        return replace(limits, horizontal=False)
    if limits.rematerialize:
        return replace(limits, rematerialize=False)
    candidates = [group for group, is_early in zip(groups, before_peak, strict=True) if is_early] or groups
    if not candidates:
        return limits
    at_peak = candidates[-1]
    if not limits.unmerged.issuperset(at_peak.calls):
        return replace(limits, unmerged=limits.unmerged | set(at_peak.calls))
    # It is one call, which still reads the operands of rematerialised values.
    return replace(limits, excluded=limits.excluded | {call_names[i] for i in at_peak.calls})
