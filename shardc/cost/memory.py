"""The memory of one rank over a step, by liveness: what a body holds at each instruction, by category, and at its peak.

A storage lives from the call that makes it to the last use of it or of a view of it; outputs live to the end, inputs
all along. While a call runs, its operands and its results are both there. What a kernel takes for itself meanwhile (a
workspace, a copy it packs for a collective of its own) is not counted, nor is the allocator's rounding.

    parameters, optimizer state, buffers, inputs    stored: what a rank holds all step long
    gradients        a parameter's, until the optimizer has used it; without one, to the end
    activations      made in forward and used in backward; the loss and other outputs
    communication    results of collectives, until they are used; parameters gathered for use
    temporaries      everything that forward, backward or the optimizer needs within itself alone

New values of what is stored (casts and updates of parameters, new optimizer state) count with what they are a copy of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch import fx

from shardc.ir.buckets import pieces, with_buckets
from shardc.ir.collectives import KINDS, human_bytes
from shardc.ir.graph import Graph, Phase, Role, info, op_name, operands, producer, type_of
from shardc.ir.in_place import writes
from shardc.ir.microbatch import GIVEN, MADE, in_microbatch
from shardc.ir.ops.accumulate import ACCUMULATE
from shardc.ir.ops.buckets import PACK, UNPACK
from shardc.ir.storages import Storage, storages, yields
from shardc.ir.types import TensorType

Category = Literal[
    "parameters", "gradients", "optimizer state", "buffers", "inputs", "activations", "communication", "temporaries"
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "inputs",
    "activations",
    "communication",
    "temporaries",
)
# By the role of an input: else it is one of the batch. By that of an output: else it is an activation.
STORED: dict[Role, Category] = {"param": "parameters", "state": "optimizer state", "buffer": "buffers"}
RETURNED: dict[Role, Category] = {**STORED, "grad": "gradients"}
ORDER: tuple[Phase, ...] = ("fwd", "bwd", "opt")
PHASES: dict[Phase, str] = {"fwd": "forward", "bwd": "backward", "opt": "optimizer"}


@dataclass(frozen=True)
class Row:
    """Bytes of one category on one rank."""

    rank: int
    category: Category
    stored: int  # held all step long
    live: int  # beyond that, at the rank's peak
    most: int  # beyond that, at the category's own peak

    @property
    def bytes(self) -> int:
        """Held at the rank's peak."""
        return self.stored + self.live


@dataclass(frozen=True)
class Moment:
    """An instruction of the body."""

    index: int  # among the calls
    name: str
    op: str
    phase: Phase
    fqn: str
    source: str

    def __str__(self) -> str:
        where = ", ".join(filter(None, (PHASES[self.phase], self.fqn and f"in {self.fqn}", self.source)))
        return f"%{self.name} = {self.op} ({where})"


@dataclass(frozen=True)
class LiveValue:
    """A storage that is there at the peak, named after the value that it was made for."""

    name: str
    category: Category
    type: TensorType
    fqn: str
    source: str
    bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """A row for each rank and category; when a rank holds most, and what it then holds, largest first.

    All its ranks run one program, so they hold the same.
    """

    rows: tuple[Row, ...]
    peak_at: Moment | None  # None for a body without calls
    live: tuple[LiveValue, ...]
    timeline: tuple[int, ...]  # bytes beyond what is stored, while each call runs

    @property
    def peak(self) -> int:
        """The most bytes that a rank holds at once, what is stored included."""
        return sum(row.bytes for row in self.of_rank(self.rows[0].rank))

    @property
    def stored(self) -> int:
        """Bytes that a rank holds all step long."""
        return sum(row.stored for row in self.of_rank(self.rows[0].rank))

    def of_rank(self, rank: int) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.rank == rank)

    def row(self, category: Category, rank: int = 0) -> Row:
        return next(row for row in self.of_rank(rank) if row.category == category)

    def top(self, count: int = 10) -> tuple[LiveValue, ...]:
        """The largest values at the peak."""
        return self.live[:count]

    def __str__(self) -> str:
        ranks = len({row.rank for row in self.rows})
        head = f"{human_bytes(self.peak)} a rank at the peak, the same on all {ranks} ranks"
        moment = [f"peak at {self.peak_at}"] if self.peak_at is not None else []
        return "\n".join([head, *moment, "", *self.table()])

    def table(self) -> list[str]:
        """The bytes of each category, in lines."""
        lines: list[tuple[str, ...]] = [("", "stored", "at the peak", "at its own peak")]
        for row in self.of_rank(self.rows[0].rank):
            if row.stored or row.most:
                columns = (row.stored, row.bytes, row.stored + row.most)
                lines.append((row.category, *(human_bytes(n) if n else "-" for n in columns)))
        lines.append(("total", human_bytes(self.stored), human_bytes(self.peak), ""))
        return aligned(lines)

    def listing(self, count: int = 10) -> str:
        """The largest values at the peak, a line each."""
        lines = [("largest at the peak", "bytes", "category", "type", "line")]
        for one in self.top(count):
            lines.append((f"%{one.name}", human_bytes(one.bytes), one.category, str(one.type), one.source))
        return "\n".join(aligned(lines, right=(1,)))


def aligned(lines: Sequence[tuple[str, ...]], right: Sequence[int] | None = None) -> list[str]:
    """A table in plain text; all columns but the first are numbers, unless `right` says which."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    numbers = range(1, len(widths)) if right is None else right
    return [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


@dataclass
class Life:
    """What the walk over the body learns of one storage: the calls it lives from and to, the phase it ends in."""

    storage: Storage
    born: int
    dies: int
    phase: Phase
    last: Phase
    weights: bool  # made of parameters alone
    moved: bool  # by a collective
    returned: Role | None = None

    @property
    def category(self) -> Category:
        if self.returned is not None and self.returned in RETURNED:
            return RETURNED[self.returned]
        if self.weights:
            return "communication" if self.moved else "parameters"
        if self.returned is not None or (self.phase == "fwd" and self.last != "fwd"):
            return "activations"
        if self.phase == "bwd" and self.last == "opt":
            return "gradients"
        return "communication" if self.moved else "temporaries"


def memory(body: Graph) -> MemoryReport:
    """The report of a localized body. Takes time linear in its length."""
    inside = in_microbatch(body)
    calls = sorted(body.calls(), key=lambda node: node not in inside)  # as they run
    held, made = lives(body, calls, inside, with_buckets(body, storages(body)))
    stored = nothing()
    for category, storage in held:
        stored[category] += storage.bytes
    categories: list[Category] = [life.category for life in made]
    walk = Walk.over(made, categories, len(calls))
    rows = tuple(
        Row(rank, category, stored[category], walk.at_peak[category], walk.most[category])
        for rank in range(body.mesh.world_size)
        for category in CATEGORIES
    )
    live = [live_value(storage, category) for category, storage in held]
    if walk.peak_at is not None:
        live += [live_value(made[i].storage, categories[i]) for i in walk.there(made)]
    live.sort(key=lambda one: -one.bytes)
    moment = None if walk.peak_at is None else moment_of(walk.peak_at, calls[walk.peak_at])
    return MemoryReport(rows, moment, tuple(live), walk.timeline)


@dataclass(frozen=True)
class Walk:
    """What there is at each call of a body, and when that is most: in all, and of each category."""

    timeline: tuple[int, ...]
    peak_at: int | None
    at_peak: Mapping[Category, int]
    most: Mapping[Category, int]

    @classmethod
    def over(cls, made: Sequence[Life], categories: Sequence[Category], calls: int) -> Walk:
        """Lives in order of birth, and how many calls there are."""
        births = _Agenda(range(len(made)), [life.born for life in made])
        deaths = _Agenda(sorted(range(len(made)), key=lambda i: made[i].dies), [life.dies for life in made])
        now, most, at_peak = nothing(), nothing(), nothing()
        timeline: list[int] = []
        total = peak = 0
        peak_at: int | None = None
        for at in range(calls):
            for i in births.due(at):
                size, category = made[i].storage.bytes, categories[i]
                total += size
                now[category] += size
                most[category] = max(most[category], now[category])
            timeline.append(total)
            if total > peak or peak_at is None:
                peak, peak_at, at_peak = total, at, dict(now)
            for i in deaths.due(at):
                total -= made[i].storage.bytes
                now[categories[i]] -= made[i].storage.bytes
        return cls(tuple(timeline), peak_at, at_peak, most)

    def there(self, made: Sequence[Life]) -> list[int]:
        """Those of the lives that are there at the peak."""
        at = self.peak_at
        return [i for i, life in enumerate(made) if at is not None and life.born <= at <= life.dies]


def nothing() -> dict[Category, int]:
    return dict.fromkeys(CATEGORIES, 0)


class _Agenda:
    """Indices in order of their times, handed out as time goes by."""

    def __init__(self, order: Sequence[int], times: Sequence[int]) -> None:
        self.order, self.times, self.next = order, times, 0

    def due(self, now: int) -> Iterator[int]:
        while self.next < len(self.order) and self.times[self.order[self.next]] == now:
            self.next += 1
            yield self.order[self.next - 1]


def lives(
    body: Graph, calls: Sequence[fx.Node], inside: set[fx.Node], of: dict[fx.Node, Storage]
) -> tuple[list[tuple[Category, Storage]], list[Life]]:
    """The storages of inputs, by category; and those that calls make, in order of birth.

    Of several microbatches it is the last: what all are fed is there, the sums so far, the outputs of those before, and
    the buffers that it starts from.
    """
    over = {write.value: write for write in writes(body, of)}
    made = pieces(body)  # in the flat tensor of a bucket
    several = body.microbatches > 1
    held: list[tuple[Category, Storage]] = []
    for port, node in zip(body.inputs, body.placeholders, strict=True):
        times = body.microbatches if port.role in GIVEN else 1
        held.append((STORED.get(port.role, "inputs"), replace(of[node], bytes=of[node].bytes * times)))
    found: dict[Storage, Life] = {}
    earlier: list[Life] = []
    weights = {node for port, node in zip(body.inputs, body.placeholders, strict=True) if port.role == "param"}
    for at, call in enumerate(calls):
        phase, sources = info(call).phase, operands(call)
        of_weights = bool(sources) and all(source in weights for source in sources)
        for source in sources:
            life = found.get(of[source])
            if life is not None:
                life.dies = at
                life.last = phase if ORDER.index(phase) > ORDER.index(life.last) else life.last
        for value, _ in yields(call):
            if of_weights:
                weights.add(value)
            own = of[value].value is value or value in made
            if own and of[value] not in found and (value not in over or over[value].op is None):
                moved = op_name(call.target) in KINDS or value in made or call.target in (PACK, UNPACK)
                born = 0 if several and call.target is ACCUMULATE else at
                found[of[value]] = Life(of[value], born, at, phase, phase, of_weights, moved)
    for port, value in zip(body.outputs, body.output_values, strict=True):
        life = found.get(of[value])
        if life is not None and value in over:  # copied as soon as it is made
            life.returned = port.role
        elif life is not None:
            life.dies, life.returned = len(calls), life.returned or port.role
            if several and port.role in MADE and value in inside:
                before = of[value].bytes * (body.microbatches - 1 if port.role == "output" else 1)
                earlier.append(replace(life, storage=replace(of[value], bytes=before), born=0))
    return held, [*earlier, *sorted(found.values(), key=lambda life: life.born)]


def live_value(storage: Storage, category: Category) -> LiveValue:
    about = info(storage.value)
    call = info(producer(storage.value)[0])
    return LiveValue(about.name, category, type_of(storage.value), call.fqn, call.source, storage.bytes)


def moment_of(index: int, call: fx.Node) -> Moment:
    about = info(call)
    return Moment(index, about.name, op_name(call.target), about.phase, about.fqn, about.source)
