"""The predicted step of a candidate, in closed form: its layers' costs, the schedule, the storage and the network.

    1f1b           sum of (f + b) over stages + (M - 1) * (the largest f + b + its transfers)
    zb-h1          the same, but that weights' gradients w fill the bubble: (pp - 1) * 2 w less
    zb-v           M * the busiest rank + (pp - 1) * the longest of f, b - w and w of a chunk
    interleaved    M * the busiest rank + (pp - 1) * (f + b of a chunk)
    storage        zero 0: gradients all-reduced    1, 2: reduce-scattered, weights gathered    3: gathered a microbatch
                   over part of dp: shards of gradients are all-reduced over dp_replicate besides
    memory         of each coordinate: weights, gradients, state + microbatches in flight * activations + transients

Transfers of 1F1B count in its steady state: a microbatch's round trip through the later stages may take no longer than
the work of the microbatches that are in flight. Of a step of one microbatch, sums of gradients overlap with backward
and gathers of weights with forward; of several they follow the last and precede the first. What computes beside a
collective takes as much longer as the hardware's `contention` says, and products as their share of the step makes them
by its `power`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shardc.ir.hardware import Hardware
from shardc.planner.candidate import Candidate
from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.network import Network, network_of
from shardc.planner.numbers import Numbers
from shardc.planner.stages import Stage, split, summed

REDUCED_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}
HALF_BUCKETS = 2  # in flight at a time


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank."""

    weights: float
    gradients: float
    state: float
    activations: float
    transient: float
    in_flight: int  # microbatches whose activations it holds

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.state + self.activations + self.transient


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, which are the sum of the terms below. `sent` and `recomputed` are shares of `work`."""

    seconds: float
    work: float  # of all microbatches on one rank, if all ranks had the same; its waits for collectives included
    uneven: float  # what the busiest rank does more
    gathered: float  # ZeRO-3: waits for weights, and what gathers slow down
    bubble: float  # the pipeline's filling and draining
    transfers: float
    data: float  # sums of gradients and gathers of weights that nothing hides
    update: float
    sent: float
    recomputed: float
    memory: Memory
    collectives: dict[str, float] = field(default_factory=dict[str, float], compare=False)

    @property
    def idle(self) -> float:
        """How long a rank waits for other stages, the mean of them."""
        return self.uneven + self.bubble + self.transfers


TERMS = ("work", "uneven", "gathered", "bubble", "transfers", "data", "update")


def estimate(candidate: Candidate, costs: LayerCosts, hardware: Hardware, numbers: Numbers) -> Estimate:
    """What a step of the candidate takes and holds, given what its layers cost a microbatch."""
    return _Step(candidate, costs, network_of(hardware), numbers).estimate()


class _Step:
    def __init__(self, candidate: Candidate, costs: LayerCosts, network: Network, numbers: Numbers) -> None:
        self.c, self.costs, self.network, self.numbers = candidate, costs, network, numbers
        self.hardware, self.m = network.hardware, candidate.microbatches
        c = candidate
        self.stages = split(costs, c.stages)
        self.ranks = [tuple(self.stages[c.stage(rank, v)] for v in range(c.virtual)) for rank in range(c.pp)]
        self.unlike = list(dict.fromkeys(self.ranks))  # ranks with the same stages take the same
        bucket = c.bucket_bytes(self.hardware)
        self.buckets = bucket if c.copies > 1 else 0.0
        self.slowdown = self.hardware.tables.contention

    def estimate(self) -> Estimate:
        c, m = self.c, self.m
        work = {owned: sum(stage.work() for stage in owned) for owned in self.unlike}
        waits = {owned: self._gathered(owned) for owned in self.unlike}
        rank_work, gathers = [work[owned] for owned in self.ranks], [waits[owned] for owned in self.ranks]
        transfer = self.network.transfer(c, max(s.part.boundary for s in self.stages)) if c.pp > 1 else 0.0
        moved = 2 * transfer * (c.pp - 1) / c.pp * (m - 1) if c.virtual == 1 else 0.0
        bubble = self._bubble(rank_work, gathers, transfer) if c.pp > 1 else 0.0
        data, update = max(map(self._once, self.unlike), key=sum)
        rest = m * max(gathers) + moved + data + update
        slowest = max(rank_work)
        faster = self._by_power(m * slowest + bubble + rest)
        work = {owned: sum(stage.work(faster) for stage in owned) for owned in self.unlike}
        rank_work = [work[owned] for owned in self.ranks]
        busiest, mean = max(rank_work), sum(rank_work) / c.pp
        bubble *= busiest / slowest if slowest else 1.0
        return Estimate(
            m * busiest + bubble + rest,
            m * mean,
            m * (busiest - mean),
            m * max(gathers),
            bubble,
            moved,
            data,
            update,
            m * sum(s.part.sent for s in self.stages) / c.pp,
            m * sum(s.part.recomputed for s in self.stages) / c.pp,
            max((self._memory(*held) for held in self._held()), key=lambda memory: memory.total),
            {axis: m * spent / c.pp for axis, spent in self.costs.collectives.items()},
        )

    def _by_power(self, seconds: float) -> float:
        """How many times as long as by the table of products the busiest rank's device computes, in a step that takes
        so many seconds by it."""
        owned = max(self.unlike, key=lambda stages: sum(stage.work() for stage in stages))
        products = sum(stage.part.products for stage in owned)
        computed = sum(stage.part.seconds for stage in owned)
        factor = self.hardware.tables.power.factor(self.m * products, seconds - self.m * products)
        return 1 + (factor - 1) * products / computed if computed else 1.0

    def _bubble(self, rank_work: Sequence[float], gathers: Sequence[float], transfer: float) -> float:
        """Until all ranks are at work, and from when the first has none left."""
        c, hops = self.c, self.c.pp - 1
        if c.schedule == "zb-v":
            parts = [(s.part.forward, s.part.backward - s.part.late, s.part.late) for s in self.stages]
            return hops * (max(map(max, parts)) + 2 * c.virtual * transfer)
        if c.virtual > 1:
            # A rank's chunks come round once all ranks had theirs: what is sent meanwhile hides, but for hand-overs.
            return hops * (max(s.work() for s in self.stages) + 2 * transfer)
        fill = sum(rank_work) + sum(gathers) - max(rank_work) - max(gathers) + 2 * hops * transfer
        if c.schedule == "zb-h1":
            late = sorted(sum(s.part.late for s in owned) for owned in self.ranks)
            fill -= 2 * sum(late[:hops])
        return max(fill, 2 * hops * transfer)

    # ------------------------------------------------------------------ storage
    def _over(self, kind: str, part: Part, size: float) -> float:
        """A collective of all weights of a part, `size` bytes an element."""
        seconds, most = self.network.seconds, self._most(part, size)
        common = seconds(self.c, kind, (part.weights - part.own) * size, ("dp", "ep", "cp"), most)
        return common + seconds(self.c, kind, part.own * size, ("dp", "cp"), most)

    def _most(self, part: Part, size: float) -> float:
        """Bytes that travel as one: a bucket, or a parameter where the plan has no buckets."""
        return self.buckets or part.weights * size / max(1.0, part.tensors)

    def _sums(self, part: Part) -> float:
        """Of gradients: over the axes of storage, and of what each then has over its replicas."""
        c, size = self.c, REDUCED_BYTES.get(self.c.reduce or "", self.numbers.gradient)
        if c.zero:
            shard = (part.weights - part.own) / c.copies + part.own / c.expert_copies
            return self._over("reduce_scatter", part, size) + self.network.seconds(
                c, "all_reduce", shard * size, ("dp_replicate",), self._most(part, size)
            )
        return self._over("all_reduce", part, size)

    def _beside(self, collective: float, work: float, count: int) -> float:
        """What collectives of `count` layers take beside the work of these: the cores that they take from it, what is
        left of them when it is done, and what it takes longer."""
        if not collective:
            return 0.0
        collective *= self.slowdown.collective
        taken = self.slowdown.cores * collective
        left = max(0.0, collective - taken - work * (count - 1) / count)
        shown = max(collective / count, taken + left)
        return shown + (self.slowdown.product - 1) * (collective - shown)

    def _gathered(self, owned: Sequence[Stage]) -> float:
        """ZeRO-3: how long a rank waits in a microbatch for weights, gathered in forward and again in backward."""
        c, exposed = self.c, 0.0
        for stage in owned if c.zero == 3 else ():
            count, part = max(1, stage.layers), stage.part
            seconds = self._over("all_gather", part, self.numbers.computed)
            # On the stream of backward's gathers are sums of gradients, too.
            sums = self._sums(part) * (count - 1) / count if c.sums_overlap else 0.0
            exposed += self._beside(seconds, part.forward, count) + self._beside(seconds + sums, part.backward, count)
        return exposed

    def _once(self, owned: Sequence[Stage]) -> tuple[float, float]:
        """What follows the last microbatch, or precedes the first one's work, with nothing to hide behind; the
        update."""
        c, n = self.c, self.numbers
        data = weights = shared = 0.0
        for stage in owned:
            part, count = stage.part, max(1, stage.layers)
            sums = self._sums(part)
            gathers = self._over("all_gather", part, n.computed) if c.zero in (1, 2) else 0.0
            if not c.sums_overlap:
                data += sums + gathers
            else:
                data += sums / count if c.zero == 3 else self._beside(sums, part.backward, count)
                data += self._beside(gathers, part.forward, count)
            weights += part.weights - part.own
            shared += part.own
        held = weights / c.copies + shared / c.expert_copies if c.zero else weights + shared
        tensors = sum(stage.part.tensors for stage in owned)
        return data, max(held * n.update, tensors * n.launched)

    # ------------------------------------------------------------------ memory
    def _held(self) -> Iterable[tuple[tuple[Stage, ...], int]]:
        """The stages of a rank, and its microbatches in flight: once each."""
        return dict.fromkeys((owned, in_flight(self.c, rank)) for rank, owned in enumerate(self.ranks))

    def _memory(self, owned: tuple[Stage, ...], flying: int) -> Memory:
        c, n, part = self.c, self.numbers, summed(owned)
        shard = (part.weights - part.own) / c.copies + part.own / c.expert_copies
        stored = (shard if c.zero == 3 or (c.zero and n.mixed) else part.weights) * n.stored
        layers = sum(s.layers for s in owned)
        if c.zero == 3:
            layer = max(part.largest, part.weights / max(1, layers))
            stored += 2 * layer * n.computed
        elif n.mixed:
            stored += part.weights * n.computed
        if not c.sums_overlap or not c.zero:
            gradients = part.weights * n.gradient
        else:  # each is divided as soon as it is there
            gradients = (shard + 2 * part.largest) * n.gradient
        state = (shard if c.zero else part.weights) * n.state
        kept = part.kept / c.virtual * flying
        bucket = min(self.buckets, part.weights * max(n.gradient, n.computed))  # none is larger than all there is
        return Memory(stored, gradients, state, kept, part.transient + HALF_BUCKETS * bucket, flying)


def in_flight(c: Candidate, rank: int) -> int:
    """How many chunks of a rank have been forward and not backward, at most."""
    if c.pp == 1:
        return 1
    if c.schedule == "zb-v":
        return min(c.microbatches * c.virtual, c.pp * c.virtual)
    if c.virtual > 1:
        return min(c.microbatches * c.virtual, 2 * (c.pp - 1 - rank) + (c.virtual - 1) * c.pp + 1)
    return min(c.microbatches, c.pp - rank if c.schedule == "1f1b" else c.pp)
