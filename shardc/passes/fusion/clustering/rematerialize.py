"""Rematerialises values in the consumer kernel where that is cheaper than reading them.

    forward     x = mm;  u = x + b;  t = tanh(u);  y = u * t              stores u, t and y
    backward    reads g, u and t            ->   reads g and x, and recomputes u and t: they are stored nowhere

Only pointwise chains of few operations are rematerialised, and no expensive operation whose result many elements share.
At equal cost, a chain that starts at parameters is rematerialised: that holds fewer bytes. Values with the same sources
are decided together. Afterwards, results that no kernel reads are not stored, and operations without a reader go.

A rematerialised value need not have the same bits. Kernels rewrite formulas, and the compiler contracts a product and a
sum into one rounding where they meet (`enable_fp_fusion`, in kernels_triton/launch/launch.py). So nothing is
rematerialised where a comparison, a floor or the gradient of an extreme would observe the difference
(`numeric_sensitivity`). Within one kernel a value is one register, and equal to itself. A product that is added to
something may stay unrounded in that sum alone, as in any compiler's kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from torch import fx

from shardc.passes.fusion.analysis.iteration_space import Prim, SpaceConstraint, Value, space_constraint
from shardc.passes.fusion.clustering.cluster import repeats_expensive, rounds_unnoticed
from shardc.passes.fusion.clustering.clustering import MAX_PRIMS
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph
from shardc.passes.fusion.lowering.lowered_op import LoweredOp

MAX_PRIMS_PER_VALUE = 24  # operations that one value may take
FREE_LEAF_RATIO = 16  # an operand that is this many times smaller than the value costs nothing


@dataclass(frozen=True)
class FusionGroup:
    """A kernel before it is emitted: its calls, all operations that it computes, and its space's constraint."""

    calls: tuple[int, ...]
    prims: tuple[Prim, ...]
    constraint: SpaceConstraint
    barrier_epoch: int
    outputs: tuple[fx.Node, ...] = ()

    @cached_property
    def reads(self) -> frozenset[fx.Node]:
        return _reads(self.prims)


def fusion_groups(
    graph: FusionGraph, clusters: Sequence[FusionGroup], read_only: Collection[int] = ()
) -> list[FusionGroup]:
    """The groups of some clusters, in order, without dead operations. Those with a call of `read_only` recompute
    nothing."""
    groups = _without_dead_values(graph, clusters, _read_outside(graph, clusters))
    rematerializer = _Rematerializer(graph, groups)
    improved = [group if group.calls[0] in read_only else rematerializer.improved(group) for group in reversed(groups)][
        ::-1
    ]
    if any(a is not b for a, b in zip(groups, improved, strict=True)):
        groups = _without_dead_values(graph, improved, rematerializer.read_outside, groups)
    return groups


def _read_outside(graph: FusionGraph, groups: Sequence[FusionGroup]) -> set[fx.Node]:
    """The values that are read by calls of no group, or are outputs."""
    fused = {i for group in groups for i in group.calls}
    return {value for value, calls in graph.readers.items() if not calls <= fused}


def _without_dead_values(
    graph: FusionGraph,
    groups: Sequence[FusionGroup],
    read_outside: Collection[fx.Node],
    without: Sequence[FusionGroup] = (),
) -> list[FusionGroup]:
    """The groups with the outputs that others read, and with the operations that those outputs need. Those that are
    `without` dead operations already are looked at only where their outputs change."""
    read, known = set(read_outside), set(map(id, without))
    live: list[FusionGroup] = []
    for group in reversed(groups):
        outputs = tuple([v for i in group.calls for v in graph.values[i] if v in read])
        if not outputs:
            continue
        if outputs == group.outputs and id(group) in known:
            read |= group.reads
            live.append(group)
            continue
        needed: set[Value] = set(outputs)
        prims: list[Prim] = []
        for prim in reversed(group.prims):
            if prim.out in needed:
                prims.append(prim)
                for operand in prim.reads:
                    needed.add(operand.value)
        if len(prims) < len(group.prims) or outputs != group.outputs:
            group = replace(_with_prims(graph, group, tuple(reversed(prims))), outputs=outputs)
        read |= group.reads
        live.append(group)
    return live[::-1]


def _with_prims(graph: FusionGraph, group: FusionGroup, prims: tuple[Prim, ...]) -> FusionGroup:
    """A group with some of its operations only. The rest may be smaller than a removed operation, through which it had
    its access map. Then the rest gets a space of its own; where it has none, all operations stay."""
    if len(prims) == len(group.prims):
        return group
    for constraint in (group.constraint, space_constraint(prims)):
        if constraint is not None and graph.spaces.has_space(prims, constraint):
            return replace(group, prims=prims, constraint=constraint)
    return group


@dataclass
class _Expansion:
    """The chain that computes a value: its operations in order, the large operands, and the values visited."""

    prims: dict[Value, Prim] = field(default_factory=dict[Value, Prim])
    leaves: set[fx.Node] = field(default_factory=set[fx.Node])
    visited: set[fx.Node] = field(default_factory=set[fx.Node])
    outs: set[Value] = field(default_factory=set[Value])  # also of operations that are not yet in `prims`


class _Rematerializer:
    """Decides which values groups recompute instead of reading them."""

    def __init__(self, graph: FusionGraph, groups: list[FusionGroup]) -> None:
        self.graph = graph
        self.recipes: dict[fx.Node, _Recipe | None] = {}  # of values that were asked for
        self.expansions = 0  # recipes that were visited
        self.read_outside = _read_outside(graph, groups)
        self.readers: dict[fx.Node, int] = {}
        for group in groups:
            self._count_readers(group, 1)

    def _count_readers(self, group: FusionGroup, change: int) -> None:
        for value in group.reads:
            self.readers[value] = self.readers.get(value, 0) + change

    def improved(self, group: FusionGroup) -> FusionGroup:
        """The group with what it better recomputes. A second round follows if its operands then are others."""
        better = self._improved(group)
        return better if better.reads == group.reads else self._improved(better)

    def _improved(self, group: FusionGroup) -> FusionGroup:
        chains: dict[fx.Node, tuple[list[Prim], frozenset[fx.Node]]] = {}
        recipes = self.recipes
        for value in sorted(group.reads, key=lambda v: v.name):
            if (recipes[value] if value in recipes else self._recipe_of(value)) is not None:
                expansion = _Expansion()
                is_short = self._expand(value, group.reads, expansion, self.graph.bytes[value] // FREE_LEAF_RATIO)
                if is_short and not repeats_expensive(expansion.prims.values(), group.constraint.size):
                    chains[value] = (list(expansion.prims.values()), frozenset(expansion.leaves - group.reads))
        by_sources: dict[frozenset[fx.Node], list[fx.Node]] = {}
        for value, (_, leaves) in chains.items():
            by_sources.setdefault(leaves, []).append(value)
        for leaves, values in sorted(by_sources.items(), key=lambda item: len(item[0])):
            cost = sum(self.graph.bytes[leaf] for leaf in leaves - group.reads)
            gain = self._gain(values)
            if gain > cost or (gain == cost and all(leaf.op == "placeholder" for leaf in leaves)):
                better = self._with_chains(group, [prim for value in values for prim in chains[value][0]])
                self._count_readers(group, -1)
                self._count_readers(better, 1)
                group = better
        return group

    def _gain(self, values: list[fx.Node]) -> int:
        """The bytes that are no longer read, and those of values that then have no reader, so are not written."""
        size = self.graph.bytes
        return sum(size[v] * (1 if v in self.read_outside or self.readers[v] > 1 else 2) for v in values)

    def _with_chains(self, group: FusionGroup, prims: list[Prim]) -> FusionGroup:
        computed = {prim.out for prim in group.prims}
        added = tuple({prim.out: prim for prim in prims if prim.out not in computed}.values())
        every = tuple(_topological((*added, *group.prims)))
        constraint = space_constraint(every)
        if constraint is None or len(every) > MAX_PRIMS or constraint.size != group.constraint.size:
            return group
        better = replace(group, prims=every, constraint=constraint)
        if rounds_unnoticed(better.reads, lambda: every) and not rounds_unnoticed(group.reads, lambda: group.prims):
            return group
        return better if self.graph.spaces.has_space(every, constraint) else group

    def _expand(self, value: fx.Node, present: frozenset[fx.Node], expansion: _Expansion, free: int) -> bool:
        """Collect the operations that compute a value, whose recipe is known, from what is `present`, from operands of
        up to `free` bytes, and from values without a recipe. False as soon as there are too many: chains are long, and
        join many times."""
        self.expansions += 1
        recipe, recipes = self.recipes[value], self.recipes
        assert recipe is not None
        expansion.visited.add(value)
        expansion.outs.update(recipe.prims)
        if len(expansion.outs) > MAX_PRIMS_PER_VALUE:
            return False
        for read in recipe.reads:
            if read in present or read in expansion.visited or self.graph.bytes[read] <= free:
                continue
            if (recipes[read] if read in recipes else self._recipe_of(read)) is None:
                expansion.leaves.add(read)
            elif not self._expand(read, present, expansion, free):
                return False
        expansion.prims.update(recipe.prims)
        return True

    def _recipe_of(self, value: fx.Node) -> _Recipe | None:
        """The operations that recompute a value. A float64 value has no recipe: a kernel that also has other floats
        would round it to float32. Nor has a value whose recomputation a discontinuous operation would observe: chains
        start at it, as it was stored."""
        if value not in self.recipes:
            op = self.graph.lowered.get(self.graph.number.get(value, -1))
            prims = None if op is None or op.is_float64 else _recipe(op, value)
            if prims is None or not self.graph.sensitivity.repeatable(prims):
                self.recipes[value] = None
            else:
                by_result = {prim.out: prim for prim in prims}
                self.recipes[value] = _Recipe(by_result, sorted(_reads(prims), key=lambda v: v.name))
        return self.recipes[value]


class _Recipe(NamedTuple):
    """The operations that compute a value, by their results, and the values that they read, by name."""

    prims: dict[Value, Prim]
    reads: list[fx.Node]


def _recipe(op: LoweredOp, value: fx.Node) -> tuple[Prim, ...] | None:
    """The operations that compute a value from a call's operands and its other results, if all are pointwise."""
    needed: set[Value] = {value}
    recipe: list[Prim] = []
    for prim in reversed(op.prims):
        if prim.out in needed and (prim.out is value or not isinstance(prim.out, fx.Node)):
            if prim.over != "point" or prim.op == "cat":
                return None
            recipe.append(prim)
            for read in prim.reads:
                needed.add(read.value)
    return tuple(reversed(recipe))


def _reads(prims: Sequence[Prim]) -> frozenset[fx.Node]:
    read = {read.value for prim in prims for read in prim.reads}
    read -= {prim.out for prim in prims}
    return frozenset([value for value in read if type(value) is fx.Node])


def _topological(prims: tuple[Prim, ...]) -> list[Prim]:
    """Each operation after those whose results it reads."""
    by_result = {prim.out: prim for prim in prims}
    ordered: dict[Value, Prim] = {}
    for prim in prims:
        todo = [prim]
        while todo:
            last = todo[-1]
            if last.out not in ordered:
                before = [read.value for read in last.reads if read.value in by_result and read.value not in ordered]
                if before:
                    todo.append(by_result[before[0]])
                    continue
                ordered[last.out] = last
            todo.pop()
    return list(ordered.values())
