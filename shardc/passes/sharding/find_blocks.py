"""find_blocks: dims that fused weights and their results are made of, where their blocks are not equal.

Needs: atomized types. Ensures: a dim that an annotation shards, and each dim that it is passed on to, has an atom of
blocks (`ir.blocks`) where some op takes unequal sections of it, and an axis can follow the sections.

    %w = param : f32[768, 64]      linear      split into 512, 128, 128      view as (8 64), (2 64), (2 64)
    %w : f32[8*64|2*64|2*64, 64]   a rank of tp=2 has 4 heads of queries and one each of keys and values

The bounds of sections spread along the ops' factors to a fixpoint, from the annotated dims. What lies between two
bounds is a *leaf*. An axis cuts a leaf at the first atom that no op keeps whole: heads, not what is inside of them.
Leaves of which an op would have to split two atoms at once, as a state space's heads and its state, cannot be cut
together: the smaller one is whole on every rank. So is one that has no such atom, as the only head of keys that all
queries share. Longer than 400 lines: links, bounds, leaves and choices are steps of one walk over a component of dims.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import fx

from shardc.ir.blocks import Block, Blocks
from shardc.ir.graph import Graph, info, operands, producer, results, type_of, update
from shardc.ir.types import Atom, Dim, TensorType
from shardc.passes.base import Pass
from shardc.passes.sharding.atom_classes import Classes, Place
from shardc.passes.sharding.atomize import linked_gradients
from shardc.rules.projection import project, refine
from shardc.rules.registry import find_rule, rule_in_blocks, rule_of
from shardc.rules.section import SECTION_OPS

Slot = fx.Node | tuple[fx.Node, int]  # a value, or a result that nothing uses
Cell = tuple[Slot, int]  # one dim of it
Interval = tuple[Cell, int, int]


@dataclass(frozen=True)
class ShardedDim:
    """A dim that an annotation puts axes on; `blocks` are their sizes if it says so, negative where they stay whole."""

    port: str
    dim: int
    ranks: int
    blocks: tuple[int, ...] = ()


def in_elements(sizes: Sequence[int]) -> tuple[int, ...]:
    """The blocks of a dim of these atoms, as a placement says them: their elements, negative where they stay whole."""
    if not sizes or not isinstance(blocks := sizes[0], Blocks):
        return ()
    behind = math.prod(sizes[1:])
    return tuple(b.size * behind * (1 if b.cut else -1) for b in blocks.parts)


@dataclass(frozen=True)
class FindBlocks(Pass):
    """Give dims of unequal sections their blocks. `sharded` are the dims of parameters to begin from."""

    sharded: tuple[ShardedDim, ...] = ()

    def run(self, graph: Graph) -> Graph:
        ports = {p.name: n for p, n in zip(graph.inputs, graph.placeholders, strict=True)}
        values = {**graph.activations, **ports}
        roots = [(values[r.port], r) for r in self.sharded if r.port in values]
        has_sections = bool(roots) and any(node.target in SECTION_OPS for node in graph.calls())
        roots = [(value, root) for value, root in roots if has_sections or root.blocks]
        if roots:
            links = _Links(graph)
            classes: list[Classes] = []
            seen: set[Cell] = set()
            for value, root in roots:
                cell = links.cell(value, root.dim)
                if cell not in seen:
                    component = _Component(graph, links, cell)
                    given = [(links.cell(v, r.dim), r) for v, r in roots]
                    component.spread([(c, r) for c, r in given if c in component.bounds])
                    if component.is_blocked:
                        classes = classes or [Classes(graph, without_sections=True)]
                        component.write(classes[0], root.ranks)
                    seen |= component.bounds.keys()
        return graph


@dataclass(frozen=True)
class _Same:
    """A factor that leads several dims: of each, how many elements stand behind one of the factor."""

    cells: tuple[tuple[Cell, int], ...]
    counted: bool  # the op asks where in the factor it is: on blocks it would have to gather


@dataclass(frozen=True)
class _Part:
    """A dim that is a section of another one."""

    whole: Cell
    start: int
    size: int
    part: Cell | None  # None: of size 1, which is no factor
    equal: int  # the number of equal sections of which it is one; 0 if it is one of unequal ones


class _Links:
    """What the dims of a graph have to do with each other, found as it is asked for."""

    def __init__(self, graph: Graph) -> None:
        self.twins: dict[fx.Node, fx.Node] = {}  # tied: a gradient is placed as its parameter
        self.members: dict[fx.Node, list[fx.Node]] = {}
        for a, b in linked_gradients(graph):
            if type_of(a).sizes == type_of(b).sizes:
                first, other = self.twins.get(a, a), self.twins.get(b, b)
                moved = self.members.pop(other, [other]) if other is not first else []
                self.members[first] = [*self.members.get(first, [first]), *moved]
                self.twins.update(dict.fromkeys(self.members[first], first))
        self.known: dict[fx.Node, list[_Same | _Part]] = {}

    def slots(self, slot: Slot) -> list[Slot]:
        """All values that are placed as one."""
        return list(self.members.get(slot, [slot])) if isinstance(slot, fx.Node) else [slot]

    def cell(self, slot: Slot, dim: int) -> Cell:
        return (self.twins.get(slot, slot) if isinstance(slot, fx.Node) else slot), dim

    def of(self, cell: Cell) -> Iterator[_Same | _Part]:
        """The links that a dim is in."""
        for slot in self.slots(cell[0]):
            readers = list(slot.users) if isinstance(slot, fx.Node) else []
            for call in (*readers, _maker(slot)):
                yield from (link for link in self.of_call(call) if cell in _cells(link))

    def of_call(self, node: fx.Node) -> list[_Same | _Part]:
        if node not in self.known:
            ruled = node.op == "call_function" and find_rule(node.target) is not None
            self.known[node] = self._read(node) if ruled else []
        return self.known[node]

    def _read(self, node: fx.Node) -> list[_Same | _Part]:
        plain = rule_of(node)
        rule = rule_in_blocks(node) if node.target in SECTION_OPS else plain
        slots = [*operands(node), *_result_slots(node)]
        leading: dict[str, list[tuple[Cell, int]]] = {}
        alone: dict[str, Cell] = {}
        for slot, labels in zip(slots, (*rule.operands, *rule.results), strict=True):
            for d, factors in enumerate(labels):
                if factors:
                    behind = math.prod(rule.sizes[f] for f in factors[1:])
                    leading.setdefault(factors[0], []).append((self.cell(slot, d), behind))
                    if len(factors) == 1:
                        alone[factors[0]] = self.cell(slot, d)
        of_sections = {f for whole, _, part in rule.sections for f in (whole, part)}
        links: list[_Same | _Part] = [
            _Same(tuple(cells), rule.counted(factor))
            for factor, cells in leading.items()
            if factor not in rule.whole or factor in of_sections
        ]
        for whole, start, part in rule.sections:
            size = rule.sizes.get(part, 1)
            if whole in alone and (part in alone or size == 1):
                equal = 0 if plain.sections else rule.sizes[whole] // size
                links.append(_Part(alone[whole], start, size, alone.get(part), equal))
        return links


def _maker(slot: Slot) -> fx.Node:
    return producer(slot)[0] if isinstance(slot, fx.Node) else slot[0]


def _result_slots(node: fx.Node) -> list[Slot]:
    if info(node).type is not None:
        return [node]
    declared = [i for i, t in enumerate(info(node).results) if t is not None]
    return [(node, i) if value is None else value for i, value in zip(declared, results(node), strict=True)]


def _cells(link: _Same | _Part) -> list[Cell]:
    if isinstance(link, _Same):
        return [cell for cell, _ in link.cells]
    return [link.whole] if link.part is None else [link.whole, link.part]


def _type(slot: Slot) -> TensorType:
    if isinstance(slot, fx.Node):
        return type_of(slot)
    declared = info(slot[0]).results[slot[1]]
    assert declared is not None
    return declared


def _place_dim(slot: Slot, dim: int, atoms: Dim) -> None:
    type = _type(slot)
    changed = replace(type, dims=(*type.dims[:dim], atoms, *type.dims[dim + 1 :]))
    if isinstance(slot, fx.Node):
        update(slot, type=changed)
    else:
        declared = list(info(slot[0]).results)
        declared[slot[1]] = changed
        update(slot[0], results=tuple(declared))


@dataclass(frozen=True)
class _Choice:
    """How an axis cuts a leaf: `before` equal blocks of `count` pieces each. No `count`: it stays whole."""

    before: int
    count: int
    kind: Place | None


@dataclass
class _Component:
    """The dims that the annotated one is connected with."""

    graph: Graph
    links: _Links
    root: Cell
    bounds: dict[Cell, set[int]] = field(default_factory=dict[Cell, set[int]])
    found: list[_Same | _Part] = field(default_factory=lambda: list[_Same | _Part]())
    given: list[tuple[Cell, ShardedDim]] = field(default_factory=list[tuple[Cell, ShardedDim]])

    def __post_init__(self) -> None:
        todo, known = [self.root], set[_Same | _Part]()
        self.bounds[self.root] = set()
        while todo:
            for link in self.links.of(todo.pop()):
                if link in known:
                    continue
                known.add(link)
                self.found.append(link)
                for cell in _cells(link):
                    if cell not in self.bounds:
                        self.bounds[cell] = set()
                        todo.append(cell)

    def size(self, cell: Cell) -> int:
        return _type(cell[0]).extents[cell[1]]

    def spread(self, given: list[tuple[Cell, ShardedDim]]) -> None:
        """Find the bounds of each dim. Those that are given are there without a section."""
        self.given = [(cell, root) for cell, root in given if root.blocks]
        for cell, root in self.given:
            start = 0
            for size in root.blocks[:-1]:
                start += abs(size)
                self.bounds[cell].add(start)
        changed = True
        while changed:
            changed = False
            for link in self.found:
                for cell, bounds in self._told(link):
                    new = {b for b in bounds if 0 < b < self.size(cell)} - self.bounds[cell]
                    if new:
                        self.bounds[cell] |= new
                        changed = True

    def _told(self, link: _Same | _Part) -> list[tuple[Cell, set[int]]]:
        if isinstance(link, _Part):
            ends = {link.start, link.start + link.size}
            if link.part is None:
                return [(link.whole, ends)]
            inner = {link.start + b for b in self.bounds[link.part]}
            return [(link.whole, ends | inner), (link.part, {b - link.start for b in self.bounds[link.whole]})]
        shared = {
            b // n for cell, n in link.cells for b in self.bounds[cell] if all(b % n == 0 for b in self.bounds[cell])
        }
        return [(cell, {b * n for b in shared}) for cell, n in link.cells]

    @property
    def is_blocked(self) -> bool:
        """Is there anything to gain? Not where an op that counts positions reads what has bounds, unasked."""
        if self.given:
            return True
        counted = (link for link in self.found if isinstance(link, _Same) and link.counted)
        return self._sections_differ() and not any(self.bounds[c] for link in counted for c, _ in link.cells)

    def _sections_differ(self) -> bool:
        """Equal sections are two atoms; not so where they are unequal, or a dim is cut into several numbers of them."""
        parent: dict[Cell, Cell] = {cell: cell for cell in self.bounds}

        def of(cell: Cell) -> Cell:
            while parent[cell] != cell:
                cell = parent[cell]
            return cell

        for link in self.found:
            if isinstance(link, _Same):
                for cell, _ in link.cells[1:]:
                    parent[of(cell)] = of(link.cells[0][0])
        numbers: dict[Cell, set[int]] = {}
        for link in self.found:
            if isinstance(link, _Part):
                numbers.setdefault(of(link.whole), set()).add(link.equal)
        return any(0 in counts or len(counts) > 1 for counts in numbers.values())

    def write(self, classes: Classes, ranks: int) -> None:
        leaves = self._leaves()
        choices = self._choices(leaves, classes, ranks)
        if not any(choice.count for choice in choices.values()):
            return
        for cell in self.bounds:
            intervals = self._intervals(cell)
            if len(intervals) == 1:
                choice = choices[leaves[intervals[0]]]
                if choice.count:
                    self._cut(cell, choice)
        for cell in self.bounds:
            intervals = self._intervals(cell)
            if len(intervals) > 1:
                self._block(cell, [(end - start, choices[leaves[cell, start, end]]) for _, start, end in intervals])

    def _intervals(self, cell: Cell) -> list[Interval]:
        bounds = [0, *sorted(self.bounds[cell]), self.size(cell)]
        return [(cell, start, end) for start, end in pairwise(bounds)]

    def _leaves(self) -> dict[Interval, Interval]:
        """Each interval with the one that stands for its leaf."""
        parent = {interval: interval for cell in self.bounds for interval in self._intervals(cell)}

        def of(interval: Interval) -> Interval:
            while parent[interval] != interval:
                interval = parent[interval]
            return interval

        def join(a: Interval, b: Interval) -> None:
            if a in parent and b in parent:
                parent[of(a)] = of(b)

        for link in self.found:
            if isinstance(link, _Part):
                part = link.part
                for _, start, end in self._intervals(part) if part is not None else ():
                    assert part is not None
                    join((part, start, end), (link.whole, link.start + start, link.start + end))
                continue
            (first, n), *others = link.cells
            for _, start, end in self._intervals(first):
                for cell, m in others:
                    join((first, start, end), (cell, start * m // n, end * m // n))
        return {interval: of(interval) for interval in parent}

    def _choices(self, leaves: dict[Interval, Interval], classes: Classes, ranks: int) -> dict[Interval, _Choice]:
        members: dict[Interval, list[Interval]] = {}
        for interval, leaf in leaves.items():
            members.setdefault(leaf, []).append(interval)
        together = _Together(self.graph, classes)
        stay_whole = self._stay_whole(leaves)
        choices: dict[Interval, _Choice] = {}
        taken: list[Place] = []
        for leaf in sorted(members, key=lambda leaf: -max(end - start for _, start, end in members[leaf])):
            options = self._options(members[leaf], classes)
            known = [option for option in options if option.kind in taken]
            fits = [o for o in options if o.count >= ranks and not (o.kind and together.with_any(o.kind, taken))]
            choice = _Choice(1, 0, None) if leaf in stay_whole else next(iter(known or fits), _Choice(1, 0, None))
            if choice.kind is not None and choice.kind not in taken:
                taken.append(choice.kind)
            choices[leaf] = choice
        return choices

    def _stay_whole(self, leaves: dict[Interval, Interval]) -> set[Interval]:
        """The leaves that the user says are not cut."""
        whole: set[Interval] = set()
        for cell, root in self.given:
            start = 0
            for size in root.blocks:
                inside = [i for i in self._intervals(cell) if start <= i[1] and i[2] <= start + abs(size)]
                whole |= {leaves[i] for i in inside if size < 0}
                start += abs(size)
        return whole

    def _options(self, members: list[Interval], classes: Classes) -> list[_Choice]:
        """The atoms at which an axis may cut a leaf, leading ones first."""
        options: dict[tuple[int, int], Place | None] = {}
        blocked: set[tuple[int, int]] = set()
        sizes = [end - start for _, start, end in members]  # of the same pieces, which may be heads or their columns
        for cell, start, end in members:
            slot, dim = cell
            if not isinstance(slot, fx.Node) or (start, end) != (0, self.size(cell)):
                continue
            type, before = type_of(slot), 1
            first = sum(len(d) for d in type.dims[:dim])
            for i, atom in enumerate(type.dims[dim], first):
                key = (before, atom.size)
                options.setdefault(key, classes.of((slot, i)))
                if not classes.clean(slot, i) or classes.selector(slot, i):
                    blocked.add(key)
                before *= atom.size
        if not options:  # no tensor of its own: as the user says
            return [_Choice(1, min(sizes), None)] if self.given else []
        return [
            _Choice(*key, kind)
            for key, kind in sorted(options.items())
            if key not in blocked and key[1] > 1 and not any(size % (key[0] * key[1]) for size in sizes)
        ]

    def _cut(self, cell: Cell, choice: _Choice) -> None:
        """Let a dim that is one leaf have the atom that is cut."""
        sizes, size = _type(cell[0]).sizes[cell[1]], self.size(cell)
        want = [n for n in (choice.before, choice.count, size // (choice.before * choice.count)) if n > 1]
        merged = refine(sizes, want)
        if merged is not None and merged != sizes:
            for slot in self.links.slots(cell[0]):
                _place_dim(slot, cell[1], tuple(Atom(n) for n in merged))

    def _block(self, cell: Cell, parts: Sequence[tuple[int, _Choice]]) -> None:
        sizes = _type(cell[0]).sizes[cell[1]]
        units = [size // (c.before * c.count) if c.count else size for size, c in parts]
        trailing = 1  # the atoms behind, as many as stand behind each piece of each block
        keep = len(sizes)
        while keep > 1 and all(unit % (trailing * sizes[keep - 1]) == 0 for unit in units):
            keep -= 1
            trailing *= sizes[keep]
        blocks: list[Block] = []
        for (size, choice), unit in zip(parts, units, strict=True):
            whole = Block(size // trailing, 1, cut=False)
            cut = Block(choice.count, unit // trailing)
            blocks += [cut] * choice.before if choice.count else [whole]
        atoms = (Atom(Blocks(blocks)), *(Atom(n) for n in sizes[keep:]))
        for slot in self.links.slots(cell[0]):
            _place_dim(slot, cell[1], atoms)


class _Together:
    """Which classes of atoms an op has side by side, in two dims: an axis can split one of them only."""

    def __init__(self, graph: Graph, classes: Classes) -> None:
        self.graph, self.classes = graph, classes
        self._with: dict[Place, set[Place]] = {}

    def with_any(self, kind: Place, others: Sequence[Place]) -> bool:
        if kind not in self._with:
            self._with[kind] = self._find(kind)
        return any(other in self._with[kind] for other in others)

    def _find(self, kind: Place) -> set[Place]:
        found: set[Place] = set()
        for node in self.graph.calls():
            if find_rule(node.target) is None or info(node).constant or node.target in SECTION_OPS:
                continue
            projection = project(node)
            values = [*operands(node), *results(node)]
            kinds = {
                self.classes.of((value, i))
                for value, pieces in zip(values, (*projection.operands, *projection.results), strict=True)
                if value is not None
                for i in range(len(pieces))
            }
            if kind in kinds:
                found |= kinds
        return found - {kind}
