"""Which calls become one kernel: the pair that saves most is merged first, as long as the merge is legal.

A merge saves three things: the bytes of values that then stay in registers (written once, read by each reader), those
of operands that both read, and a launch. It is illegal where the two have no common iteration space, need too many
tensors at once, run a different number of times a step, or where order forbids it (`cluster_dag`). A cluster that runs
earlier holds its results for longer; one that runs later holds its operands for longer. Those bytes must be few, or fit
the memory budget (`memory_budget`). Phases forbid little. The optimizer's calls merge only with each other. Forward's
merge with backward's only where neither moves past a barrier: a loss and its gradient, after the last product, are one
kernel. A merge puts no work before a collective that the next product waits for (`critical_collectives`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name, producer
from shardc.ir.hardware import DEFAULT, Hardware
from shardc.ir.ops.buckets import UNPACK
from shardc.passes.fusion.analysis.iteration_space import (
    IterationSpace,
    Prim,
    SpaceConstraint,
    find_space,
    merged_constraint,
)
from shardc.passes.fusion.clustering.cluster import (
    Cluster,
    bytes_saved,
    cluster_of,
    repeats_expensive,
    rounds_unnoticed,
    spaces_agree,
)
from shardc.passes.fusion.clustering.cluster_dag import ClusterDag
from shardc.passes.fusion.clustering.critical_collectives import CriticalCollectives
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.clustering.memory_budget import MemoryBudget

# Bytes whose lifetime a merge may extend:
MIN_SAVING_RATIO = 16  # a 16th of the bytes that the merge saves,
NEGLIGIBLE_BYTES = 4096  # or so few,
MAX_HELD_RATIO = 4  # or four times the bytes saved, where the memory budget allows it
MAX_TENSORS = 40
MAX_PRIMS = 192
UPDATE_FACTOR = 8  # so many times more in updates: each parameter has its own programs (transform/independent_outputs)
SMALL_UPDATE = 65536  # elements; larger updates that read a collective's result start when their gradient arrives
MAX_ROW_TENSORS = 12  # full tensors of a kernel that holds a row at a time
MANY_READERS = 16
DEFERRED = 1 << 62  # more bytes than any merge saves
NO_COMMON_SPACE = "no rows and columns are common to both"


@dataclass
class Clustering:
    graph: FusionGraph
    dag: ClusterDag
    budget: MemoryBudget
    critical: CriticalCollectives
    hardware: Hardware = DEFAULT
    clusters: dict[int, Cluster] = field(default_factory=dict[int, Cluster])
    split: set[int] = field(default_factory=set[int])  # calls of clusters that were split (`repair`)

    def prims(self, calls: Iterable[int]) -> list[Prim]:
        lowered = self.graph.lowered
        return [prim for i in sorted(calls) for prim in lowered[i].prims]

    def iteration_space(self, cluster: Cluster) -> IterationSpace:
        space = find_space(self.prims(cluster.calls), cluster.constraint)
        assert space is not None, "a cluster was made without a space"
        return space


def cluster_calls(graph: FusionGraph, budget: MemoryBudget | None = None, hardware: Hardware = DEFAULT) -> Clustering:
    """Merge calls while a merge is legal and saves something."""
    dag = ClusterDag(graph.call_count, graph.edges, graph.barriers)
    clustering = Clustering(graph, dag, budget or MemoryBudget.empty(), CriticalCollectives.of(graph), hardware)
    for i, op in graph.lowered.items():
        cluster = cluster_of(graph, i)
        has_trivial_space = cluster.is_elementwise and not cluster.strided_reads
        if has_trivial_space or graph.has_space((i,), op.constraint):
            clustering.clusters[i] = cluster
    merger = _Merger(clustering)
    merger.run(_vertical_candidates(graph, clustering.clusters))
    merger.run(_horizontal_candidates(clustering))
    return clustering


def merge_refusal(clustering: Clustering, a: int, b: int) -> str:
    """Why two clusters are not one kernel; "" where only a cycle can forbid it."""
    dag, graph = clustering.dag, clustering.graph
    if not dag.share_window(a, b):
        first, second = (a, b) if dag.earliest[a] > dag.earliest[b] else (b, a)
        barriers = (dag.latest[second], dag.earliest[first])
        begin, end = (info(graph.calls[graph.barriers[barrier]]).name for barrier in barriers)
        return f"%{begin} runs between them" if begin == end else f"%{begin} to %{end} run between them"
    merged = _Merger(clustering).merged(a, b)
    return merged if isinstance(merged, str) else ""


class _Merger:
    """The search: a heap of candidate pairs, scored by the bytes that a merge saves."""

    def __init__(self, clustering: Clustering) -> None:
        self.clustering, self.graph, self.dag = clustering, clustering.graph, clustering.dag
        self.clusters, self.budget = clustering.clusters, clustering.budget
        # Deferred pairs last, those first that save most, then those of the first calls: rank, the pair as one number,
        # and the versions of its clusters as one number.
        self.heap: list[tuple[int, int, int]] = []
        self.base = max(1, self.graph.call_count)
        self.scored: dict[int, int] = {}  # pair -> the versions at which it was scored last
        self.earliest, self.latest = self.dag.earliest, self.dag.latest
        self.has_critical = bool(clustering.critical.by_operand)
        count = self.graph.call_count
        # The clusters that read a value, where they are few, but more than one. Of a value that its writer's cluster
        # reads, it may still have clusters that were merged with that one: all others have an edge to it.
        self.fellow_readers = {
            value: {i for i in readers if i < count}
            for value, readers in self.graph.readers.items()
            if 1 < len(readers) <= MANY_READERS
        }

    def run(self, pairs: Iterable[tuple[int, int]]) -> None:
        clusters, score = self.clusters, self._score
        for a, b in pairs:
            self.push(a, b)
        heap, pop, base, parent, find = self.heap, heapq.heappop, self.base, self.dag.parent, self.dag.find
        while heap:
            _, pair, versions = pop(heap)
            a, b = divmod(pair, base)
            if a in clusters and b in clusters:
                if versions == clusters[a].version * base + clusters[b].version:
                    self.merge(a, b)
                    continue
            else:  # one of them was merged since
                a = a if parent[a] == a else find(a)
                b = b if parent[b] == b else find(b)
                if a == b:
                    continue
            score(a, b)

    def push(self, a: int, b: int) -> None:
        """Put the pair of two calls' clusters on the heap, unless a cheap test shows that their merge is illegal."""
        parent, clusters = self.dag.parent, self.clusters
        a = a if parent[a] == a else self.dag.find(a)
        b = b if parent[b] == b else self.dag.find(b)
        if a != b and a in clusters and b in clusters:
            self._score(a, b)

    def _score(self, a: int, b: int) -> None:
        """Put a pair of clusters on the heap, as in `push`."""
        earliest, latest = self.earliest, self.latest
        begin = earliest[a] if earliest[a] > earliest[b] else earliest[b]
        if begin >= latest[a] or begin >= latest[b]:  # as in `ClusterDag.share_window`
            return
        if a > b:
            a, b = b, a
        base, x, y = self.base, self.clusters[a], self.clusters[b]
        pair, versions = a * base + b, x.version * base + y.version
        if self.scored.get(pair) == versions:
            return
        self.scored[pair] = versions
        if x.constraint == y.constraint or merged_constraint(x.constraint, y.constraint) is not None:
            rank = (DEFERRED if x.is_deferred or y.is_deferred else 0) - bytes_saved(self.graph, x, y)
            heapq.heappush(self.heap, (rank, pair, versions))

    def merge(self, a: int, b: int) -> None:
        merged = self.merged(a, b)
        if isinstance(merged, str):
            return
        root = self.dag.merge(a, b)
        if root is None:
            return
        cluster, extra, first, last = merged
        if extra > 0:
            self.budget.reserve(extra, first, last)
        clusters, earliest, latest, score = self.clusters, self.earliest, self.latest, self._score
        self._rename_reader(b if root == a else a, root)
        del clusters[a], clusters[b]
        clusters[root] = cluster
        begin, end = earliest[root], latest[root]
        for neighbour in self._neighbours(cluster, root):
            # Most have another window, as `_score` would find.
            if begin < latest[neighbour] and earliest[neighbour] < end and neighbour in clusters:
                score(root, neighbour)

    def _rename_reader(self, merged: int, root: int) -> None:
        """Note that a cluster, about to go, is part of another."""
        fellow_readers = self.fellow_readers
        for value in self.clusters[merged].reads:
            if readers := fellow_readers.get(value):
                readers.discard(merged)
                readers.add(root)
                if len(readers) == 1:
                    del fellow_readers[value]

    def merged(self, a: int, b: int) -> tuple[Cluster, int, int, int] | str:
        """The merged cluster, the bytes whose lifetime it extends, and the first and last epoch in which they are then
        held; or why the merge is illegal."""
        x, y = self.clusters[a], self.clusters[b]
        epoch = max(min(x.barrier_epoch, y.barrier_epoch), self.dag.earliest[a] + 1, self.dag.earliest[b] + 1)
        constraint = merged_constraint(x.constraint, y.constraint)
        agree = constraint is not None and spaces_agree(x, y, constraint)
        cluster = self._merged_cluster(x, y, epoch, constraint, agree)
        if isinstance(cluster, str):
            return cluster
        extra = self._bytes_held(x, y, cluster)
        if isinstance(extra, str):
            return extra
        first, last = epoch, epoch
        if x.barrier_epoch != epoch or y.barrier_epoch != epoch:
            epochs = (x.barrier_epoch, y.barrier_epoch, epoch)
            first, last = min(epochs), max(epochs)
        if self.has_critical and (self._delays_critical(x, y, epoch) or self._delays_critical(y, x, epoch)):
            return "a collective that the next product waits for would begin later"
        if extra > NEGLIGIBLE_BYTES and not self._may_hold(extra, saved := bytes_saved(self.graph, x, y), first, last):
            return f"{extra} bytes would be held for longer to save {saved}, and the peak of memory leaves no room"
        if not agree and not self.graph.has_space(cluster.calls, cluster.constraint):
            return NO_COMMON_SPACE
        return cluster, extra, first, last

    def _delays_critical(self, feeder: Cluster, other: Cluster, epoch: int) -> bool:
        """Would a critical collective that reads results of `feeder` wait for `other`, which it does not need?"""
        waiting = self.clustering.critical.waiting_on(feeder.writes, epoch)
        if waiting <= self.clustering.critical.waiting_on(other.writes, epoch):
            return False
        if not other.writes.isdisjoint(feeder.reads):
            return False
        calls = feeder.calls | other.calls
        written = {v for v in other.writes if not self.graph.readers.get(v, set()) <= calls}
        read = other.reads - feeder.reads - feeder.writes
        # A shorter delay costs no more than a kernel of its own would.
        return sum(self.graph.bytes[v] for v in read | written) > self.clustering.hardware.gap_bytes

    def _may_hold(self, extra: int, saved: int, first: int, last: int) -> bool:
        if extra * MIN_SAVING_RATIO <= saved:
            return True
        return extra <= MAX_HELD_RATIO * saved and self.budget.allows(extra, first, last)

    def _neighbours(self, cluster: Cluster, number: int) -> set[int]:
        """The clusters, and some calls, that a merge with this one could save something for."""
        fellow_readers = self.fellow_readers
        linked = self.dag.predecessors[number] | self.dag.successors[number]
        for value in cluster.reads:
            if value in fellow_readers:
                linked |= fellow_readers[value]
        linked.discard(number)
        return linked

    def _merged_cluster(
        self, a: Cluster, b: Cluster, epoch: int, constraint: SpaceConstraint | None, agree: bool
    ) -> Cluster | str:
        """Both as one, running in `epoch`; or why the merge is illegal, whatever it does to memory. Their spaces
        `agree` if that is known without a look at their operations."""
        graph = self.graph
        phase = graph.phases[a.first]
        if graph.per_microbatch[a.first] != graph.per_microbatch[b.first]:
            return "one runs once a microbatch, the other once a step"
        if (phase == "opt") != (graph.phases[b.first] == "opt"):
            return "one is the optimizer's, the other is not"
        if a.is_float64 != b.is_float64:
            return "one computes in float64, the other does not"
        if constraint is None:
            return NO_COMMON_SPACE
        calls = a.calls | b.calls
        of_one_size = a.constraint.size == b.constraint.size
        if not of_one_size and repeats_expensive(self.clustering.prims(calls), constraint.size):
            return "sines that many elements share would be computed for each of them"
        writes, readers = a.writes | b.writes, graph.readers
        if read_inside := (a.writes & b.reads) | (b.writes & a.reads):
            writes -= {v for v in read_inside if readers[v] <= calls}
        cluster = Cluster(
            calls,
            min(a.first, b.first),
            constraint,
            (a.reads | b.reads) - read_inside if read_inside else a.reads | b.reads,
            writes,
            a.result_count + b.result_count,
            epoch,
            a.prim_count + b.prim_count,
            a.reductions | b.reductions,
            a.is_float64,
            a.strided_reads | b.strided_reads if of_one_size else a.reads | b.reads,
            a.partial_results | b.partial_results if of_one_size else a.writes | b.writes,
            a.is_elementwise and b.is_elementwise and agree,
            1 + max(a.version, b.version),
        )
        is_update = phase == "opt" and (constraint.size <= SMALL_UPDATE or not self._reads_collective(cluster))
        factor = UPDATE_FACTOR if is_update else 1
        if cluster.prim_count > factor * MAX_PRIMS or len(cluster.reads) + len(writes) > factor * MAX_TENSORS:
            return "one kernel would have too many operations or tensors"
        if constraint.cols and len(cluster.reads) + len(writes) > MAX_ROW_TENSORS:
            full = len([v for v in (*cluster.reads, *writes) if graph.bytes[v] * 4 >= constraint.size])
            if full > MAX_ROW_TENSORS and full > max(len(each.reads) + each.result_count for each in (a, b)):
                return "a kernel that holds rows would hold too many tensors"
        if graph.narrow_floats.isdisjoint(cluster.reads) and rounds_unnoticed(
            cluster.reads, lambda: self.clustering.prims(cluster.calls)
        ):
            return "of integers or float64 alone it would make floats that are not exact"
        if cluster.sums_long_rows and not (a.sums_long_rows or b.sums_long_rows):
            return "rows this long cannot be held: sums over them are a kernel of their own"
        return cluster

    def _reads_collective(self, cluster: Cluster) -> bool:
        """Does it read the result of a collective?"""
        sources = [producer(value)[0].target for value in cluster.reads if value.op != "placeholder"]
        return any(op_name(target) in KINDS or target is UNPACK for target in sources)

    def _bytes_held(self, a: Cluster, b: Cluster, merged: Cluster) -> int | str:
        """The bytes whose lifetime is extended when both run in one epoch; or why they may not.

        A cluster that runs earlier holds its results for longer. One that runs later holds for longer the operands that
        it alone reads, and its results for a shorter time. Values that are no longer stored are not held at all.
        Forward and backward do not merge where one of them has to move.
        """
        epoch = merged.barrier_epoch
        if a.barrier_epoch == b.barrier_epoch == epoch:
            return 0
        graph, inside, extra = self.graph, merged.calls, 0
        if {"fwd", "bwd"} <= {graph.phases[i] for i in merged.calls}:
            return "one is forward's, the other backward's"
        for cluster, other in ((a, b), (b, a)):
            stored = {v for v in cluster.writes if not graph.readers.get(v, set()) <= inside}
            extra -= sum(graph.bytes[v] for v in cluster.writes & other.reads if v not in stored)
            if cluster.barrier_epoch > epoch:
                extra += sum(graph.bytes[v] for v in stored)
            elif cluster.barrier_epoch < epoch:
                extra += sum(graph.bytes[v] for v in cluster.reads - other.reads if self._is_dead_before(v, epoch))
                extra -= sum(graph.bytes[v] for v in stored)
        return extra

    def _is_dead_before(self, value: fx.Node, epoch: int) -> bool:
        """Is the last reader of a value in an earlier epoch?"""
        graph = self.graph
        readers = graph.readers.get(value, set())
        if value.op == "placeholder":
            return False
        return all(i < graph.call_count and graph.barrier_epoch[i] < epoch for i in readers)


def _vertical_candidates(graph: FusionGraph, clusters: dict[int, Cluster]) -> list[tuple[int, int]]:
    """Producers with their consumers, and successive readers of one value."""
    pairs = [(source, target) for source, target in graph.edges if source in clusters and target in clusters]
    for readers in graph.readers.values():
        if len(readers) > 1:
            pairs += pairwise(sorted([i for i in readers if i in clusters]))
    return pairs


def _horizontal_candidates(clustering: Clustering) -> Iterable[tuple[int, int]]:
    """Successive clusters of one constraint and phase, which need share no value: a merge saves a launch."""
    by_constraint: dict[object, list[int]] = {}
    for number in sorted(clustering.clusters, key=clustering.dag.position.__getitem__):
        cluster = clustering.clusters[number]
        key = (cluster.constraint, clustering.graph.phases[cluster.first])
        by_constraint.setdefault(key, []).append(number)
    for numbers in by_constraint.values():
        yield from pairwise(numbers)
