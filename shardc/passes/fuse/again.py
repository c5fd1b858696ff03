"""Values that a kernel makes again instead of reading: cheaper where they come from what it reads anyway.

    forward     x = mm;  u = x + b;  t = tanh(u);  y = u * t              stores u, t and y
    backward    reads g, u and t            ->   reads g and x, and makes u and t again: they are stored nowhere

Pointwise chains only, few operations, and none that is dear for each of many that share it. At the same cost, what a
parameter gives is made again: there is less to hold. Several values that come from one are weighed together. What is
then stored no more, and what is then computed for nobody, goes.

What is made again need not have the same bits: kernels compute a chain by formulas of their own, and multiply and add
in one rounding where the compiler finds the two together (`enable_fp_fusion`, in kernels_triton/launch.py). So nothing
is made again where a comparison, a floor or the gradient of an extreme would see the difference: `jumps` says what.
Within one kernel a value is one register, and equal to itself; a product that is added to something there may be left
unrounded by that sum alone, as in any compiler's kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import fx

from shardc.ir.graph import results
from shardc.passes.fuse.clusters import MOST_PRIMS, Clustering, repeats_dear, rounds_unseen
from shardc.passes.fuse.scene import Scene
from shardc.passes.fuse.spaces import Demand, Prim, Value, demand, space
from shardc.passes.fuse.units import Unit

MOST = 24  # operations made again for one value
FREE = 16  # leaves this many times smaller than the value cost nothing


@dataclass(frozen=True)
class Part:
    """A kernel in the making: its calls, all that it computes, and what space it wants."""

    calls: tuple[int, ...]
    prims: tuple[Prim, ...]
    demand: Demand
    home: int
    outputs: tuple[fx.Node, ...] = ()

    @cached_property
    def reads(self) -> frozenset[fx.Node]:
        return _reads(self.prims)


def parts(found: Clustering, again: bool = True) -> list[Part]:
    """The kernels of a clustering, in order, with nothing in them that no one needs."""
    scene = found.scene
    order = sorted(found.groups, key=lambda at: found.order.place[at])
    made: list[Part] = []
    for at in order:
        group = found.groups[at]
        made.append(Part(tuple(sorted(group.calls)), tuple(found.prims(group.calls)), group.demand, group.home))
    made = _needed(scene, made)
    if again:
        makes = _Again(scene, made)
        made = _needed(scene, [makes.improved(part) for part in reversed(made)][::-1])
    return made


def _needed(scene: Scene, found: list[Part]) -> list[Part]:
    """What each part makes for others, and only that."""
    units = {i for part in found for i in part.calls}
    readers = {value: {i for i in who if i not in units} for value, who in scene.readers.items()}
    kept: list[Part] = []
    for part in reversed(found):
        values = [v for i in part.calls for v in results(scene.calls[i]) if v is not None]
        outputs = tuple(v for v in values if readers.get(v))
        needed: set[Value] = set(outputs)
        prims: list[Prim] = []
        for prim in reversed(part.prims):
            if prim.out in needed:
                prims.append(prim)
                needed.update(read.value for read in prim.reads)
        if not outputs:
            continue
        part = replace(_without(part, tuple(reversed(prims))), outputs=outputs)
        for value in part.reads:
            readers.setdefault(value, set()).add(part.calls[0])
        kept.append(part)
    return kept[::-1]


def _without(part: Part, prims: tuple[Prim, ...]) -> Part:
    """A part with some of its operations only. What is left may be smaller than what is gone, by which it had its place
    in the space: then its space is its own, and where it has none, all stay."""
    if len(prims) == len(part.prims):
        return part
    for wanted in (part.demand, demand(prims)):
        if wanted is not None and space(prims, wanted) is not None:
            return replace(part, prims=prims, demand=wanted)
    return part


@dataclass
class _Unfolded:
    """What makes a value: the operations in order, the large values that they read, and those that were asked for."""

    prims: dict[Value, Prim] = field(default_factory=dict[Value, Prim])
    leaves: set[fx.Node] = field(default_factory=set[fx.Node])
    seen: set[fx.Node] = field(default_factory=set[fx.Node])
    outs: set[Value] = field(default_factory=set[Value])  # also of those whose turn in the order is yet to come


class _Again:
    """What parts would better make themselves."""

    def __init__(self, scene: Scene, found: list[Part]) -> None:
        self.scene = scene
        self.recipes = self._recipes()
        self.asked: dict[fx.Node, list[fx.Node]] = {}  # what a recipe reads, by name
        self.unfolded = 0  # recipes that were looked at
        units = {i for part in found for i in part.calls}
        self.outside = {value for value, who in scene.readers.items() if not who <= units}  # others read them too
        self.readers: dict[fx.Node, int] = {}
        for part in found:
            self._count(part, 1)

    def _count(self, part: Part, change: int) -> None:
        for value in part.reads:
            self.readers[value] = self.readers.get(value, 0) + change

    def improved(self, own: Part) -> Part:
        """Once more where it then reads other values."""
        better = self._improved(own)
        return better if better.reads == own.reads else self._improved(better)

    def _improved(self, own: Part) -> Part:
        choices: dict[fx.Node, tuple[list[Prim], frozenset[fx.Node]]] = {}
        for value in sorted(own.reads, key=lambda v: v.name):
            if value in self.recipes:
                found = _Unfolded()
                few = self._unfold(value, own.reads, found, self.scene.bytes[value] // FREE)
                if few and not repeats_dear(found.prims.values(), own.demand.size):
                    choices[value] = (list(found.prims.values()), frozenset(found.leaves - own.reads))
        groups: dict[frozenset[fx.Node], list[fx.Node]] = {}
        for value, (_, new) in choices.items():
            groups.setdefault(new, []).append(value)
        for new, values in sorted(groups.items(), key=lambda item: len(item[0])):
            cost = sum(self.scene.bytes[leaf] for leaf in new - own.reads)
            gain = self._gain(values)
            if gain > cost or (gain == cost and all(leaf.op == "placeholder" for leaf in new)):
                better = self._with(own, [prim for value in values for prim in choices[value][0]])
                self._count(own, -1)
                self._count(better, 1)
                own = better
        return own

    def _gain(self, values: list[fx.Node]) -> int:
        """Bytes that are read no more, and those of values that then nobody reads."""
        size = self.scene.bytes
        return sum(size[v] * (1 if v in self.outside or self.readers[v] > 1 else 2) for v in values)

    def _with(self, own: Part, prims: list[Prim]) -> Part:
        made = {prim.out for prim in own.prims}
        fresh = tuple({prim.out: prim for prim in prims if prim.out not in made}.values())
        every = tuple(_ordered((*fresh, *own.prims)))
        wanted = demand(every)
        if wanted is None or len(every) > MOST_PRIMS or wanted.size != own.demand.size:
            return own
        better = replace(own, prims=every, demand=wanted)
        unseen = rounds_unseen(better.reads, lambda: every) and not rounds_unseen(own.reads, lambda: own.prims)
        return own if unseen or space(every, wanted) is None else better

    def _unfold(self, value: fx.Node, there: frozenset[fx.Node], found: _Unfolded, free: int) -> bool:
        """The operations that make a value from what is there, from small values, and from what is no chain's. False
        as soon as they are too many: chains are long, and join again and again."""
        self.unfolded += 1
        recipe = self.recipes[value]
        found.seen.add(value)
        found.outs.update(prim.out for prim in recipe)
        if len(found.outs) > MOST:
            return False
        if value not in self.asked:
            self.asked[value] = sorted(_reads(recipe), key=lambda v: v.name)
        for read in self.asked[value]:
            if read in there or read in found.seen or self.scene.bytes[read] <= free:
                continue
            if read not in self.recipes:
                found.leaves.add(read)
            elif not self._unfold(read, there, found, free):
                return False
        found.prims.update((prim.out, prim) for prim in recipe)
        return True

    def _recipes(self) -> dict[fx.Node, tuple[Prim, ...]]:
        """Of float64 none: a kernel that has other floats too would round them to float32. Of what a jump would tell
        from what it was, none: a chain begins with it as it was stored."""
        found: dict[fx.Node, tuple[Prim, ...]] = {}
        for i, one in self.scene.units.items():
            for value in results(self.scene.calls[i]):
                recipe = None if value is None or one.double else _recipe(one, value)
                if value is not None and recipe is not None and self.scene.jumps.repeatable(recipe):
                    found[value] = recipe
        return found


def _recipe(one: Unit, value: fx.Node) -> tuple[Prim, ...] | None:
    """What makes a value of a call's operands and its other results, if that is pointwise."""
    needed: set[Value] = {value}
    kept: list[Prim] = []
    for prim in reversed(one.prims):
        if prim.out in needed and (prim.out is value or not isinstance(prim.out, fx.Node)):
            if prim.over != "point" or prim.op == "cat":
                return None
            kept.append(prim)
            needed.update(read.value for read in prim.reads)
    return tuple(reversed(kept))


def _reads(prims: Sequence[Prim]) -> frozenset[fx.Node]:
    made = {prim.out for prim in prims}
    every = {read.value for prim in prims for read in prim.reads}
    return frozenset(value for value in every if isinstance(value, fx.Node) and value not in made)


def _ordered(prims: tuple[Prim, ...]) -> list[Prim]:
    """Each operation after those whose results it reads."""
    by = {prim.out: prim for prim in prims}
    done: dict[Value, Prim] = {}

    def visit(prim: Prim) -> None:
        if prim.out not in done:
            for read in prim.reads:
                if read.value in by:
                    visit(by[read.value])
            done[prim.out] = prim

    for prim in prims:
        visit(prim)
    return list(done.values())
