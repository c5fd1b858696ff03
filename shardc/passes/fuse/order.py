"""A DAG whose nodes are merged pair by pair, kept acyclic and in a topological order that is repaired, not recomputed.

Merging a and b makes a cycle where a path leads from one to the other through a third. Such a path lies between them in
any topological order of the *merged* graph (the original's does not do), so the search is bounded by their places: the
online order of Pearce and Kelly, "A dynamic topological sort algorithm for directed acyclic graphs", JEA 11, 2006.

    a -> x -> b        a and b may not be merged, unless x is merged with one of them first

Some nodes are *barriers*, in a line of their own that no merge disturbs: collectives and products stay in their order,
and nothing that they need comes later than it did. Each other node fits between the last barrier before it and the
first after it, its window; two of them merge only where one place does for both.

    mm0   relu -> gelu   mm1   sum      relu and gelu lie after 0 and before 1; a sum of the gelu after 0 and anywhere
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


class Clusters:
    """Nodes 0..count-1, in topological order, and the clusters that they become."""

    def __init__(self, count: int, edges: Iterable[tuple[int, int]], barriers: Sequence[int]) -> None:
        self.place = list(range(count))
        self.before: list[set[int]] = [set() for _ in range(count)]
        self.after: list[set[int]] = [set() for _ in range(count)]
        self.members: list[list[int]] = [[i] for i in range(count)]
        self._in = list(range(count))
        self.barrier = {node: i for i, node in enumerate(barriers)}
        for source, target in (*edges, *pairwise(barriers)):
            self.before[target].add(source)
            self.after[source].add(target)
        self.early = [-1] * count  # the last barrier that must come before
        self.late = [len(barriers)] * count  # the first that must come after
        for node in range(count):
            self.early[node] = max((self._done(p) for p in self.before[node]), default=-1)
        for node in reversed(range(count)):
            self.late[node] = min((self._due(s) for s in self.after[node]), default=len(barriers))

    def of(self, node: int) -> int:
        """The cluster that a node is in, by the number of one of its members."""
        while self._in[node] != node:
            self._in[node] = node = self._in[self._in[node]]
        return node

    def fits(self, a: int, b: int) -> bool:
        """Is there a place for both between barriers?"""
        early, late = self.early, self.late
        begin = early[a] if early[a] > early[b] else early[b]
        return begin < late[a] and begin < late[b]

    def merge(self, a: int, b: int) -> int | None:
        """Make one cluster of two, and return it; None where that would make a cycle, or disturb barriers."""
        if not self.fits(a, b):
            return None
        if self.place[a] > self.place[b]:
            a, b = b, a
        up, down = self._between(a, b)
        if not down.isdisjoint(up):
            return None
        if up or down:
            self._reorder(a, b, up, down)
        else:
            self.place[b] = self.place[a]
        self._contract(a, b)
        return a

    def cycles(self, a: int, b: int) -> bool:
        """Would the two as one make a cycle?"""
        up, down = self._between(*sorted((a, b), key=self.place.__getitem__))
        return not down.isdisjoint(up)

    def _between(self, a: int, b: int) -> tuple[set[int], set[int]]:
        """What b needs and what needs a, of that which lies between them."""
        low, high = self.place[a], self.place[b]
        down = self._reached(self.after[a] - {b}, self.after, low, high)
        return self._reached(self.before[b] - {a}, self.before, low, high), down

    def _reached(self, start: set[int], step: list[set[int]], low: int, high: int) -> set[int]:
        place = self.place
        todo = [n for n in start if low < place[n] < high]
        found = set(todo)
        while todo:
            for n in step[todo.pop()]:
                if n not in found and low < place[n] < high:
                    found.add(n)
                    todo.append(n)
        return found

    def _reorder(self, a: int, b: int, up: set[int], down: set[int]) -> None:
        """What b needs, then the two as one, then what needs a; in the places that they all had."""
        place = self.place
        first, last = sorted(up, key=place.__getitem__), sorted(down, key=place.__getitem__)
        pool = sorted([place[n] for n in (*first, *last, a, b)])
        for node, at in zip(first, pool, strict=False):
            place[node] = at
        place[a] = place[b] = pool[len(first)]
        for node, at in zip(reversed(last), reversed(pool), strict=False):
            place[node] = at

    def _contract(self, a: int, b: int) -> None:
        self._in[b] = a
        self.members[a] += self.members[b]
        self.members[b] = []
        for step, back in ((self.before, self.after), (self.after, self.before)):
            for n in step[b]:
                back[n].discard(b)
                if n != a:
                    back[n].add(a)
                    step[a].add(n)
            step[b] = set()
            step[a].discard(b)
        self.early[a] = max(self.early[a], self.early[b])
        self.late[a] = min(self.late[a], self.late[b])
        self._spread(a)

    def _spread(self, start: int) -> None:
        """What comes after a cluster cannot be earlier than it, and what comes before it not later."""
        todo = [start]
        while todo:
            node = todo.pop()
            for n in self.after[node]:
                if n not in self.barrier and self.early[n] < self.early[node]:
                    self.early[n] = self.early[node]
                    todo.append(n)
        todo = [start]
        while todo:
            node = todo.pop()
            for n in self.before[node]:
                if n not in self.barrier and self.late[n] > self.late[node]:
                    self.late[n] = self.late[node]
                    todo.append(n)

    def _done(self, node: int) -> int:
        return self.barrier.get(node, self.early[node])

    def _due(self, node: int) -> int:
        return self.barrier.get(node, self.late[node])
