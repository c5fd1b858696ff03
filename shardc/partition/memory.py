"""What the ranks of a program hold over a step: a report a coordinate of the pipeline's axis; without one, the body's.

    pp  ranks  stages   stored   at the peak  which is at instruction
    0   0, 1   0      38.2 KiB     133.9 KiB  19: Backward 0 #1, %d.wte.embedding_dense_backward
    1   2, 3   1      25.7 KiB      98.8 KiB  22: Backward 1 #1, %d.h.1.attn.c_attn.mm_1

Its rows, its peak and its largest values are those of a body's report (cost/memory.py), one for each coordinate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardc.cost.memory import CATEGORIES, Category, Host, LiveValue, MemoryReport, Moment, Row, aligned
from shardc.cost.memory import memory as memory_of_body
from shardc.ir.collectives import human_bytes
from shardc.partition.memory_walk import Ranks
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import RunBody, instruction_text

MOST_NUMBERS = 4  # of ranks that a table lists one by one


@dataclass(frozen=True)
class Coordinate:
    """The ranks of one coordinate on the pipeline's axis: a row a rank and category, and the instruction at the peak.

    The report's `timeline` has an entry an instruction of the list: the most that is held while it runs, beyond what is
    stored.
    """

    number: int
    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    instruction: int
    said: str
    report: MemoryReport

    @property
    def peak_at(self) -> str:
        call = "" if self.report.peak_at is None else f", %{self.report.peak_at.name}"
        return f"{self.instruction}: {self.said}{call}"


@dataclass(frozen=True)
class ProgramMemory:
    """A report a coordinate. What asks for no rank is of the one that holds most. `axis` is "" without a pipeline."""

    axis: str
    coordinates: tuple[Coordinate, ...]

    @property
    def fullest(self) -> Coordinate:
        return max(self.coordinates, key=lambda coordinate: coordinate.report.peak)

    @property
    def peak(self) -> int:
        """The most bytes that a rank holds at once, what is stored included."""
        return self.fullest.report.peak

    @property
    def stored(self) -> int:
        """The most bytes that a rank holds all step long."""
        return max(coordinate.report.stored for coordinate in self.coordinates)

    @property
    def host(self) -> Host:
        """What lies in the memory of the host, of the rank that has most there."""
        return max((coordinate.report.host for coordinate in self.coordinates), key=lambda host: host.most)

    @property
    def rows(self) -> tuple[Row, ...]:
        return tuple(
            sorted((row for coordinate in self.coordinates for row in coordinate.report.rows), key=lambda row: row.rank)
        )

    def of_rank(self, rank: int) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.rank == rank)

    def row(self, category: Category, rank: int | None = None) -> Row:
        rank = self.fullest.ranks[0] if rank is None else rank
        return next(row for row in self.of_rank(rank) if row.category == category)

    @property
    def live(self) -> tuple[LiveValue, ...]:
        """All that is held at the peak, largest first."""
        return self.fullest.report.live

    @property
    def peak_at(self) -> Moment | None:
        """The call at the peak, if a call is."""
        return self.fullest.report.peak_at

    @property
    def timeline(self) -> tuple[int, ...]:
        """Bytes beyond what is stored: while each instruction runs, of a pipeline; else at each action of a rank's
        code, which begins a collective and waits for it apart."""
        return self.fullest.report.timeline

    def table(self) -> list[str]:
        """The bytes of each category, in lines."""
        return self.fullest.report.table()

    def top(self, count: int = 10) -> tuple[LiveValue, ...]:
        """The largest values at the peak."""
        return self.fullest.report.top(count)

    def listing(self, count: int = 10, *, fold: bool = False) -> str:
        """The largest values at the peak, a line each; with `fold`, those of equal layers have one."""
        return self.fullest.report.listing(count, fold=fold)

    def __repr__(self) -> str:
        return f"ProgramMemory({human_bytes(self.peak)} a rank at the peak; print it for more)"

    def __str__(self) -> str:
        most = self.fullest
        if not self.axis:
            return str(most.report)
        lines = [(self.axis, "ranks", "stages", "stored", "at the peak", "which is at instruction")]
        for coordinate in self.coordinates:
            sizes = human_bytes(coordinate.report.stored), human_bytes(coordinate.report.peak)
            lines.append(
                (
                    str(coordinate.number),
                    _listed(coordinate.ranks),
                    _listed(coordinate.stages),
                    *sizes,
                    coordinate.peak_at,
                )
            )
        head = f"{human_bytes(self.peak)} a rank at the peak, on ranks {_listed(most.ranks)}"
        peak_place = f"of {self.axis} {most.number}, at instruction {most.instruction}: {most.said}"
        moment = [] if most.report.peak_at is None else [f"peak at {most.report.peak_at}"]
        return "\n".join([head, "", *aligned(lines, right=(3, 4)), "", peak_place, *moment, "", *most.report.table()])


def memory(program: StagedProgram, *, early: bool = True) -> ProgramMemory:
    """What each rank of a program holds, and when that is most.

    `early`: as a rank of a job runs it, which forgets values and adds gradients up while a piece of work runs; else
    after it, as the simulation does.
    """
    return ProgramMemory(program.axis, tuple(_coordinate(program, c, early) for c in range(len(program.lists.ranks))))


def _coordinate(program: StagedProgram, c: int, early: bool) -> Coordinate:
    ranks = tuple(sorted(program.rank_of(c, i) for i in range(program.body.mesh.world_size)))
    first = program.lists.ranks[c][0]
    if isinstance(first, RunBody):
        report = memory_of_body(program.body, arena=early, overlap=early)
        return Coordinate(c, ranks, program.lists.stages_of(c), 0, instruction_text(first), report)
    walk = Ranks(program, c, early)
    walk.run()
    stored, stored_values, host = walk.stored()
    rows = tuple(
        Row(rank, category, stored[category], walk.at_peak[category], walk.most[category])
        for rank in ranks
        for category in CATEGORIES
    )
    live = tuple(sorted([*stored_values, *walk.live], key=lambda value: -value.bytes))
    report = MemoryReport(rows, walk.moment, live, tuple(walk.timeline), host=host)
    text = instruction_text(program.lists.ranks[c][walk.peak_at])
    return Coordinate(c, ranks, program.lists.stages_of(c), walk.peak_at, text, report)


def _listed(numbers: Sequence[int]) -> str:
    """`0, 1`, `0 to 7, 16 to 23`: of many runs the first few."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > MOST_NUMBERS else ", ".join(map(str, run)) for run in runs]
    more = f" and {len(runs) - MOST_NUMBERS} more runs" if len(runs) > MOST_NUMBERS + 1 else ""
    return ", ".join(texts[: MOST_NUMBERS if more else None]) + more
