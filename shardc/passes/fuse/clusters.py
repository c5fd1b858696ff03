"""Which calls become one kernel: the pair that saves most is merged first, as long as a merge is legal.

A merge saves the bytes of values that then stay in registers (written once, read by each), those of operands that both
read, and a launch. It is refused where the two have no space in common, need too many tensors at once, run a different
number of times a step, or where order forbids it (see `order`). Where one of them would have to run earlier than it
does, what it makes is held for longer, and where later, what it reads: then that must be small, or there must be room
for it (see `room`). Phases forbid little: the optimizer's calls merge with its own alone, and forward's with backward's
only where none of them moves past a barrier, as a loss and its gradient, after the last product, are one kernel. What a
collective waits for, and a product for that, gets no work to do beside (see `delays`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from shardc.ir.collectives import KINDS
from shardc.ir.graph import info, op_name, producer, results, type_of
from shardc.ir.ops.buckets import UNPACK
from shardc.passes.fuse.delays import LAUNCH, Urgent
from shardc.passes.fuse.order import Clusters
from shardc.passes.fuse.room import Room
from shardc.passes.fuse.scene import Scene
from shardc.passes.fuse.spaces import Demand, Over, Prim, Space, Value, space, whole
from shardc.passes.fuse.units import Unit

SMALL = 16  # what is held for longer is this many times less than what is saved
TINY = 4096  # or so few bytes
ROOMY = 4  # or this many times more, where there is room for it
MOST_TENSORS = 40
MOST_PRIMS = 192
EXACT = {"same", "cast", "where", "sum", "rsum", "csum", "neg", "uniform"}  # of integers and bools, in float32
UPDATES = 8  # times as many where parameters are updated, each by programs of its own (kernels_triton/fused/apart.py),
FEW = 65536  # elements at most where they wait for collectives: large updates begin when their gradients are there
MOST_ROWS = 12  # full tensors of a kernel that holds a row at a time
LONG = 16384  # columns of a row that is held; longer ones are looped over
APART = "no rows and columns are common to both"
# Operations of dozens of instructions.
DEAR = {"sin", "cos", "pow", "erfc", "erfcx", "erfinv", "ndtri", "lgamma", "digamma", "trigamma", "i0", "i1", "fmod"}


@dataclass
class Group:
    """A cluster of units: what it reads and makes, and when it runs."""

    calls: list[int]
    demand: Demand
    reads: Set[fx.Node]
    makes: Set[fx.Node]  # of the values that it makes those that other calls read, or that are outputs of the graph
    made: int  # how many values it makes, with those that nobody else reads
    home: int
    prims: int
    over: frozenset[Over]  # what its operations reduce
    double: bool
    apart: Set[fx.Node]  # values of which it reads parts, or which it repeats
    odd: Set[fx.Node]  # what it makes that is not one element for each of its own
    flat: bool  # it is made of nothing but such
    version: int = 0


@dataclass(frozen=True)
class Freedom:
    """What may be merged: also calls that share no value; none of those `apart`; those `still` run when they did. The
    `excluded`, by name, are no kernels at all."""

    sideways: bool = True
    again: bool = True  # and what may be made again
    longer: bool = True  # and what then is held for longer, where there is room
    still: frozenset[int] = frozenset()
    apart: frozenset[int] = frozenset()
    excluded: frozenset[str] = frozenset()


@dataclass
class Clustering:
    scene: Scene
    order: Clusters
    free: Freedom
    room: Room
    urgent: Urgent
    groups: dict[int, Group] = field(default_factory=dict[int, Group])

    def prims(self, calls: Iterable[int]) -> list[Prim]:
        return [prim for i in sorted(calls) for prim in self.scene.units[i].prims]

    def space(self, group: Group) -> Space:
        found = space(self.prims(group.calls), group.demand)
        assert found is not None, "a cluster was made without a space"
        return found


def cluster(scene: Scene, free: Freedom | None = None, room: Room | None = None) -> Clustering:
    """Merge what is worth it."""
    free = free or Freedom()
    room = room if room is not None and free.longer else Room.none()
    found = Clustering(scene, Clusters(scene.end, scene.edges, scene.barriers), free, room, Urgent.of(scene))
    for i, one in scene.units.items():
        parts, _, flat = lies = _lies(one)
        if (flat and not parts) or space(one.prims, one.demand) is not None:
            values = [value for value in results(one.node) if value is not None]
            makes = {value for value in values if scene.readers.get(value)}
            over: frozenset[Over] = frozenset([prim.over for prim in one.prims])
            about = (len(values), scene.home[i], len(one.prims), over, one.double)
            found.groups[i] = Group([i], one.demand, one.reads, makes, *about, *lies)
    merge = _Merging(found)
    merge.run(_neighbours(scene, found.groups))
    if free.sideways:
        merge.run(_alike(found))
    return found


def _lies(one: Unit) -> tuple[Set[fx.Node], Set[fx.Node], bool]:
    """A group's `apart`, `odd` and `flat`, of one call."""
    size = one.demand.size
    every = whole(size)
    made = {prim.out for prim in one.prims}
    apart: set[fx.Node] = set()
    odd: set[fx.Node] = set()
    flat = True
    for prim in one.prims:
        whole_of_it = prim.over == "point" and prim.size == size and prim.op != "cat"
        flat &= whole_of_it and not prim.index
        if not whole_of_it and isinstance(prim.out, fx.Node):
            odd.add(prim.out)
        for read in prim.reads:
            if prim.size == size and read.blocks == every and not read.offset:
                continue
            if read.value in made:
                flat = False
            elif isinstance(read.value, fx.Node):
                apart.add(read.value)
    return apart, odd, flat


def long_sums(group: Group) -> bool:
    """Does it reduce rows, and sum over them, where a kernel cannot hold a row? It would write and read its sums once a
    row: a kernel of their own takes a quarter of that time, and reads what it sums once more."""
    return group.demand.cols > LONG and {"row", "col"} <= group.over


def saved(scene: Scene, a: Group, b: Group) -> int:
    """Bytes that a kernel of both moves less than one of each."""
    total = 0
    for one, other in ((a, b), (b, a)):
        if shared := one.makes & other.reads:
            both = {*a.calls, *b.calls}
            for value in shared:
                inside = scene.readers.get(value, set()) <= both
                total += scene.bytes[value] * (2 if inside else 1)
    for value in a.reads & b.reads:
        total += scene.bytes[value]
    return total


def _agree(a: Group, b: Group, wanted: Demand) -> bool:
    """Is it plain that two that have spaces have one together, without looking through all that they do? Each element
    that either makes, and the other reads, is there where it is read. Flat ones run along any dims that they ask for,
    others along those that they had; and with sums over rows more has to be known, of what is there before them."""
    if a.demand.size != b.demand.size or not all(one.flat or one.demand == wanted for one in (a, b)):
        return False
    if not {"col", "all"}.isdisjoint(a.over | b.over):
        return False
    across = a.apart.isdisjoint(b.makes) and b.apart.isdisjoint(a.makes)
    return across and a.odd.isdisjoint(b.reads) and b.odd.isdisjoint(a.reads)


def apart(found: Clustering, a: int, b: int) -> str:
    """Why two of what was clustered are not one kernel; "" where only order can forbid it."""
    order, scene = found.order, found.scene
    if not order.fits(a, b):
        first, second = (a, b) if order.early[a] > order.early[b] else (b, a)
        begin, end = (info(scene.calls[scene.barriers[at]]).name for at in (order.late[second], order.early[first]))
        return f"%{begin} runs between them" if begin == end else f"%{begin} to %{end} run between them"
    joined = _Merging(found).joined(a, b)
    return joined if isinstance(joined, str) else ""


def _late(group: Group) -> bool:
    return group.demand.cols > LONG and "col" in group.over


def repeats_dear(prims: Iterable[Prim], size: int) -> bool:
    """Would a kernel of so many elements compute what is dear for each of many that share it? As the angles of a rotary
    embedding for every head: that takes 2.4 times as long as reading them."""
    return any(prim.op in DEAR and 1 < prim.size < size for prim in prims)


def rounds_unseen(reads: Iterable[Value], prims: Callable[[], Iterable[Prim]]) -> bool:
    """Are floats made of integers alone, and not exactly, or narrower ones of float64 alone? Nothing would tell such a
    kernel to compute in float64, which is how a program is held against the single device."""
    double = False
    for value in reads:
        if isinstance(value, fx.Node) and (dtype := type_of(value).dtype).is_floating_point:
            if dtype != torch.float64:
                return False
            double = True
    if double:
        return any(prim.dtype.is_floating_point and prim.dtype != torch.float64 for prim in prims())
    made = [prim for prim in prims() if prim.dtype.is_floating_point]
    return any(prim.op not in EXACT or prim.dtype.itemsize < 4 for prim in made)


class _Merging:
    def __init__(self, found: Clustering) -> None:
        self.found, self.scene, self.order, self.groups = found, found.scene, found.order, found.groups
        self.free, self.room = found.free, found.room
        self.heap: list[tuple[bool, int, int, int, int, int]] = []
        self.pushed: set[tuple[int, int, int, int]] = set()

    def run(self, pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            self.push(a, b)
        while self.heap:
            _, _, a, b, first, second = heapq.heappop(self.heap)
            one, other = self.groups.get(a), self.groups.get(b)
            if one is not None and other is not None and one.version == first and other.version == second:
                self.merge(a, b)
            else:  # scored before one of them was merged
                self.push(a, b)

    def push(self, a: int, b: int) -> None:
        a, b = self.order.of(a), self.order.of(b)
        if a != b:
            self.score(a, b)

    def score(self, a: int, b: int) -> None:
        """What two clusters save as one, where they may be one at all."""
        if a > b:
            a, b = b, a
        one, other = self.groups.get(a), self.groups.get(b)
        if one is None or other is None or not self.order.fits(a, b):
            return
        entry = (a, b, one.version, other.version)
        if entry not in self.pushed and one.demand.with_(other.demand) is not None:
            self.pushed.add(entry)
            # Sums over long rows wait for what reduces those rows, with which they may not be.
            heapq.heappush(self.heap, (_late(one) or _late(other), -saved(self.scene, one, other), *entry))

    def merge(self, a: int, b: int) -> None:
        joined = self.joined(a, b)
        if isinstance(joined, str):
            return
        kept = self.order.merge(a, b)
        if kept is None:
            return
        made, held, first, last = joined
        self.room.take(max(held, 0), first, last)
        del self.groups[a], self.groups[b]
        self.groups[kept] = made
        for near in self._near(made, kept):
            self.score(kept, near)

    def joined(self, a: int, b: int) -> tuple[Group, int, int, int] | str:
        """The two as one, the bytes that are then held for longer, and from when to when; or why they may not be."""
        one, other = self.groups[a], self.groups[b]
        home = max(min(one.home, other.home), self.order.early[a] + 1, self.order.early[b] + 1)
        made = self._joined(one, other, home)
        if isinstance(made, str):
            return made
        held = self._held(one, other, made)
        if isinstance(held, str):
            return held
        first, last = min(one.home, other.home, home), max(one.home, other.home, home)
        if self._delays(one, other, home) or self._delays(other, one, home):
            return "a collective that the next product waits for would begin later"
        if held > TINY and not self._may_hold(held, saving := saved(self.scene, one, other), first, last):
            return f"{held} bytes would be held for longer to save {saving}, and the peak of memory leaves no room"
        if not _agree(one, other, made.demand) and space(self.found.prims(made.calls), made.demand) is None:
            return APART
        return made, held, first, last

    def _delays(self, one: Group, other: Group, home: int) -> bool:
        """Would an urgent collective, of what the one makes, wait for the other, which it does not need?"""
        soon = self.found.urgent.soon(one.makes, home)
        if soon <= self.found.urgent.soon(other.makes, home) or not other.makes.isdisjoint(one.reads):
            return False
        inside = {*one.calls, *other.calls}
        stays = {v for v in other.makes if not self.scene.readers.get(v, set()) <= inside}
        return sum(self.scene.bytes[v] for v in (other.reads - one.reads - one.makes) | stays) > LAUNCH

    def _may_hold(self, held: int, saving: int, first: int, last: int) -> bool:
        if held * SMALL <= saving:
            return True
        return held <= ROOMY * saving and self.room.has(held, first, last)

    def _near(self, made: Group, kept: int) -> set[int]:
        near = {n for n in (*self.order.before[kept], *self.order.after[kept]) if n in self.groups}
        for value in made.reads:
            readers = self.scene.readers.get(value, set())
            if len(readers) <= 16:
                near |= {self.order.of(i) for i in readers if i < self.scene.end}
        return near - {kept}

    def _joined(self, a: Group, b: Group, home: int) -> Group | str:
        scene = self.scene
        first, second = scene.calls[a.calls[0]], scene.calls[b.calls[0]]
        if scene.inside[a.calls[0]] != scene.inside[b.calls[0]]:
            return "one runs once a microbatch, the other once a step"
        if (info(first).phase == "opt") != (info(second).phase == "opt"):
            return "one is the optimizer's, the other is not"
        if a.double != b.double:
            return "one computes in float64, the other does not"
        if not self.free.apart.isdisjoint(a.calls) or not self.free.apart.isdisjoint(b.calls):
            return "merged, they held more at the peak of memory"
        wanted = a.demand.with_(b.demand)
        if wanted is None:
            return APART
        if a.demand.size != b.demand.size and repeats_dear(self.found.prims((*a.calls, *b.calls)), wanted.size):
            return "sines that many elements share would be computed for each of them"
        calls = sorted([*a.calls, *b.calls])
        inside, same = set(calls), a.demand.size == b.demand.size
        makes = {v for v in a.makes | b.makes if not scene.readers.get(v, set()) <= inside}
        made = Group(
            calls,
            wanted,
            (a.reads | b.reads) - a.makes - b.makes,
            makes,
            a.made + b.made,
            home,
            a.prims + b.prims,
            a.over | b.over,
            a.double,
            *((a.apart | b.apart, a.odd | b.odd) if same else (a.reads | b.reads, a.makes | b.makes)),
            a.flat and b.flat and _agree(a, b, wanted),
            1 + max(a.version, b.version),
        )
        updates = info(first).phase == "opt" and (wanted.size <= FEW or not self._waits(made))
        more = UPDATES if updates else 1
        if made.prims > more * MOST_PRIMS or len(made.reads) + len(makes) > more * MOST_TENSORS:
            return "one kernel would have too many operations or tensors"
        if wanted.cols:
            large = sum(1 for v in (*made.reads, *makes) if scene.bytes[v] * 4 >= wanted.size)
            if large > MOST_ROWS and large > max(len(one.reads) + one.made for one in (a, b)):
                return "a kernel that holds rows would hold too many tensors"
        if rounds_unseen(made.reads, lambda: self.found.prims(made.calls)):
            return "of integers or float64 alone it would make floats that are not exact"
        if long_sums(made) and not (long_sums(a) or long_sums(b)):
            return "rows this long cannot be held: sums over them are a kernel of their own"
        return made

    def _waits(self, made: Group) -> bool:
        """Does it read what a collective brings?"""
        sources = [producer(value)[0].target for value in made.reads if value.op != "placeholder"]
        return any(op_name(target) in KINDS or target is UNPACK for target in sources)

    def _held(self, a: Group, b: Group, made: Group) -> int | str:
        """Bytes that are held for longer where two run at one time; why, where they may not.

        Run earlier, what it makes is held for longer; run later, what it alone reads, and what it makes for a shorter
        time. What no longer is stored is not held at all. Where one has to move, forward stays in forward.
        """
        home = made.home
        if a.home == b.home == home:
            return 0
        scene, inside, held = self.scene, set(made.calls), 0
        if {"fwd", "bwd"} <= {info(scene.calls[i]).phase for i in made.calls}:
            return "one is forward's, the other backward's"
        for one, other in ((a, b), (b, a)):
            stays = {v for v in one.makes if not scene.readers.get(v, set()) <= inside}
            held -= sum(scene.bytes[v] for v in one.makes & other.reads if v not in stays)
            if one.home != home and not self.free.still.isdisjoint(one.calls):
                return "run at another time, it held more at the peak of memory"
            if one.home > home:
                held += sum(scene.bytes[v] for v in stays)
            elif one.home < home:
                held += sum(scene.bytes[v] for v in one.reads - other.reads if self._dies(v, home))
                held -= sum(scene.bytes[v] for v in stays)
        return held

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
