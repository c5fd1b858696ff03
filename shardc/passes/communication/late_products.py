"""Which product that makes a gradient of a weight runs behind which collective of backward: decided layer by layer.

    %dv = linear_wgrad(..)              products of layer 2: dv, dw
    %dw = linear_wgrad(..)
    %dx.sum = all_reduce(%dx, tp)       group of layer 2: dx.sum      takes dw, the latest before it
    %du = linear_wgrad(..)              products of layer 1: du
    %dy.sum = all_reduce(%dy, tp)       group of layer 1: dy.sum      takes du, and dv if du takes less time than it

Collectives of one layer that follow each other are a group, and so are those outside of layers. A group's products lie
between the group before it and its last collective. It takes its own products, or those of the group before, so none is
put off further than to the next layer. What it takes depends on a few groups around it: equal layers have the same
order, however many there are, but for a few at the beginning and the end of backward. A model without layers has one
group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice

from torch import fx

from shardc.cost.call_seconds import CallCost
from shardc.cost.flops import COUNTS
from shardc.ir.graph import info, op_name, operands, producer
from shardc.ir.layers import layer_of
from shardc.ir.ops.collectives import COLLECTIVES
from shardc.ir.ops.exchange import EXCHANGES
from shardc.ir.overlap_schedule import sums_gradients
from shardc.ir.units import UnequalError


@dataclass(frozen=True)
class Movable:
    """Of the calls of a microbatch, `products` may be put off, and the calls that may follow them: nothing else of its
    backward reads either. Backward waits for the `awaited` collectives."""

    products: frozenset[fx.Node]
    followers: frozenset[fx.Node]
    awaited: tuple[fx.Node, ...]

    @classmethod
    def of(cls, order: Sequence[fx.Node]) -> Movable:
        products, followers, inside = set[fx.Node](), set[fx.Node](), set(order)
        for node in reversed(order):
            if info(node).phase != "bwd" or not node.users:
                continue
            if not all(u not in inside or u in followers or info(u).phase == "opt" for u in node.users):
                continue
            if op_name(node.target) in COUNTS and node.target not in EXCHANGES:
                products.add(node)
            elif node.target not in COLLECTIVES or sums_gradients(node):
                followers.add(node)
        return cls(frozenset(products), frozenset(followers), tuple(node for node in order if _is_awaited(node)))


def _is_awaited(node: fx.Node) -> bool:
    """Does backward wait for this collective, which can begin no earlier than backward has made its operand?"""
    if node.target not in COLLECTIVES or info(node).phase != "bwd" or sums_gradients(node):
        return False
    return any(info(producer(value)[0]).phase == "bwd" for value in operands(node) if value.op == "call_function")


@dataclass(frozen=True)
class _Group:
    """Collectives of one layer that follow each other, the `products` from the group before up to the last of them, and
    which of them run `behind` which collective so far. `missing` is how long each collective has nothing to run beside
    it, `length` how many calls the group has."""

    missing: Mapping[fx.Node, float] = field(default_factory=dict[fx.Node, float])
    products: Sequence[fx.Node] = ()
    length: int = 0
    behind: Mapping[fx.Node, fx.Node] = field(default_factory=dict[fx.Node, fx.Node])

    @property
    def exposed(self) -> tuple[int, float]:
        """How many collectives have nothing behind them, and how many seconds are missing."""
        bare = self.missing.keys() - self.behind.values()
        return len(bare), sum(max(0.0, seconds) for seconds in self.missing.values())


@dataclass
class Assignment:
    """Which product runs behind which collective. `room` is how many bytes more may be held at each place of the order,
    `read` the bytes that a product holds by itself from a place on."""

    order: Sequence[fx.Node]
    movable: Movable
    costs: Mapping[fx.Node, CallCost]
    room: list[float]
    read: Mapping[fx.Node, Sequence[tuple[int, int]]]
    is_short: bool = False  # is the order that of few of many equal layers? With all of them there is more room
    place: dict[fx.Node, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {node: index for index, node in enumerate(self.order)}

    def behind(self) -> dict[fx.Node, fx.Node]:
        """A collective for each product that is put off.

        A group is offered three times: its products but those that it lends, and those that the group before lends it;
        what is left of its own; what is left of the group before. No product is offered to two groups at a time, so a
        difference between two layers does not pass on to all layers behind them.
        """
        groups = self._groups()
        lent = self._lent(groups)
        before = [(), *(group.products for group in groups[:-1])]
        products = [group.products for group in groups]
        shares = [
            [*(node for node in last if node in lent), *(node for node in own if node not in lent)]
            for last, own in zip(before, products, strict=True)
        ]
        taken: dict[fx.Node, fx.Node] = {}
        for offered in (shares, products, before):
            left = [[node for node in several if node not in taken] for several in offered]
            for index in reversed(range(len(groups))):
                groups[index] = self._filled(groups[index], left[index], hold=True)
                taken |= groups[index].behind
        return taken

    def _lent(self, groups: Sequence[_Group]) -> set[fx.Node]:
        """Which products groups lend to the next one, instead of taking them. A group with a long collective before
        its first product takes one of the group before, and lends one of its own to the next, which is like it: so it
        lends what it would take of an equal group before it, where less is exposed then. It lends less where the group
        before is another, lends it less, and more of its collectives would have no product."""
        lent, last = set[fx.Node](), list[fx.Node]()
        for group in groups[:-1]:
            like = min(
                (self._filled(group, group.products, ring=ring) for ring in (0, group.length)),
                key=lambda filled: filled.exposed,
            )
            lends = [node for node, awaited in like.behind.items() if self.place[awaited] < self.place[node]]
            lending = list(lends)
            while lending:
                kept = [node for node in group.products if node not in lending]
                if self._filled(group, [*last, *kept]).exposed[0] <= like.exposed[0]:
                    break
                lending.pop()
            lent.update(lending)
            last = lends
        return lent

    def _filled(self, group: _Group, products: Sequence[fx.Node], *, ring: int = 0, hold: bool = False) -> _Group:
        """The group with as many of the products behind its collectives as they lack, in the better of two ways.

        In a `ring`, a product after a collective is also before it, by that many calls less. To `hold` a product, there
        must be room for what it reads.
        """
        filled = {closest: self._tried(group, products, closest, ring) for closest in (False, True)}
        best = min(filled, key=lambda closest: filled[closest].exposed)
        return self._tried(group, products, best, ring, hold) if hold else filled[best]

    def _tried(
        self, group: _Group, products: Sequence[fx.Node], closest: bool, ring: int, hold: bool = False
    ) -> _Group:
        """Each collective takes one product, then several, then those of which more is wasted than used. `slack` is how
        long products take beyond what all collectives lack: so much may be wasted. The last collective takes first, the
        latest product before it. If `closest`, the one that lacks most takes first, the product closest to that."""
        missing, behind = dict(group.missing), dict(group.behind)
        slack = sum(map(self._seconds, products)) - group.exposed[1]
        refused = set[tuple[fx.Node, fx.Node]]()
        for once, wasteful in ((True, False), (False, False), (False, True)):
            waiting = [node for node in missing if missing[node] > 0]
            while waiting:
                awaited = max(waiting, key=lambda node: (missing[node] if closest else 0.0, self.place[node]))
                lacking = missing[awaited]
                most = math.inf if wasteful else 2 * lacking + max(0.0, slack)
                best: tuple[tuple[float, ...], fx.Node] | None = None
                for product in products:
                    distance, seconds = self.place[awaited] - self.place[product], self._seconds(product)
                    distance += ring if distance < 0 else 0
                    if distance < 0 or seconds > most or product in behind or (product, awaited) in refused:
                        continue
                    short = seconds < lacking
                    key = (short, -seconds if short else seconds, distance) if closest else (distance,)
                    if best is None or key < best[0]:
                        best = key, product
                if best is None:
                    waiting.remove(awaited)
                    continue
                product = best[1]
                if hold and not self._hold(product, awaited):
                    if self.is_short:
                        raise UnequalError(f"there is no room for {info(product).name} with few layers")
                    refused.add((product, awaited))
                    continue
                behind[product] = awaited
                missing[awaited] -= self._seconds(product)
                slack += min(0.0, missing[awaited])
                if once or missing[awaited] <= 0:
                    waiting.remove(awaited)
        return replace(group, missing=missing, behind=behind)

    def _groups(self) -> list[_Group]:
        """From first to last, those of which no collective lacks anything too."""
        lacking, products, start = self._lacking(), deque(self.products), 0
        groups: list[_Group] = []
        for _, several in groupby(self.movable.awaited, lambda node: layer_of(info(node).fqn)):
            awaited = list(several)
            end, own = self.place[awaited[-1]], list[fx.Node]()
            while products and self.place[products[0]] < end:
                own.append(products.popleft())
            missing = {node: lacking[node] for node in awaited if node in lacking}
            groups.append(_Group(missing, own, end - start))
            start = end
        return groups

    @cached_property
    def products(self) -> list[fx.Node]:
        return [node for node in self.order if node in self.movable.products and self._seconds(node)]

    def _seconds(self, node: fx.Node) -> float:
        cost = self.costs.get(node)
        return 0.0 if cost is None or cost.kind == "collective" else cost.seconds

    def _lacking(self) -> dict[fx.Node, float]:
        """Of each collective that is waited for, how long it has nothing to run beside it but products put off."""
        lacking: dict[fx.Node, float] = {}
        for node in self.movable.awaited:
            begins = max(self.place[value] for value in node.all_input_nodes if value in self.place)
            missing = self.costs[node].seconds
            for call in islice(self.order, begins + 1, None):
                if call in node.users or missing <= 0:
                    break
                if call not in self.movable.products:
                    missing -= self._seconds(call)
            if missing > 0:
                lacking[node] = missing
        return lacking

    def _hold(self, product: fx.Node, awaited: fx.Node) -> bool:
        """Whether there is room for what a product reads until then; it is taken."""
        start, until = self.place[product], self.place[awaited] + 1
        spans = sorted((max(first, start), size) for first, size in self.read[product])
        ends = [*(first for first, _ in spans[1:]), until][: len(spans)]
        held, needed = 0, list[tuple[int, int, int]]()
        for (first, size), end in zip(spans, ends, strict=True):
            held += size
            if first < min(end, until):
                needed.append((first, min(end, until), held))
        if min(self.room[start:until], default=0.0) < 0.0 or any(
            bytes > min(self.room[first:end]) for first, end, bytes in needed
        ):
            return False
        for first, end, bytes in needed:
            self.room[first:end] = [room - bytes for room in self.room[first:end]]
        return True
