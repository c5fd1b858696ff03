"""The predicted step of a candidate, in closed form: its layers' costs, the schedule, the storage and the network.

    1f1b           sum of (f + b) over stages + (M - 1) * (the largest f + b + its transfers)
    interleaved    M * the busiest rank + (pp - 1) * (f + b of a chunk)
    storage        zero 0: gradients all-reduced    1: reduce-scattered, weights gathered    3: gathered a microbatch
    memory         of each coordinate: weights, gradients, state + microbatches in flight * activations + transients

Transfers of 1F1B count in its steady state: a microbatch's round trip through the later stages may take no longer than
the work of the microbatches that are in flight. Of a step of one microbatch, sums of gradients overlap with backward
and gathers of weights with forward; of several they follow the last and precede the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from shardc.ir.hardware import Group, Hardware
from shardc.ir.mesh import Mesh
from shardc.planner.candidate import Candidate
from shardc.planner.layer_costs import LayerCosts, Part
from shardc.planner.numbers import Numbers


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
    """Seconds of a step and where they go: `work` of the busiest rank, its waits for collectives (`sent`) included."""

    seconds: float
    work: float
    sent: float
    recomputed: float
    bubble: float  # the pipeline's filling and draining, and uneven stages
    transfers: float
    data: float  # sums of gradients and gathers of weights that nothing hides
    update: float
    memory: Memory
    collectives: dict[str, float] = field(default_factory=dict[str, float], compare=False)


@dataclass(frozen=True)
class Stage:
    """The parts of one stage summed."""

    part: Part
    layers: int


def estimate(candidate: Candidate, costs: LayerCosts, hardware: Hardware, numbers: Numbers) -> Estimate:
    """What a step of the candidate takes and holds, given what its layers cost a microbatch."""
    c, m = candidate, candidate.microbatches
    stages = split(costs, c.stages)
    chunk = [s.part.forward + s.part.backward for s in stages]
    ranks = [[stages[r + c.pp * v] for v in range(c.virtual)] for r in range(c.pp)]
    rank_work = [sum(s.part.forward + s.part.backward for s in owned) for owned in ranks]
    busiest = max(rank_work)
    transfer = _transfer(c, stages, hardware)
    gathers = [_gathered(c, owned, hardware, numbers) for owned in ranks]
    per_microbatch = busiest + max(gathers)
    if c.virtual > 1:
        fill = (c.pp - 1) * (max(chunk) + 2 * transfer)
        # A rank's chunks come round once all ranks had theirs: what is sent meanwhile hides, but for the hand-overs.
        seconds, moved = m * per_microbatch + fill, 0.0
    else:
        steady = 2 * transfer * (c.pp - 1) / c.pp
        fill = sum(rank_work) + sum(gathers) - per_microbatch + 2 * (c.pp - 1) * transfer
        moved = steady * (m - 1)
        seconds = m * per_microbatch + fill + moved
    data, update = max((_once(c, owned, hardware, numbers) for owned in ranks), key=sum)
    seconds += data + update
    whole = max(ranks, key=lambda owned: sum(s.part.forward + s.part.backward for s in owned))
    return Estimate(
        seconds,
        m * busiest,
        m * sum(s.part.sent for s in whole) + m * max(gathers),
        m * sum(s.part.recomputed for s in whole),
        fill if c.pp > 1 else 0.0,
        moved,
        data,
        update,
        max(
            (_memory(c, r, owned, hardware, numbers) for r, owned in enumerate(ranks)), key=lambda memory: memory.total
        ),
        {axis: m * spent / c.pp for axis, spent in costs.collectives.items()},
    )


# ---------------------------------------------------------------------- stages
def split(costs: LayerCosts, count: int) -> tuple[Stage, ...]:
    """The layers in contiguous stages whose longest is as short as can be, none of them empty."""
    return _split(_Identity(costs), count)


class _Identity:
    """Layer costs as a key of a cache: by identity."""

    def __init__(self, costs: LayerCosts) -> None:
        self.costs = costs

    def __hash__(self) -> int:
        return id(self.costs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.costs is other.costs


@lru_cache(maxsize=4096)
def _split(key: _Identity, count: int) -> tuple[Stage, ...]:
    costs, layers = key.costs, key.costs.layers
    if count == 1:
        return (Stage(costs.total(), len(layers)),)
    before, after = _work(costs.entry), _work(costs.exit)
    work = [_work(layer) for layer in layers]
    low, high = max(work), sum(work) + before + after
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(work, before, after, count, middle) else (middle, high)
    stages: list[Stage] = []
    position = 0
    for number in range(count):
        left, part, taken = count - number - 1, costs.entry if number == 0 else Part(), 0
        spent = before if number == 0 else 0.0
        last = len(layers) if left == 0 else len(layers) - left
        while position < last and (left == 0 or taken == 0 or spent + work[position] <= high):
            part, spent = part.plus(layers[position]), spent + work[position]
            position, taken = position + 1, taken + 1
        stages.append(Stage(part.plus(costs.exit) if left == 0 else part, taken))
    return tuple(stages)


def _work(part: Part) -> float:
    return part.forward + part.backward


def _fits(work: Sequence[float], before: float, after: float, count: int, limit: float) -> bool:
    """Whether stages of no more than the limit hold all layers, filled from the first on."""
    position, spent = 0, before
    for number in range(count):
        room = limit - (after if number == count - 1 else 0.0)
        taken = 0
        while position < len(work) and (spent + work[position] <= room or (taken == 0 and number < count - 1)):
            spent, position, taken = spent + work[position], position + 1, taken + 1
        spent = 0.0
    return position == len(work)


# ---------------------------------------------------------------------- the network
@cache
def group(hardware: Hardware, mesh: Mesh, axes: tuple[str, ...]) -> Group:
    return hardware.on(mesh).group_of(mesh, axes)


def _collective(c: Candidate, kind: str, size: float, axes: tuple[str, ...], hardware: Hardware) -> float:
    axes = tuple(axis for axis in axes if getattr(c, axis) > 1)
    if not axes or not size:
        return 0.0
    return hardware.collective_seconds(kind, size, group(hardware, c.mesh, axes))


def _transfer(c: Candidate, stages: Sequence[Stage], hardware: Hardware) -> float:
    if c.pp == 1:
        return 0.0
    size = max(s.part.boundary for s in stages)
    whole = group(hardware, c.mesh, ("pp",))
    # A stage sends to the next one: to another node, if stages fill nodes.
    pair = Group((2,)) if len(whole.extents) == 1 else Group((1, 2))
    return hardware.collective_seconds("permute", size, pair)


def _over(c: Candidate, kind: str, part: Part, size: float, hardware: Hardware) -> float:
    """A collective of all weights of a part, `size` bytes an element."""
    common = _collective(c, kind, (part.weights - part.own) * size, ("dp", "ep", "cp"), hardware)
    return common + _collective(c, kind, part.own * size, ("dp", "cp"), hardware)


def _gathered(c: Candidate, owned: Sequence[Stage], hardware: Hardware, numbers: Numbers) -> float:
    """ZeRO-3: how long a rank waits in a microbatch for weights, gathered in forward and again in backward."""
    if c.zero != 3:
        return 0.0
    exposed = 0.0
    sums = _sums(c, owned, hardware, numbers) if _overlaps(c) else 0.0  # on the same stream as backward's gathers
    for stage in owned:
        count = max(1, stage.layers)
        seconds = _over(c, "all_gather", stage.part, numbers.computed, hardware)
        first = seconds / count
        hidden = (count - 1) / count
        exposed += max(first, seconds - stage.part.forward * hidden)
        exposed += max(first, seconds + sums - max(sums, 0.0) / count - stage.part.backward * hidden)
    return exposed


def _overlaps(c: Candidate) -> bool:
    """Whether gradients are summed while backward runs: those of several microbatches are, after the last."""
    return c.pp == 1 and c.microbatches == 1


def _sums(c: Candidate, owned: Sequence[Stage], hardware: Hardware, numbers: Numbers) -> float:
    size = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}.get(c.reduce or "", numbers.gradient)
    kind = "reduce_scatter" if c.zero else "all_reduce"
    return sum(_over(c, kind, stage.part, size, hardware) for stage in owned)


def _once(c: Candidate, owned: Sequence[Stage], hardware: Hardware, numbers: Numbers) -> tuple[float, float]:
    """What follows the last microbatch, or precedes the first one's work, with nothing to hide behind; the update."""
    data = weights = shared = 0.0
    for stage in owned:
        count = max(1, stage.layers)
        hidden = (count - 1) / count if _overlaps(c) else 0.0
        sums = _sums(c, [stage], hardware, numbers)
        gathers = _over(c, "all_gather", stage.part, numbers.computed, hardware) if c.zero in (1, 2) else 0.0
        behind = 0.0 if c.zero == 3 and _overlaps(c) else sums - hidden * stage.part.backward
        data += max(sums / count, behind) + max(gathers / count, gathers - hidden * stage.part.forward)
        weights += stage.part.weights - stage.part.own
        shared += stage.part.own
    held = weights / _copies(c, False) + shared / _copies(c, True) if c.zero else weights + shared
    tensors = sum(stage.part.tensors for stage in owned)
    return data, max(held * numbers.update, tensors * numbers.launched)


def _copies(c: Candidate, own: bool) -> int:
    return c.dp * c.cp * (1 if own else c.ep)


# ---------------------------------------------------------------------- memory
def in_flight(c: Candidate, rank: int) -> int:
    """How many chunks of a rank have been forward and not backward, at most."""
    if c.pp == 1:
        return 1
    if c.virtual > 1:
        return min(c.microbatches * c.virtual, 2 * (c.pp - 1 - rank) + (c.virtual - 1) * c.pp + 1)
    return min(c.microbatches, c.pp - rank)


def _memory(c: Candidate, rank: int, owned: Sequence[Stage], hardware: Hardware, n: Numbers) -> Memory:
    part = Part()
    for stage in owned:
        part = part.plus(stage.part)
    common, own = part.weights - part.own, part.own
    shard = common / _copies(c, False) + own / _copies(c, True)
    stored = (shard if c.zero == 3 or (c.zero and n.mixed) else part.weights) * n.stored
    layers = sum(s.layers for s in owned)
    if c.zero == 3:
        layer = max(part.largest, part.weights / max(1, layers))
        stored += 2 * layer * n.computed
    elif n.mixed:
        stored += part.weights * n.computed
    if c.microbatches > 1 or c.pp > 1 or not c.zero:
        gradients = part.weights * n.gradient
    else:  # each is divided as soon as it is there
        gradients = (shard + 2 * part.largest) * n.gradient
    state = (shard if c.zero else part.weights) * n.state
    flying = in_flight(c, rank)
    kept = part.kept / c.virtual * flying
    bucket = min(hardware.bucket_bytes, part.weights * max(n.gradient, n.computed))  # none is larger than all there is
    buckets = 2 * bucket if c.bucket and c.dp * c.cp * c.ep > 1 else 0
    return Memory(stored, gradients, state, kept, part.transient + buckets, flying)
