"""Why a call is in no kernel: what the plan excludes, what the fusion pass can do, and why two calls did not merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name
from shardc.passes.fusion.analysis.traffic import PRODUCTS
from shardc.passes.fusion.analysis.view_analysis import VIEWS
from shardc.passes.fusion.clustering.cluster import bytes_saved
from shardc.passes.fusion.clustering.clustering import Clustering, merge_refusal
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.clustering.rematerialize import FusionGroup
from shardc.passes.fusion.lowering.lowered_op import LOWERINGS
from shardc.passes.fusion.lowering.unfused import UNFUSED

MAX_NEIGHBOURS = 3  # that are shown


@dataclass(frozen=True)
class NotFused:
    """Why a call is in no kernel, in a line; and why it did not merge with each of its neighbours."""

    why: str
    beside: tuple[tuple[str, str], ...] = ()  # a call's name, and why the two did not merge


def not_fused(clustering: Clustering, groups: Sequence[FusionGroup], by_plan: Mapping[str, str]) -> dict[str, NotFused]:
    """By name, all calls that are in none of the groups. `by_plan`: the names of calls that the plan excludes, with the
    pattern that does."""
    graph = clustering.graph
    fused = {i for group in groups for i in group.calls}
    linked: dict[int, set[int]] = {}
    for a, b in graph.edges:
        linked.setdefault(a, set()).add(b)
        linked.setdefault(b, set()).add(a)
    unfused = ((i, info(node).name) for i, node in enumerate(graph.calls) if i not in fused)
    return {name: _reason(clustering, i, linked.get(i, set()), by_plan) for i, name in unfused}


def _reason(clustering: Clustering, i: int, linked: set[int], by_plan: Mapping[str, str]) -> NotFused:
    graph = clustering.graph
    node = graph.calls[i]
    name, op = info(node).name, op_name(node.target)
    if name in by_plan:
        return NotFused(f"the plan leaves it alone: fuse: {{exclude: ['{by_plan[name]}']}}")
    if i in clustering.split:
        return NotFused("as a part of a kernel, it held more at the peak of memory")
    if op in KINDS:
        return NotFused("it communicates: kernels run before it and after it")
    if op in PRODUCTS:
        return NotFused("it is a product or an attention: kernels run before it and after it")
    if i in graph.lowered:
        return _reason_of_lowered(clustering, i, linked)
    if node.target in VIEWS and node not in graph.views.copying_views:
        return NotFused("it is a view: kernels read through it")
    if node.target in LOWERINGS:
        return NotFused(f"kernels know {op}, but not on operands of this layout, dtype or size")
    reason = UNFUSED.get(op.partition(".")[0])
    return NotFused(f"kernels do not know {op}" + (f": {reason}" if reason else ""))


def _reason_of_lowered(clustering: Clustering, i: int, linked: set[int]) -> NotFused:
    if clustering.dag.find(i) not in clustering.clusters:
        return NotFused("its rows and columns are none that a kernel could walk")
    neighbours = _beside(clustering, i, linked)
    if not neighbours:
        return NotFused(
            "one kernel as it is, and nothing beside it is one: a generated kernel would move the same bytes"
        )
    return NotFused("one kernel as it is; alone, a generated kernel would move the same bytes", tuple(neighbours))


def _beside(clustering: Clustering, i: int, linked: set[int]) -> list[tuple[str, str]]:
    """Why the call did not merge with the clusters that it shares values with; those come first with which a merge
    would save most."""
    graph, number = clustering.graph, clustering.dag.find(i)
    neighbours: dict[int, int] = {}  # a cluster -> the call in it that is linked to this one
    for j in _linked_calls(graph, i, linked):
        other = clustering.dag.find(j)
        if other in clustering.clusters and other != number:
            neighbours.setdefault(other, j)
    cluster = clustering.clusters[number]
    ordered = sorted(neighbours, key=lambda other: (-bytes_saved(graph, cluster, clustering.clusters[other]), other))
    return [
        (info(graph.calls[neighbours[other]]).name, _refusal(clustering, number, other))
        for other in ordered[:MAX_NEIGHBOURS]
    ]


def _linked_calls(graph: FusionGraph, i: int, linked: set[int]) -> list[int]:
    """The calls that compute its operands, that read its results, and that read its operands."""
    co_readers = {reader for value in graph.lowered[i].reads for reader in graph.readers.get(value, ())}
    return sorted((linked | co_readers) & graph.lowered.keys() - {i})


def _refusal(clustering: Clustering, a: int, b: int) -> str:
    cycle = "what one makes reaches the other through a third, which would have to run between them"
    return merge_refusal(clustering, a, b) or (
        cycle if clustering.dag.would_cycle(a, b) else "nothing forbids it, and the search did not come to the two"
    )
