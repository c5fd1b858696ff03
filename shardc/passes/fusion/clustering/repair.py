"""Legality of the kernels as a whole: where they hold more at the peak than a rank may, some are split.

    clustering     a, b, c, d -> one kernel in epoch 2; its results are live at the peak, in epoch 4
    repair         a, b stay in epoch 2; c and d, which stood in epoch 5, are a kernel there

`memory_budget` bounds each merge by the bytes that it holds for longer. The peak depends on the order of all calls, so
it is measured on the emitted graph. What is over the bound is undone piece by piece, the piece first that saves the
fewest bytes of traffic for each byte that it holds at the peak:

    recomputation   a kernel reads its operands instead of recomputing them: what it recomputed them from may die
    motion          the calls of a kernel that stood in a later epoch (or an earlier one) are a kernel of their own
    size            the kernel that runs at the peak is split: by epoch, into parts that share no result, in halves
    the call        what is left of it stays a call of the graph

Splitting makes no cycle: all edges between the parts lead from the first to the second.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import fx

from shardc.cost.memory import MemoryReport
from shardc.ir.graph import info
from shardc.passes.fusion.analysis.iteration_space import space_constraint
from shardc.passes.fusion.clustering.cluster import rounds_unnoticed
from shardc.passes.fusion.clustering.clustering import Clustering
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.clustering.rematerialize import FusionGroup, fusion_groups

PATIENT_ROUNDS = 8  # rounds that look at the peak alone; every later one looks at the whole graph


class _Edit(NamedTuple):
    """What may be undone in a kernel, the bytes of traffic that it saves, and those that it holds at the peak."""

    group: FusionGroup
    moved: frozenset[int]  # calls that become a kernel of their own; empty: the kernel recomputes nothing any more
    saved: int
    held_bytes: int


@dataclass
class Kernels:
    """The clusters as groups that become kernels, and what was undone of them."""

    graph: FusionGraph
    clusters: list[FusionGroup]  # in an order of the graph; all operations of their calls
    read_only: set[int]  # calls of kernels that recompute nothing
    split: set[int]  # calls of kernels that were split

    @classmethod
    def of(cls, clustering: Clustering) -> Kernels:
        order = sorted(clustering.clusters, key=clustering.dag.position.__getitem__)
        clusters: list[FusionGroup] = []
        for cluster in map(clustering.clusters.__getitem__, order):
            calls, prims = tuple(sorted(cluster.calls)), tuple(clustering.prims(cluster.calls))
            clusters.append(FusionGroup(calls, prims, cluster.constraint, cluster.barrier_epoch))
        return cls(clustering.graph, clusters, set(), clustering.split)

    def groups(self) -> list[FusionGroup]:
        return fusion_groups(self.graph, self.clusters, self.read_only)

    def repair(
        self,
        groups: Sequence[FusionGroup],
        positions: Sequence[int],
        report: MemoryReport,
        bound: int,
        round: int,
    ) -> bool:
        """Undo what holds more than `bound` bytes at the peak of the emitted graph. False if nothing is left to undo.
        `groups` are those that were emitted, and `positions` those of their calls."""
        assert report.peak_at is not None
        excess = report.peak - bound
        is_early = [position <= report.peak_at.index for position in positions]
        live = {value.name for value in report.live}
        patient = round < PATIENT_ROUNDS
        edits = [
            edit
            for group, early in zip(groups, is_early, strict=True)
            for edit in self._edits(group, early, live if patient else None)
        ]
        for edit in sorted(edits, key=lambda e: (e.saved / e.held_bytes, e.group.calls)):
            self._apply(edit)
            excess -= edit.held_bytes
            if patient and excess <= 0:
                break
        if edits:
            return True
        moments = [report.peak_at.index]
        if not patient:  # layers that are equal are over the bound at as many moments
            stored = report.peak - max(report.timeline)
            moments = [moment for moment, size in enumerate(report.timeline) if stored + size > bound]
        return self._shrink(_running_at(moments, groups, positions))

    def _edits(self, group: FusionGroup, early: bool, live: Collection[str] | None) -> list[_Edit]:
        """What may be undone in a kernel that holds some of the `live` values; None: whatever it holds."""
        graph, cluster = self.graph, self._cluster_of(group)

        def bytes_held(values: Collection[fx.Node]) -> int:
            values = [v for v in values if v.op != "placeholder" and (live is None or info(v).name in live)]
            return sum(graph.bytes[v] for v in values)

        edits: list[_Edit] = []
        saved = sum(graph.bytes[v] for v in cluster.reads - group.reads)  # they would be held instead
        if (extended := bytes_held(group.reads - cluster.reads) - saved) > 0 and group.calls[0] not in self.read_only:
            edits.append(_Edit(group, frozenset(), saved, extended))
        epoch, kernel_epoch = graph.barrier_epoch, group.barrier_epoch
        later = frozenset(i for i in group.calls if epoch[i] > kernel_epoch)
        sooner = frozenset(i for i in group.calls if epoch[i] < kernel_epoch)
        for moved in (later, sooner) if live is None else (later,) if early else (sooner,):
            if moved and len(moved) < len(group.calls):
                rest = frozenset(group.calls) - moved
                written, read = set(group.outputs) & self._written(moved), self._read(moved) - self._read(rest)
                if extended := bytes_held(written if moved is later else read):
                    edits.append(_Edit(group, moved, self._bytes_between(moved, rest), extended))
        return edits

    def _apply(self, edit: _Edit) -> None:
        if not edit.moved:
            self.read_only.update(edit.group.calls)
        elif edit.group.calls in [cluster.calls for cluster in self.clusters]:  # it was not split by another edit
            rest = frozenset(edit.group.calls) - edit.moved
            epoch = self.graph.barrier_epoch
            first, second = sorted((edit.moved, rest), key=lambda part: min(epoch[i] for i in part))
            self._split(edit.group, [first, second])

    def _shrink(self, groups: Sequence[FusionGroup]) -> bool:
        """Split kernels; one that is a call stays one. False if there are none but such as compute producers of their
        operands: these are undone by a graph without inlined producers."""
        shrinkable = [g for g in groups if len(g.calls) > 1 or self.graph.inlined.isdisjoint(g.calls)]
        for group in shrinkable:
            parts, calls = self._by_epoch(group), list(group.calls)  # a moved result may hold a whole bucket
            if len(parts) == 1:
                parts = self._components(group)
            if len(parts) == 1 and len(calls) > 1:
                half = len(calls) // 2
                parts = [frozenset(calls[:half]), frozenset(calls[half:])]
            if len(parts) > 1:
                self._split(group, parts)
            else:
                self.clusters.remove(self._cluster_of(group))
                self.split.update(group.calls)
                self.graph.keep_call(calls[0])
        return bool(shrinkable)

    def _by_epoch(self, group: FusionGroup) -> list[frozenset[int]]:
        parts: dict[int, set[int]] = {}
        for i in sorted(group.calls):
            parts.setdefault(self.graph.barrier_epoch[i], set()).add(i)
        return [frozenset(part) for part in parts.values()]

    def _components(self, group: FusionGroup) -> list[frozenset[int]]:
        """The parts of a kernel that read no results of one another, by their first calls."""
        graph, part_of = self.graph, {i: i for i in group.calls}
        writer = {value: i for i in group.calls for value in graph.values[i]}
        for i in group.calls:
            for j in {writer[value] for value in graph.lowered[i].reads if value in writer}:
                old, new = part_of[i], part_of[j]
                part_of = {call: new if part == old else part for call, part in part_of.items()}
        parts: dict[int, set[int]] = {}
        for call, part in part_of.items():
            parts.setdefault(part, set()).add(call)
        return [frozenset(part) for part in parts.values()]

    def _split(self, group: FusionGroup, parts: Sequence[frozenset[int]]) -> None:
        """Replace a kernel by some that compute a part each, in this order."""
        cluster = self._cluster_of(group)
        index = self.clusters.index(cluster)
        self.split.update(cluster.calls)
        self.clusters[index : index + 1] = [each for part in parts for each in self._part(cluster, part)]

    def _part(self, cluster: FusionGroup, calls: Collection[int]) -> list[FusionGroup]:
        """Some calls of a cluster as a kernel; as one each where they have no common space any more."""
        numbers = tuple(sorted(calls))
        lowered = self.graph.lowered
        prims = tuple([prim for i in numbers for prim in lowered[i].prims])
        epochs = [self.graph.barrier_epoch[i] for i in numbers]
        epoch = min(max(epochs), max(min(epochs), cluster.barrier_epoch))
        if len(numbers) == 1:
            return [FusionGroup(numbers, prims, lowered[numbers[0]].constraint, epoch)]
        part = replace(cluster, calls=numbers, prims=prims, barrier_epoch=epoch)
        for constraint in (space_constraint(prims), cluster.constraint):
            if constraint is not None and self.graph.spaces.has_space(prims, constraint):
                if rounds_unnoticed(part.reads, lambda: prims):
                    break
                return [replace(part, constraint=constraint)]
        return [each for i in numbers for each in self._part(cluster, [i])]

    def _cluster_of(self, group: FusionGroup) -> FusionGroup:
        return next(cluster for cluster in self.clusters if cluster.calls == group.calls)

    def _written(self, calls: Collection[int]) -> set[fx.Node]:
        return {value for i in calls for value in self.graph.values[i]}

    def _read(self, calls: Collection[int]) -> set[fx.Node]:
        return {value for i in calls for value in self.graph.lowered[i].reads} - self._written(calls)

    def _bytes_between(self, a: Collection[int], b: Collection[int]) -> int:
        """The bytes that both read, or that one reads of the other's."""
        shared = (self._read(a) | self._written(a)) & (self._read(b) | self._written(b))
        return sum(self.graph.bytes[value] for value in shared)


def _running_at(moments: Sequence[int], groups: Sequence[FusionGroup], positions: Sequence[int]) -> list[FusionGroup]:
    """The kernels that run at some moments: each the last that has begun, or the last of all where none has."""
    begun = sorted(range(len(groups)), key=positions.__getitem__)
    starts = [positions[i] for i in begun]
    running = {begun[bisect_right(starts, moment) - 1]: None for moment in moments if begun}
    return [groups[i] for i in running]
