"""Fuse: chains of pointwise ops, casts and reductions become kernels.

    %a = add(%mm, %b)                                               a kernel reads %mm, %b, %h
    %h1 = add(%a, %h)              ->   shardc.fused([...])         and writes %h1 and the norm
    %n = native_layer_norm(%h1)

    scene      what may be fused, who reads what                    (`units`, `lowerings`, `memory_of`)
    clusters   which calls become one kernel                        (`spaces`: have they a space? `order`: may they?)
    again      what a kernel makes itself, although another one has
    kernels    a cluster as a kernel of the generator's             (kernels_triton.fused)
    emit       the graph with the kernels' calls: a template's op where the kernel is a template's, else `shardc.fused`

Needs a localized body, or a part of one. Ensures the same values under the same names, no more memory at the peak, and
collectives and products in the order that they had.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from kernels_triton.templates.op import OPS
from shardc.cost.memory import memory
from shardc.ir.graph import Graph, info
from shardc.passes.base import Pass
from shardc.passes.fuse import lowerings as _lowerings
from shardc.passes.fuse.again import Part, parts
from shardc.passes.fuse.clusters import Freedom, cluster
from shardc.passes.fuse.emit import emit, worth
from shardc.passes.fuse.padding import choose_padding
from shardc.passes.fuse.scene import Scene, scene

__all__ = ["Fuse", "fuse"]
_ = _lowerings
TRIES = 8


@dataclass(frozen=True)
class Fuse(Pass):
    """Make kernels of a body's pointwise ops and reductions. `exclude` are ops and values, by name, that stay calls;
    `templates` those that may take the place of a generated kernel, None all of them."""

    enabled: bool = True
    exclude: tuple[str, ...] = ()
    templates: tuple[str, ...] | None = None

    def run(self, graph: Graph) -> Graph:
        return fuse(graph, self.exclude, self.templates) if self.enabled else graph


def fuse(graph: Graph, exclude: tuple[str, ...] = (), templates: Collection[str] | None = None) -> Graph:
    """A body with its kernels. The graph that is given is left as it is.

    Where kernels hold more at the peak than the calls did, fewer are made.
    """
    allowed, free = memory(graph).peak, Freedom()
    hand_tuned = [
        name
        for name in (OPS if templates is None else templates)
        if name not in exclude and f"shardc.{name}" not in exclude
    ]
    for _ in range(TRIES):
        made = graph.copy()
        if "shardc.mask_pad" not in exclude:
            choose_padding(made)
        seen = scene(made, frozenset(exclude))
        todo = worth(parts(cluster(seen, free), free.again))
        names = [[info(value).name for value in plan.outputs] for plan in todo]
        calls = emit(seen, todo, hand_tuned)
        report = memory(made)
        if report.peak <= allowed:
            return made
        assert report.peak_at is not None
        live = {value.name for value in report.live}
        free = _less(free, seen, todo, names, live, [at <= report.peak_at.index for at in calls])
    return graph


def _less(
    free: Freedom, seen: Scene, todo: list[Part], names: list[list[str]], live: set[str], before: list[bool]
) -> Freedom:
    """What made the peak higher may not do so again: calls that ran early, or else the kernel that runs at the peak."""
    early = {
        i
        for plan, made in zip(todo, names, strict=True)
        if not live.isdisjoint(made)
        for i in plan.calls
        if seen.home[i] > plan.home
    }
    if not early <= free.still:
        return replace(free, still=free.still | early)
    if free.sideways:
        return replace(free, sideways=False)
    if free.again:
        return replace(free, again=False)
    near = [plan for plan, there in zip(todo, before, strict=True) if there] or todo
    return replace(free, apart=free.apart | set(near[-1].calls))
