"""The memory of one rank over a step, by liveness: what a body holds at each instruction, by category, and at its peak.

What lives when is `ir.liveness`. What a kernel takes for itself meanwhile (a workspace, a copy it packs for a
collective of its own) is not counted, nor is the allocator's rounding.

    parameters, optimizer state, buffers, inputs    stored: what a rank holds all step long
    gradients        a parameter's, until the optimizer has used it; without one, to the end
    activations      made in forward and used in backward, or back from the host; the loss and other outputs
    communication    results of collectives, until they are used; parameters gathered for use
    in flight        what collectives under way hold for themselves: packed copies of operands, what has yet to arrive
    temporaries      everything that forward, backward or the optimizer needs within itself alone
    arena            what the memory that was planned for results of kernels (`ir.arena`) holds beside those there now

What lies in the memory of the host (`ir.ops.host_copies`) is in none of these: `Host` has its bytes.

New values of what is stored (casts and updates of parameters, new optimizer state) count with what they are a copy of.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from torch import fx

from shardc.ir.account import Account, account_of
from shardc.ir.arena import Plan, planned
from shardc.ir.collectives import human_bytes
from shardc.ir.fold import described
from shardc.ir.graph import Graph, Phase, Role, info, op_name, producer
from shardc.ir.layers import layer_of, list_and_index
from shardc.ir.liveness import Life
from shardc.ir.ops.host_copies import BEGIN_FETCH
from shardc.ir.overlap_schedule import Action
from shardc.ir.storages import Storage
from shardc.ir.types import TensorType

Category = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "inputs",
    "activations",
    "communication",
    "in flight",
    "temporaries",
    "arena",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "buffers",
    "inputs",
    "activations",
    "communication",
    "in flight",
    "temporaries",
    "arena",
)
# By the role of an input: else it is one of the batch. By that of an output: else it is an activation.
STORED: dict[Role, Category] = {"param": "parameters", "state": "optimizer state", "buffer": "buffers"}
RETURNED: dict[Role, Category] = {**STORED, "grad": "gradients"}
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
class Host:
    """Bytes that a rank has in the memory of its host, which no other figure counts: those held all step long, and the
    most at once, these included."""

    stored: int = 0
    most: int = 0

    @classmethod
    def of(cls, account: Account) -> Host:
        stored = sum(storage.bytes for _, storage in account.host_inputs)
        change = [0] * (account.moments + 2)
        for life in account.host_lives:
            change[life.born] += life.storage.bytes
            change[life.dies + 1] -= life.storage.bytes
        return cls(stored, stored + max(accumulate(change), default=0))

    def __str__(self) -> str:
        kept = f", of which {human_bytes(self.stored)} all step long" if self.stored else ""
        return f"on the host: {human_bytes(self.most)}{kept}"


NO_HOST = Host()


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
        place = ", ".join(filter(None, (PHASES[self.phase], self.fqn and f"in {self.fqn}", self.source)))
        return f"%{self.name} = {self.op} ({place})"


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
    timeline: tuple[int, ...]  # bytes beyond what is stored, during each action
    actions: tuple[Action, ...] = field(default=(), repr=False)  # of a body: runs of calls, begins, waits
    host: Host = NO_HOST

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
        return [*aligned(lines), *([str(self.host)] if self.host.most else [])]

    def listing(self, count: int = 10, *, fold: bool = False) -> str:
        """The largest values at the peak, a line each. With `fold`, those of equal layers have one:

        largest at the peak  layers         bytes  category     type                   line
        %h.*.act             x 32: 0 to 31  4 MiB  activations  f32[128@dp, 8192@tp]   mlp.py:6
        """
        if not fold:
            lines = [(f"%{value.name}", *_described(value)) for value in self.top(count)]
            return "\n".join(aligned([("largest at the peak", *COLUMNS), *lines], right=(1,)))
        groups: dict[tuple[str, ...], list[str]] = {}  # the layers of values that are equal otherwise
        for value in self.live:
            layer = layer_of(value.name)
            name = f"{list_and_index(layer)[0]}.*{value.name.removeprefix(layer)}" if layer else value.name
            groups.setdefault((name, *_described(value)), []).append(layer or value.name)
        rows: list[tuple[str, ...]] = []
        for (name, *columns), layers in list(groups.items())[:count]:
            if len(layers) == 1:
                name = layers[0] + name.partition("*")[2]
            rows.append((f"%{name}", _layers_text(layers), *columns))
        if not any(row[1] for row in rows):
            return self.listing(count)
        return "\n".join(aligned([("largest at the peak", "layers", *COLUMNS), *rows], right=(2,)))


COLUMNS = ("bytes", "category", "type", "line")


def _described(value: LiveValue) -> tuple[str, ...]:
    return human_bytes(value.bytes), value.category, str(value.type), value.source


def _layers_text(layers: Sequence[str]) -> str:
    """`x 32: 0 to 31`; nothing for one layer."""
    base, _ = list_and_index(layers[0])
    return f"x {len(layers)}: {described(layers).replace(f'{base}.', '')}" if len(layers) > 1 else ""


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


def category_of(life: Life) -> Category:
    if life.in_flight:
        return "in flight"
    if life.returned is not None and life.returned in RETURNED:
        return RETURNED[life.returned]
    if life.weights:
        return "communication" if life.moved else "parameters"
    if life.storage.value.target is BEGIN_FETCH:  # what has come back
        return "optimizer state" if life.phase == "opt" else "activations"
    if life.returned is not None or (life.phase == "fwd" and life.last != "fwd"):
        return "activations"
    if life.phase == "bwd" and life.last == "opt":
        return "gradients"
    return "communication" if life.moved else "temporaries"


def memory(
    body: Graph,
    *,
    arena: bool = False,
    overlap: bool = False,
    listed: bool = True,
    storage_of: dict[fx.Node, Storage] | None = None,
) -> MemoryReport:
    """The report of a localized body. As a rank of a job runs it: with its `arena`, its collectives `overlap`. Without
    `listed`, the values that are there at the peak are left out. `storage_of`: as in `account_of`.

    Without overlap, each collective is waited for where it begins, as a simulation does, and a moment is a call.
    """
    account = account_of(body, overlap=overlap, storage_of=storage_of)
    lives, actions = account.lives, account.times.actions
    stored_values: list[tuple[Category, Storage]] = [
        (STORED.get(port.role, "inputs"), storage) for port, storage in account.inputs
    ]
    stored = nothing()
    for category, storage in stored_values:
        stored[category] += storage.bytes
    categories: list[Category] = [category_of(life) for life in lives]
    plan = planned(body) if arena else Plan(())
    walk = Walk.over(lives, categories, account.moments, plan.values, plan.bytes)
    rows = tuple(
        Row(rank, category, stored[category], walk.at_peak[category], walk.most[category])
        for rank in range(body.mesh.world_size)
        for category in CATEGORIES
    )
    live = [live_value(storage, category) for category, storage in stored_values] if listed else []
    if walk.peak_at is not None and listed:
        live += [live_value(lives[i].storage, categories[i]) for i in walk.there(lives)]
    live.sort(key=lambda value: -value.bytes)
    moment = None if walk.peak_at is None else moment_of(account, walk.peak_at)
    return MemoryReport(rows, moment, tuple(live), walk.timeline, actions, Host.of(account))


@dataclass(frozen=True)
class Walk:
    """What there is at each action on a body, and when that is most: in all, and of each category."""

    timeline: tuple[int, ...]
    peak_at: int | None
    at_peak: Mapping[Category, int]
    most: Mapping[Category, int]

    @classmethod
    def over(
        cls,
        lives: Sequence[Life],
        categories: Sequence[Category],
        moments: int,
        placed: Collection[fx.Node] = (),
        arena: int = 0,
    ) -> Walk:
        """Lives in order of birth, and how many moments there are; what is `placed` is in the arena, which is there."""
        ends = [life.dies for life in lives]
        deaths = sorted(range(len(lives)), key=ends.__getitem__)
        count, born, died = len(lives), 0, 0  # of all lives, and of those that have begun and ended
        now, most, at_peak = nothing(), nothing(), nothing()
        now["arena"] = most["arena"] = total = arena
        timeline: list[int] = []
        peak = 0
        peak_at: int | None = None
        for moment in range(moments):
            while born < count and lives[born].born == moment:
                storage, category = lives[born].storage, categories[born]
                if storage.value in placed:
                    now["arena"] -= storage.bytes
                else:
                    total += storage.bytes
                now[category] += storage.bytes
                if now[category] > most[category]:
                    most[category] = now[category]
                born += 1
            timeline.append(total)
            if total > peak or peak_at is None:
                peak, peak_at, at_peak = total, moment, dict(now)
            while died < count and ends[deaths[died]] == moment:
                storage = lives[deaths[died]].storage
                if storage.value in placed:
                    now["arena"] += storage.bytes
                else:
                    total -= storage.bytes
                now[categories[deaths[died]]] -= storage.bytes
                died += 1
        return cls(tuple(timeline), peak_at, at_peak, most)

    def there(self, lives: Sequence[Life]) -> list[int]:
        """The indices of the lives that include the peak."""
        peak = self.peak_at
        return [i for i, life in enumerate(lives) if peak is not None and life.born <= peak <= life.dies]


def nothing() -> dict[Category, int]:
    return dict.fromkeys(CATEGORIES, 0)


def live_value(storage: Storage, category: Category) -> LiveValue:
    """Of results that nobody reads, which are counted as one, the call's name and its largest result's type."""
    about = info(storage.value)
    call = info(producer(storage.value)[0])
    types = [about.type] if about.type is not None else [type for type in about.results if type is not None]
    shown = max(types, key=lambda type: math.prod(type.shape) * type.dtype.itemsize)
    return LiveValue(about.name, category, shown, call.fqn, call.source, storage.bytes)


def moment_of(account: Account, moment: int) -> Moment:
    call = account.call_at(moment)
    about = info(call)
    index = account.times.actions[moment].at
    return Moment(index, about.name, op_name(call.target), about.phase, about.fqn, about.source)
