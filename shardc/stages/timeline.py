"""A `Timeline`: when each rank did, or would do, what; with its bubbles and its peaks. It prints, draws and exports.

Predicted ones come from `replay`; a runtime that notes when its instructions began and ended makes the same of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from shardc.ir.diagnostic import error
from shardc.ir.files import write_text
from shardc.stages import draw
from shardc.stages.costs import Costs
from shardc.stages.instructions import COMPUTE, Backward, Forward, Instruction, Optimizer, Wgrad


class Event(NamedTuple):
    """An instruction from start to end, in seconds. A transfer is an event of the rank that sends; a measured one is of
    both, each from when it posts it to when it waits for it."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def busy(self) -> bool:
        """Whether the rank computes meanwhile."""
        return isinstance(self.instruction, (*COMPUTE, Optimizer))


@dataclass(frozen=True)
class Timeline:
    """`peak_bytes` is the most that each rank's values take at once, where that is known."""

    ranks: int
    events: tuple[Event, ...]
    peak_bytes: tuple[int, ...] = ()

    @cached_property
    def makespan(self) -> float:
        return max((e.end for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Idle time over compute time, all ranks together: (p - 1) / m for GPipe. Imbalance shows here too."""
        busy = sum(e.end - e.start for e in self.events if e.busy)
        return self.ranks * self.makespan / busy - 1 if busy else 0.0

    def work(self, rank: int) -> list[Event]:
        """What a rank computes, in order."""
        return sorted((e for e in self.events if e.rank == rank and e.busy), key=lambda e: e.start)

    def idle(self, rank: int) -> float:
        """Time without work between a rank's first and last: the bubble in the sense of the zero-bubble papers."""
        work = self.work(rank)
        return work[-1].end - work[0].start - sum(e.end - e.start for e in work) if work else 0.0

    @cached_property
    def peak_live(self) -> tuple[float, ...]:
        """By rank, the most microbatches whose forward has begun and whose backward, wgrad and all, has not ended.

        One that only some of a rank's stages hold counts as that part of one.
        """
        return tuple(_most_live(self.work(r)) / max(len(self.stages[r]), 1) for r in range(self.ranks))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank runs."""
        found: list[set[int]] = [set() for _ in range(self.ranks)]
        for event in self.events:
            if isinstance(event.instruction, COMPUTE):
                found[event.rank].add(event.instruction.stage)
        return tuple(tuple(sorted(stages)) for stages in found)

    # ------------------------------------------------------------------ pictures
    def text(self, width: int = 120) -> str:
        """A row of letters for each rank, and the figures."""
        return draw.text(self, width)

    def __str__(self) -> str:
        return self.text()

    def to_svg(self, path: str | Path) -> None:
        write_text(path, draw.svg(self), [".svg"])

    def to_trace(self, path: str | Path) -> None:
        """A file for chrome://tracing or ui.perfetto.dev."""
        write_text(path, json.dumps(draw.trace(self)), [".json", ".trace"])


def costs_of(given: object, stages: int) -> Costs:
    """What a user gives as the costs of so many stages."""
    hint = f"pass shardc.stages.costs.Costs, with a StageCost for each of the {stages} stages"
    if not isinstance(given, Costs):
        raise error("SC224", f"a timeline goes by Costs, not by {given!r}", hint=hint)
    if len(given.stages) != stages:
        raise error("SC224", f"the costs are of {len(given.stages)} stages; the pipeline has {stages}", hint=hint)
    return given


def _most_live(work: Sequence[Event]) -> int:
    """A rank works on one thing at a time, so the order of its work is all that matters."""
    live = most = 0
    for event in work:
        if isinstance(event.instruction, Forward):
            live += 1
            most = max(most, live)
        elif isinstance(event.instruction, Backward | Wgrad):
            live -= 1
    return most
