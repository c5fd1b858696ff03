"""Which steps of a recurrence each rank has, where they lie over axes: one run of them, or of a zigzag two.

    16 over cp=2, 8|8~cp     rank 0 has steps 0-3 and 12-15, rank 1 has 4-7 and 8-11

In the order of time these runs are of ranks 0, 1, 1 and 0. A state goes that way, and its gradient back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from shardc.ir.blocks import Blocks, blocks_of, local_size
from shardc.ir.mesh import Mesh
from shardc.ir.ops.cumulative import runs_of_ranks
from shardc.ir.ops.scan import blocks_of_steps
from shardc.ir.ops.shift import size_of


@dataclass(frozen=True, slots=True)
class StepRun:
    """Steps [start, start + extent), which a rank has from its own step `local` on, as its run number `place`."""

    rank: int
    place: int
    start: int
    extent: int
    local: int


@dataclass(frozen=True)
class StepRuns:
    """The runs of all ranks that have steps, in the order of time. `lengths`: of a rank's runs, where they are full."""

    runs: tuple[StepRun, ...]
    lengths: tuple[int, ...]

    def of(self, rank: int) -> list[tuple[int, StepRun]]:
        """A rank's runs, and their numbers in the order of time."""
        return [(number, run) for number, run in enumerate(self.runs) if run.rank == rank]

    def turns(self, backward: bool) -> list[int]:
        """The numbers of runs behind which a state goes on to another one, or in backward before which."""
        return list(range(len(self.runs) - 1, 0, -1) if backward else range(len(self.runs) - 1))

    def hop(self, turn: int, backward: bool) -> int:
        """How many ranks further a state goes from a run."""
        return self.runs[turn + (-1 if backward else 1)].rank - self.runs[turn].rank

    def segments(self, run: StepRun, segments: Sequence[int]) -> list[int]:
        """Those of a rank's segments that are of one of its runs."""
        first = sum(self.lengths[: run.place])
        ends = zip(segments, accumulate(segments), strict=True)
        return [n for n, end in ends if first < end <= first + self.lengths[run.place]]

    def starts(self, run: StepRun, segments: Sequence[int]) -> int:
        """Where the starts of a run lie among those of a rank (`scan`), which has these segments in all."""
        first = sum(self.lengths[: run.place])
        return sum(start < first for start, _ in blocks_of_steps(sum(self.lengths), segments))


@lru_cache(maxsize=4096)
def step_runs(source: str, axes: tuple[str, ...], mesh: Mesh) -> StepRuns:
    """The runs of a dim of time, told as an atom, that lies over axes."""
    size = size_of(source)
    held = enumerate(runs_of_ranks(source, axes, mesh))
    runs = [
        StepRun(rank, place, run.start, run.extent, run.local)
        for rank, of_rank in held
        for place, run in enumerate(of_rank)
        if run is not None
    ]
    own = size.local(axes, mesh) if isinstance(size, Blocks) else local_size(size, axes, mesh)
    lengths = tuple(int(block.size) for block in blocks_of(own))
    return StepRuns(tuple(sorted(runs, key=lambda run: run.start)), lengths)


def segments_of(source: str, axes: tuple[str, ...], mesh: Mesh) -> list[int]:
    """The segments of a scan of which ranks take a run, or two, each."""
    return [run.extent for run in step_runs(source, axes, mesh).runs]


def starts_of(source: str, segments: Sequence[int]) -> int:
    """The atom of the starts of blocks of steps, which lie with the steps."""
    size = size_of(source)
    found = [start for start, _ in blocks_of_steps(int(size), segments)]
    if not isinstance(size, Blocks):
        return len(found)
    ends = [0, *accumulate(block.size for block in size.parts)]
    counts = [sum(first <= start < end for start in found) for first, end in pairwise(ends)]
    return Blocks(replace(block, count=n, room=0) for block, n in zip(size.parts, counts, strict=True))


def own_segments(source: str, axes: tuple[str, ...], mesh: Mesh, segments: Sequence[int]) -> list[int] | None:
    """A rank's segments of a scan that has these. None where a rank would have a part of one, or starts elsewhere."""
    size, all_runs = size_of(source), step_runs(source, axes, mesh)
    if sum(segments) != int(size) or not all_runs.runs:
        return None
    bounds = [0, *accumulate(segments)]
    longest: dict[int, list[int]] = {}
    of_run: list[tuple[StepRun, list[int]]] = []
    for run in all_runs.runs:
        within = [n for n, first in zip(segments, bounds, strict=False) if run.start <= first < run.start + run.extent]
        if run.start not in bounds or sum(within) != run.extent:
            return None
        of_run.append((run, within))
        longest[run.place] = max(longest.get(run.place, []), within, key=sum)
    own = [n for place in range(len(all_runs.lengths)) for n in longest.get(place, [])]
    if sum(own) != sum(all_runs.lengths):
        return None
    atom, number = starts_of(source, segments), 0
    starts = runs_of_ranks(str(atom), axes, mesh)
    for run, within in of_run:
        count, held = len(blocks_of_steps(run.extent, within)), starts[run.rank][run.place]
        mine = all_runs.segments(run, own)
        if blocks_of_steps(run.extent, within) != blocks_of_steps(run.extent, mine) or held is None:
            return None
        if (held.start, held.extent, held.local) != (number, count, all_runs.starts(run, own)):
            return None
        number += count
    return own
