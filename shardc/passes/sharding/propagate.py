"""propagate: carry placements from the annotated values to all others, through every op, both ways.

Needs: `graph.seeds`. Ensures: types carry the placements that propagation wishes for, and
`graph.priorities` the stage at which each axis arrived. Nothing is decided yet about what ops compute.

Stages run in order of priority, each to a fixpoint (GSPMD, Xu et al. 2021, section 3.5; Shardy's user
priorities): first parameters and inputs, then activations. So tensor parallelism spreads from the
weights before a sequence-sharded residual stream claims the same axis for what is left.

Within an op, an axis moves from one tensor to another along a piece that both have. It stays put where
two pieces of the op claim it (the op must choose, in `assign`), where the tensor uses it already, on dims that an
annotation fixed, and where the op keeps the piece whole (a softmax does not: see `split_softmax`). Nor does it enter
the ops on a parameter that is copied over it, as a kv-head is that several ranks share: sequence parallelism would
split them, to gather what they make for attention.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import fx

from shardc.ir.graph import Graph, info, operands, results, type_of, update
from shardc.ir.provenance import Cause
from shardc.ir.types import Axes
from shardc.ir.units import UnequalError
from shardc.passes.base import Pass
from shardc.passes.sharding.atomize import linked_gradients
from shardc.passes.sharding.seed import copied_axes
from shardc.passes.softmax.split_softmax import opened
from shardc.rules.projection import Projection, project
from shardc.rules.registry import find_rule


@dataclass(frozen=True)
class Propagate(Pass):
    """Spread the seeds to a fixpoint, one priority after the other."""

    def run(self, graph: Graph) -> Graph:
        spread = _Spread(graph)
        for priority in sorted({s.priority for s in graph.seeds.values()}):
            spread.stage(priority)
        for value in graph.values():
            update(value, type=type_of(value).place(spread.spec[value]))
            if value in spread.cause:
                update(value, cause=spread.cause[value])
        graph.priorities = spread.priorities
        return graph


class _Link:
    """A call, or a parameter and its gradient: tensors that share pieces."""

    __slots__ = ("barred", "blocked", "most", "name", "tensors", "unfit")

    def __init__(
        self,
        name: str,
        tensors: list[tuple[fx.Node, tuple[int, ...]]],
        blocked: frozenset[int],
        barred: frozenset[str] = frozenset(),
        most: Mapping[int, int] | None = None,
        unfit: Callable[[Mapping[int, Axes]], set[int]] | None = None,
    ):
        self.name = name
        self.barred = barred  # axes that it is not to be split over
        self.tensors = tensors
        self.blocked = blocked
        self.most = most or {}  # shards that a piece is to be cut into
        self.unfit = unfit  # of a split, the pieces that cannot be split so


class _Spread:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.spec: dict[fx.Node, list[Axes]] = {v: [()] * len(type_of(v).atoms) for v in graph.values()}
        self.priorities: dict[fx.Node, dict[tuple[int, str], int]] = {}
        self.cause: dict[fx.Node, Cause] = {}
        self.fixed: dict[fx.Node, tuple[bool, ...]] = {}
        self.links: list[_Link] = []
        self.crossed: dict[tuple[str, fx.Node], tuple[int, int]] = {}  # of a list, the places a placement has come by
        self.copied = copied_axes(graph)
        self.users: dict[fx.Node, list[_Link]] = {v: [] for v in self.spec}
        for node in graph.calls():
            # The optimizer works where parameters are stored, which says nothing of where they are computed with.
            if find_rule(node.target) is not None and not info(node).constant and info(node).phase != "opt":
                self._link_call(node, project(node))
        for value, twin in linked_gradients(graph):
            if info(twin).phase == "opt":
                continue
            if len(self.spec[value]) == len(self.spec[twin]):
                pieces = tuple(range(len(self.spec[value])))
                self._link(_Link("gradient", [(value, pieces), (twin, pieces)], frozenset()))
        self.sizes = dict(graph.mesh.axes)

    def _link_call(self, node: fx.Node, projection: Projection) -> None:
        values = [*operands(node), *results(node)]
        pieces = (*projection.operands, *projection.results)
        tensors = [(v, p) for v, p in zip(values, pieces, strict=True) if v is not None and not info(v).constant]
        barred = frozenset(axis for v in values if v is not None for axis in self.copied.get(v, ()))
        most = opened(node, projection)
        rule = find_rule(node.target)
        unfit = rule.unfit if rule is not None else None
        fitted = (lambda split: unfit(node, projection, split, self.graph.mesh)) if unfit is not None else None
        self._link(_Link(info(node).name, tensors, projection.blocked - most.keys(), barred, most, fitted))

    def _link(self, link: _Link) -> None:
        self.links.append(link)
        for value in {v for v, _ in link.tensors}:
            self.users[value].append(link)

    def stage(self, priority: int) -> None:
        """Put this priority's seeds and run to a fixpoint."""
        changed: set[fx.Node] = set()
        for value, seed in self.graph.seeds.items():
            if seed.priority != priority:
                continue
            used_axes = {axis for axes in self.spec[value] for axis in axes}
            for i, axes in enumerate(seed.placement):
                if seed.fixed[i]:
                    # What arrived earlier at a dim that the user fixes yields to the user.
                    self.spec[value][i] = axes
                    self.priorities.setdefault(value, {}).update({(i, axis): priority for axis in axes})
                elif axes and not used_axes & set(axes):
                    self.spec[value][i] = axes
            self._drop_repeats(value, seed.placement)
            self.fixed[value] = seed.fixed
            self.cause[value] = Cause((seed.cause,))
            changed.add(value)
        queue = deque(link for link in self.links if any(v in changed for v, _ in link.tensors))
        if priority == 0:
            queue = deque(self.links)
        queued = {id(link) for link in queue}
        in_order = (
            len(self.links) if priority == 0 else 0
        )  # the links of the first sweep, which goes by the order of calls
        while queue:
            link = queue.popleft()
            queued.discard(id(link))
            in_order -= 1
            for value in self._step(link, priority, in_order=in_order >= 0):
                for user in self.users[value]:
                    if user is not link and id(user) not in queued:
                        queued.add(id(user))
                        queue.append(user)

    def _travel(self, source: fx.Node, value: fx.Node) -> None:
        """What goes from layer to layer meets what comes the other way where as many layers lie behind as before it:
        among few of them elsewhere than among all."""
        for units in self.graph.units:
            touched = [units.within(info(v).fqn or info(v).name)[0] for v in (source, value)]
            places = [units.slot(unit) for unit in touched if unit is not None]
            places += self.crossed.get((units.path, source), ())
            if not places:
                continue
            widest = max(
                (min(places), max(places)),
                self.crossed.get((units.path, value), (0, 0)),
                key=lambda ends: ends[1] - ends[0],
            )
            self.crossed[units.path, value] = widest
            if widest[1] - widest[0] > max(1, units.first // 2):  # far less than to the ends
                raise UnequalError(f"{units.path}: a placement goes from layer to layer")

    def _drop_repeats(self, value: fx.Node, placement: tuple[Axes, ...]) -> None:
        """An axis that the seed puts on one atom leaves the others."""
        atom_of = {axis: i for i, axes in enumerate(placement) for axis in axes}
        for i, axes in enumerate(self.spec[value]):
            self.spec[value][i] = tuple(a for a in axes if atom_of.get(a, i) == i)

    def _step(self, link: _Link, priority: int, *, in_order: bool) -> list[fx.Node]:
        have: dict[int, Axes] = {}
        cause: dict[int, fx.Node] = {}
        for value, pieces in link.tensors:
            spec = self.spec[value]
            for i, piece in enumerate(pieces):
                axes = spec[i] if not link.barred else tuple(a for a in spec[i] if a not in link.barred)
                if piece in link.most and math.prod(self.sizes[a] for a in axes) > link.most[piece]:
                    continue
                if axes and piece not in link.blocked and len(axes) > len(have.get(piece, ())):
                    have[piece] = axes
                    cause[piece] = value
        for piece in link.unfit(have) if have and link.unfit is not None else ():
            del have[piece]
        if not have:
            return []
        claims: dict[str, int] = {}
        for axes in have.values():
            for axis in axes:
                claims[axis] = claims.get(axis, 0) + 1
        changed: list[fx.Node] = []
        for value, pieces in link.tensors:
            spec = self.spec[value]
            fixed = self.fixed.get(value)
            moved = False
            for i, piece in enumerate(pieces):
                target_axes = have.get(piece)
                if target_axes is None or spec[i] == target_axes or (fixed is not None and fixed[i]):
                    continue
                used = {a for axes in spec for a in axes}
                for axis in target_axes:
                    if axis not in used and claims[axis] == 1:
                        spec[i] = (*spec[i], axis)
                        used.add(axis)
                        self.priorities.setdefault(value, {})[(i, axis)] = priority
                        moved = True
                        if self.graph.units and not in_order:
                            self._travel(cause[piece], value)
                        source = cause[piece]
                        if value not in self.cause and source in self.cause:
                            self.cause[value] = replace(self.cause[source], through=link.name)
            if moved:
                changed.append(value)
        return changed
