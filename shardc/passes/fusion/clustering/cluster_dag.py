"""A DAG whose nodes are merged pair by pair. It stays acyclic, and its topological order is repaired, not recomputed.

Merging a and b makes a cycle if a path leads from one to the other through a third node. All nodes of such a path lie
between a and b in any topological order of the *merged* graph (the original graph's order does not have that
property), so their positions bound the search: the online order of Pearce and Kelly, "A dynamic topological sort
algorithm for directed acyclic graphs", JEA 11, 2006.

    a -> x -> b        a and b may not be merged, unless x is merged with one of them first

Some nodes are *barriers*: collectives and products. They form a chain that no merge reorders, and nothing that a
barrier needs moves past it. Every other node has a *window*: the last barrier before it and the first after it. Two
nodes merge only if their windows overlap.

    mm0   relu -> gelu   mm1   sum      relu and gelu lie after 0 and before 1; a sum of the gelu after 0 and anywhere
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


class ClusterDag:
    """Nodes 0..count-1 in topological order, and the clusters into which they are merged."""

    def __init__(self, count: int, edges: Iterable[tuple[int, int]], barriers: Sequence[int]) -> None:
        self.position = list(range(count))
        self.predecessors: list[set[int]] = [set() for _ in range(count)]
        self.successors: list[set[int]] = [set() for _ in range(count)]
        self.members: list[list[int]] = [[i] for i in range(count)]
        self.parent = list(range(count))  # of each node, towards its cluster: itself, or one that it was merged into
        self.barrier = {node: i for i, node in enumerate(barriers)}
        for source, target in (*edges, *pairwise(barriers)):
            self.predecessors[target].add(source)
            self.successors[source].add(target)
        self.earliest = [-1] * count  # the last barrier that must come before
        self.latest = [len(barriers)] * count  # the first barrier that must come after
        barrier, earliest, latest = self.barrier, self.earliest, self.latest
        for node in range(count):
            for p in self.predecessors[node]:
                bound = barrier[p] if p in barrier else earliest[p]
                if bound > earliest[node]:
                    earliest[node] = bound
        for node in reversed(range(count)):
            for s in self.successors[node]:
                bound = barrier[s] if s in barrier else latest[s]
                if bound < latest[node]:
                    latest[node] = bound

    def find(self, node: int) -> int:
        """The cluster of a node, as the number of one of its members."""
        parent = self.parent
        while parent[node] != node:
            parent[node] = node = parent[parent[node]]
        return node

    def share_window(self, a: int, b: int) -> bool:
        """Can both run between the same two barriers?"""
        earliest, latest = self.earliest, self.latest
        begin = earliest[a] if earliest[a] > earliest[b] else earliest[b]
        return begin < latest[a] and begin < latest[b]

    def merge(self, a: int, b: int) -> int | None:
        """Merge two clusters and return the result; None where that would make a cycle or reorder barriers."""
        if not self.share_window(a, b):
            return None
        if self.position[a] > self.position[b]:
            a, b = b, a
        ancestors, descendants = self._between(a, b)
        if ancestors or descendants:
            if not descendants.isdisjoint(ancestors):
                return None
            self._reorder(a, b, ancestors, descendants)
        else:
            self.position[b] = self.position[a]
        self._contract(a, b)
        return a

    def would_cycle(self, a: int, b: int) -> bool:
        """Would merging the two make a cycle?"""
        ancestors, descendants = self._between(*sorted((a, b), key=self.position.__getitem__))
        return not descendants.isdisjoint(ancestors)

    def _between(self, a: int, b: int) -> tuple[set[int], set[int]]:
        """Of the nodes positioned between a and b: the ancestors of b, and the descendants of a."""
        position = self.position
        low, high = position[a], position[b]
        below = [n for n in self.successors[a] if position[n] < high]  # b is not: its position is `high`
        above = [n for n in self.predecessors[b] if low < position[n]]
        descendants = self._reachable(below, self.successors, low, high) if below else set[int]()
        return self._reachable(above, self.predecessors, low, high) if above else set[int](), descendants

    def _reachable(self, todo: list[int], neighbours: list[set[int]], low: int, high: int) -> set[int]:
        position = self.position
        reached = set(todo)
        while todo:
            for n in neighbours[todo.pop()]:
                if n not in reached and low < position[n] < high:
                    reached.add(n)
                    todo.append(n)
        return reached

    def _reorder(self, a: int, b: int, ancestors: set[int], descendants: set[int]) -> None:
        """Order the ancestors of b, then the merged pair, then the descendants of a, in the positions that all of them
        had."""
        position = self.position
        first = sorted(ancestors, key=position.__getitem__)
        last = sorted(descendants, key=position.__getitem__)
        slots = sorted([position[n] for n in (*first, *last, a, b)])
        for node, slot in zip(first, slots, strict=False):
            position[node] = slot
        position[a] = position[b] = slots[len(first)]
        for node, slot in zip(reversed(last), reversed(slots), strict=False):
            position[node] = slot

    def _contract(self, a: int, b: int) -> None:
        self.parent[b] = a
        self.members[a] += self.members[b]
        self.members[b] = []
        for neighbours, reverse in ((self.predecessors, self.successors), (self.successors, self.predecessors)):
            for n in neighbours[b]:
                reverse[n].discard(b)
                reverse[n].add(a)
            neighbours[a] |= neighbours[b]
            neighbours[a] -= {a, b}
            neighbours[b] = set()
        earliest, latest = self.earliest, self.latest
        if earliest[a] != earliest[b] or latest[a] != latest[b]:
            earliest[a] = max(earliest[a], earliest[b])
            latest[a] = min(latest[a], latest[b])
            self._propagate_windows(a)

    def _propagate_windows(self, start: int) -> None:
        """Narrow the windows of the nodes after a cluster, and of those before it."""
        todo = [start]
        while todo:
            node = todo.pop()
            for n in self.successors[node]:
                if n not in self.barrier and self.earliest[n] < self.earliest[node]:
                    self.earliest[n] = self.earliest[node]
                    todo.append(n)
        todo = [start]
        while todo:
            node = todo.pop()
            for n in self.predecessors[node]:
                if n not in self.barrier and self.latest[n] > self.latest[node]:
                    self.latest[n] = self.latest[node]
                    todo.append(n)
