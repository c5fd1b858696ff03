"""Fuse: chains of pointwise ops, casts and reductions become kernels.

    %a = add(%mm, %b)                                               a kernel reads %mm, %b, %h
    %h1 = add(%a, %h)              ->   shardc.fused([...])         and writes %h1 and the norm
    %n = native_layer_norm(%h1)

    scene      what may be fused, who reads what                    (`units`, `unit_of`, `memory_of`, `lowerings`,
                                                                     `softmaxes`, `group_norms`)
    clusters   which calls become one kernel                        (`spaces`: have they a space? `order`: may they?
                                                                     `room`: is there memory for it?)
    again      what a kernel makes itself, although another one has
    kernels    a cluster as a kernel of the generator's             (kernels_triton.fused)
    emit       the graph with the kernels' calls: a template's op where the kernel is a template's, else `shardc.fused`

Needs a localized body, or a part of one. Ensures the same values under the same names, no more memory at the peak (but
for what `room` allows), and collectives and products in the order that they had.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from kernels_triton.templates.op import OPS
from shardc.cost.memory import memory
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import Graph, info
from shardc.passes.base import Pass
from shardc.passes.fuse import functions as _functions
from shardc.passes.fuse import integers as _integers
from shardc.passes.fuse import lowerings as _lowerings
from shardc.passes.fuse import parts as _parts
from shardc.passes.fuse import pointwise as _pointwise
from shardc.passes.fuse import quotients as _quotients
from shardc.passes.fuse import reductions as _reductions
from shardc.passes.fuse import special as _special
from shardc.passes.fuse.again import Part, parts
from shardc.passes.fuse.batch_norms import join_moments
from shardc.passes.fuse.clusters import Clustering, Freedom, cluster
from shardc.passes.fuse.emit import emit, worth
from shardc.passes.fuse.excluded import check_excluded, excluded
from shardc.passes.fuse.group_norms import split_group_norms
from shardc.passes.fuse.padding import choose_padding
from shardc.passes.fuse.room import Room, allowed
from shardc.passes.fuse.scene import Scene, scene
from shardc.passes.fuse.softmaxes import with_statistics, without_statistics
from shardc.passes.fuse.traffic import traffic

__all__ = ["Fuse", "Watch", "check_excluded", "fuse"]
_ = _functions, _integers, _lowerings, _parts, _pointwise, _quotients, _reductions, _special
TRIES = 16
WORTH = 16  # of the bytes that are moved, one part of so many is worth what `room` allows
Watch = Callable[[Clustering, list[Part]], None]  # what is merged, and the kernels to be made, before they are


@dataclass(frozen=True)
class Fuse(Pass):
    """Make kernels of a body's pointwise ops and reductions. `exclude` are patterns over ops, modules and values that
    stay calls; `templates` those that may take the place of a generated kernel, None all of them."""

    enabled: bool = True
    exclude: tuple[str, ...] = ()
    templates: tuple[str, ...] | None = None

    def run(self, graph: Graph) -> Graph:
        return fuse(graph, self.exclude, self.templates) if self.enabled else graph


class _Spared(NamedTuple):
    """Kernels with which the peak is a little higher."""

    graph: Graph
    merged: Clustering
    todo: list[Part]
    bytes: int


@contextmanager
def _nothing_collected() -> Generator[None]:
    """Millions of small values, none in a circle: looking through them again and again takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_nothing_collected()
def fuse(
    graph: Graph,
    exclude: Collection[str] = (),
    templates: Collection[str] | None = None,
    watch: Watch | None = None,
) -> Graph:
    """A body with its kernels. The graph that is given is left as it is. `watch` sees every try, the last one last.

    Where kernels hold more at the peak than the calls did, fewer are made; where that does not help, none are, and a
    warning says so (SC217). What holds no more than `room` allows is taken where nothing else saves as much.
    """
    before = memory(graph)
    spared: _Spared | None = None
    free, exclude = Freedom(), excluded(graph, exclude)
    hand_tuned = [
        name
        for name in (OPS if templates is None else templates)
        if name not in exclude and f"shardc.{name}" not in exclude
    ]
    for _ in range(TRIES):
        made = graph.copy()
        if "shardc.mask_pad" not in exclude:
            choose_padding(made)
        with_statistics(made, exclude)
        split_group_norms(made, exclude)
        join_moments(made, exclude)
        seen = scene(made, exclude | free.excluded, free.again)
        merged = cluster(seen, free, Room.of(graph, before, seen))
        todo = worth(parts(merged, free.again))
        if watch is not None:
            watch(merged, todo)
        touched = [{info(value).name for value in (*plan.outputs, *plan.reads)} for plan in todo]
        named = [info(node).name for node in seen.calls]
        calls = emit(seen, todo, hand_tuned)
        without_statistics(made)
        report = memory(made)
        if report.peak <= before.peak:
            if spared is None or WORTH * spared.bytes >= (WORTH - 1) * traffic(made).bytes:
                return made
            break
        if spared is None and report.peak <= allowed(before.peak):
            spared = _Spared(made, merged, todo, traffic(made).bytes)
        assert report.peak_at is not None
        live = {value.name for value in report.live}
        free = _less(free, seen, todo, named, touched, live, [at <= report.peak_at.index for at in calls])
        if spared is not None and (free.apart or free.excluded):
            break
    if spared is not None:
        if watch is not None:
            watch(spared.merged, spared.todo)
        return spared.graph
    graph = graph.copy()
    message = f"nothing is fused: after {TRIES} tries kernels still hold more at the peak than their calls do"
    hint = "recompute, or exclude what runs at the peak: `shardc cost --memory` names it"
    graph.diagnostics.append(Diagnostic("SC217", message, "warning", hint=hint))
    return graph


def _less(
    free: Freedom,
    seen: Scene,
    todo: list[Part],
    named: list[str],
    touched: list[set[str]],
    live: set[str],
    before: list[bool],
) -> Freedom:
    """What made the peak higher may not do so again: calls that ran at another time, whose operands or results are
    there at the peak, or else the kernel that runs at the peak."""
    moved = {
        i
        for plan, names, early in zip(todo, touched, before, strict=True)
        if not live.isdisjoint(names)
        for i in plan.calls
        if (seen.home[i] > plan.home if early else seen.home[i] < plan.home)
    }
    if free.longer:
        return replace(free, longer=False)
    if not moved <= free.still:
        return replace(free, still=free.still | moved)
    if free.sideways:
        return replace(free, sideways=False)
    if free.again:
        return replace(free, again=False)
    near = [plan for plan, there in zip(todo, before, strict=True) if there] or todo
    if not near:
        return free
    last = near[-1]
    if not free.apart.issuperset(last.calls):
        return replace(free, apart=free.apart | set(last.calls))
    # One call, which still reads what others would make of less.
    return replace(free, excluded=free.excluded | {named[i] for i in last.calls})
