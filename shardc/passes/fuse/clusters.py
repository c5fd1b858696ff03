"""Which calls become one kernel: the pair that saves most is merged first, as long as a merge is legal.

A merge saves the bytes of values that then stay in registers (written once, read by each), those of operands that both
read, and a launch. It is refused where the two have no space in common, need too many tensors at once, run a different
number of times a step, or where order forbids it (see `order`). Where one of them would have to run earlier than it
does, what it makes is held for longer: then that must be small.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from torch import fx

from shardc.ir.graph import info, results
from shardc.passes.fuse.order import Clusters
from shardc.passes.fuse.scene import Scene, reads
from shardc.passes.fuse.spaces import Demand, Prim, Space, space

LAUNCH = 8_600_000  # bytes that a GPU moves in the time of a launch
SMALL = 16  # what is held for longer is this many times less than what is saved
TINY = 4096  # or so few bytes
MOST_TENSORS = 40
MOST_PRIMS = 192
MOST_ROWS = 12  # full tensors of a kernel that holds a row at a time


@dataclass
class Group:
    """A cluster of units: what it reads and makes, and when it runs."""

    calls: list[int]
    demand: Demand
    reads: set[fx.Node]
    makes: set[fx.Node]
    home: int
    prims: int
    reduces: bool
    double: bool
    version: int = 0


@dataclass
class Clustering:
    scene: Scene
    order: Clusters
    groups: dict[int, Group] = field(default_factory=dict[int, Group])

    def prims(self, calls: Iterable[int]) -> list[Prim]:
        return [prim for i in sorted(calls) for prim in self.scene.units[i].prims]

    def space(self, group: Group) -> Space:
        found = space(self.prims(group.calls), group.demand)
        assert found is not None, "a cluster was made without a space"
        return found


@dataclass(frozen=True)
class Freedom:
    """What may be merged: also calls that share no value; none of those `apart`; those `still` run no earlier."""

    sideways: bool = True
    again: bool = True  # and what may be made again
    still: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()


def cluster(scene: Scene, free: Freedom | None = None) -> Clustering:
    """Merge what is worth it."""
    free = free or Freedom()
    found = Clustering(scene, Clusters(scene.end, scene.edges, scene.barriers))
    for i, one in scene.units.items():
        makes = {value for value in results(one.node) if value is not None}
        reduces = any(prim.over != "point" for prim in one.prims)
        if space(one.prims, one.demand) is not None:
            found.groups[i] = Group(
                [i], one.demand, reads(one), makes, scene.home[i], len(one.prims), reduces, one.double
            )
    merge = _Merging(found, free)
    merge.run(_neighbours(scene, found.groups))
    if free.sideways:
        merge.run(_alike(found))
    return found


def saved(scene: Scene, a: Group, b: Group) -> int:
    """Bytes that a kernel of both moves less than one of each."""
    total = 0
    both = set(a.calls) | set(b.calls)
    for one, other in ((a, b), (b, a)):
        for value in one.makes & other.reads:
            inside = scene.readers.get(value, set()) <= both
            total += scene.bytes[value] * (2 if inside else 1)
    return total + sum(scene.bytes[value] for value in a.reads & b.reads)


class _Merging:
    def __init__(self, found: Clustering, free: Freedom) -> None:
        self.found, self.scene, self.order, self.groups = found, found.scene, found.order, found.groups
        self.free = free
        self.heap: list[tuple[int, int, int, int, int]] = []
        self.pushed: set[tuple[int, int, int, int]] = set()

    def run(self, pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            self.push(a, b)
        while self.heap:
            _, a, b, *versions = heapq.heappop(self.heap)
            one, other = self.groups.get(a), self.groups.get(b)
            if one is not None and other is not None and [one.version, other.version] == versions:
                self.merge(a, b)
            else:  # scored before one of them was merged
                self.push(a, b)

    def push(self, a: int, b: int) -> None:
        a, b = self.order.of(a), self.order.of(b)
        one, other = self.groups.get(a), self.groups.get(b)
        if (
            one is None
            or other is None
            or a == b
            or not self.order.fits(a, b)
            or one.demand.with_(other.demand) is None
        ):
            return
        a, b, one, other = (a, b, one, other) if a < b else (b, a, other, one)
        entry = (a, b, one.version, other.version)
        if entry not in self.pushed:
            self.pushed.add(entry)
            heapq.heappush(self.heap, (-saved(self.scene, one, other), *entry))

    def merge(self, a: int, b: int) -> None:
        one, other = self.groups[a], self.groups[b]
        home = max(min(one.home, other.home), self.order.early[a] + 1, self.order.early[b] + 1)
        made = self._joined(one, other, home)
        if made is None or space(self.found.prims(made.calls), made.demand) is None:
            return
        kept = self.order.merge(a, b)
        if kept is None:
            return
        del self.groups[a], self.groups[b]
        self.groups[kept] = made
        for near in self._near(made, kept):
            self.push(kept, near)

    def _near(self, made: Group, kept: int) -> set[int]:
        near = {n for n in (*self.order.before[kept], *self.order.after[kept]) if n in self.groups}
        for value in made.reads:
            readers = self.scene.readers.get(value, set())
            if len(readers) <= 16:
                near |= {self.order.of(i) for i in readers if i < self.scene.end}
        return near - {kept}

    def _joined(self, a: Group, b: Group, home: int) -> Group | None:
        scene = self.scene
        first, second = scene.calls[a.calls[0]], scene.calls[b.calls[0]]
        if scene.inside[a.calls[0]] != scene.inside[b.calls[0]]:
            return None
        if (info(first).phase == "opt") != (info(second).phase == "opt") or a.double != b.double:
            return None
        if not self.free.apart.isdisjoint(a.calls) or not self.free.apart.isdisjoint(b.calls):
            return None
        wanted = a.demand.with_(b.demand)
        if wanted is None:
            return None
        calls = sorted([*a.calls, *b.calls])
        inside = set(calls)
        makes = {v for v in a.makes | b.makes if not scene.readers.get(v, set()) <= inside}
        made = Group(
            calls,
            wanted,
            (a.reads | b.reads) - a.makes - b.makes,
            a.makes | b.makes,
            home,
            a.prims + b.prims,
            a.reduces or b.reduces,
            a.double,
            1 + max(a.version, b.version),
        )
        if made.prims > MOST_PRIMS or len(made.reads) + len(makes) > MOST_TENSORS:
            return None
        if wanted.cols:
            large = sum(1 for v in (*made.reads, *makes) if scene.bytes[v] * 4 >= wanted.size)
            if large > MOST_ROWS and large > max(len(a.reads | a.makes), len(b.reads | b.makes)):
                return None
        return made if self._may_move(a, b, made) else None

    def _may_move(self, a: Group, b: Group, made: Group) -> bool:
        """What runs at another time than it did holds little for it, compared with what is saved.

        Run earlier, what it makes is held for longer; run later, what it alone reads. What no longer is stored is not
        held at all. Forward stays in forward.
        """
        home = made.home
        if a.home == b.home == home:
            return True
        scene, inside, held = self.scene, set(made.calls), 0
        if {"fwd", "bwd"} <= {info(scene.calls[i]).phase for i in made.calls}:
            return False
        for one, other in ((a, b), (b, a)):
            gone = sum(scene.bytes[v] for v in one.makes & other.reads if scene.readers.get(v, set()) <= inside)
            if one.home > home:
                if not self.free.still.isdisjoint(one.calls):
                    return False
                held += sum(scene.bytes[v] for v in one.makes if not scene.readers.get(v, set()) <= inside)
            elif one.home < home:
                held += sum(scene.bytes[v] for v in one.reads - other.reads if self._dies(v, home))
            held -= gone
        return held <= TINY or held * SMALL <= saved(scene, a, b)

    def _dies(self, value: fx.Node, home: int) -> bool:
        """Is a value read for the last time before `home`?"""
        scene = self.scene
        readers = scene.readers.get(value, set())
        return value.op != "placeholder" and all(i < scene.end and scene.home[i] < home for i in readers)


def _neighbours(scene: Scene, groups: dict[int, Group]) -> Iterable[tuple[int, int]]:
    """Producers and consumers, and those who read one value, one after another."""
    for source, target in scene.edges:
        if source in groups and target in groups:
            yield source, target
    for value in list(scene.readers):
        readers = sorted(i for i in scene.readers[value] if i in groups)
        yield from pairwise(readers)


def _alike(found: Clustering) -> Iterable[tuple[int, int]]:
    """Kernels that want the same space, in order: merged, they are one launch less."""
    alike: dict[object, list[int]] = {}
    for at in sorted(found.groups, key=lambda n: found.order.place[n]):
        group = found.groups[at]
        phase = info(found.scene.calls[group.calls[0]]).phase
        alike.setdefault((group.demand, phase), []).append(at)
    for same in alike.values():
        yield from pairwise(same)
