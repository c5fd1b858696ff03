"""A `Timeline`: the start and end of each rank's instructions, with bubbles and peaks, as text, SVG or trace events.

    rank 0  F0 F1 F2 F3 ·  ·  ·  B0    B1  ...      4.0 live, 27 % idle

The text is for a terminal, the SVG for a page, the trace events for chrome://tracing and Perfetto. The second stage of
a rank has lower-case letters, as in a V: F0 f0 b0 B0.

`replay` predicts timelines; `runtime.execute.measured_timeline` builds them from clocks on the instructions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from shardc.ir.diagnostic import error
from shardc.ir.files import write_text
from shardc.schedule.costs import Costs
from shardc.schedule.instructions import COMPUTE, Backward, Forward, Instruction, Optimizer, Wgrad, instruction_text

COLOURS = {"F": "#8ecae6", "B": "#a7c957", "D": "#cfe1a0", "W": "#f4a261", "O": "#9d8ec7"}
ROW, LEFT, TOP, WIDTH = 26, 64, 30, 1400
NAMES = {"F": "forward", "B": "backward", "D": "dgrad", "W": "wgrad", "O": "optimizer"}


class TimelineEvent(NamedTuple):
    """An instruction with its start and end in seconds. A predicted transfer is one event, of the sending rank. A
    measured transfer is an event of both ranks, each from posting to waiting."""

    rank: int
    instruction: Instruction
    start: float
    end: float

    @property
    def busy(self) -> bool:
        """Whether the rank computes during the event."""
        return isinstance(self.instruction, (*COMPUTE, Optimizer))


@dataclass(frozen=True)
class Timeline:
    """`peak_bytes` is the peak memory of each rank's values, if it is known."""

    ranks: int
    events: tuple[TimelineEvent, ...]
    peak_bytes: tuple[int, ...] = ()

    @cached_property
    def makespan(self) -> float:
        return max((e.end for e in self.events), default=0.0) - min((e.start for e in self.events), default=0.0)

    @cached_property
    def bubble(self) -> float:
        """Idle time over compute time, summed over ranks: (p - 1) / m for GPipe. It includes load imbalance."""
        busy = sum(e.end - e.start for e in self.events if e.busy)
        return self.ranks * self.makespan / busy - 1 if busy else 0.0

    def work(self, rank: int) -> list[TimelineEvent]:
        """The compute events of a rank, in order."""
        return sorted((e for e in self.events if e.rank == rank and e.busy), key=lambda e: e.start)

    def idle(self, rank: int) -> float:
        """Idle time between a rank's first and last work: the bubble as the zero-bubble papers define it."""
        work = self.work(rank)
        return work[-1].end - work[0].start - sum(e.end - e.start for e in work) if work else 0.0

    @cached_property
    def peak_live(self) -> tuple[float, ...]:
        """By rank: the peak number of microbatches whose forward has begun and whose backward has not ended.

        A microbatch that only some of a rank's stages hold counts as that fraction.
        """
        return tuple(_most_live(self.work(r)) / max(len(self.stages[r]), 1) for r in range(self.ranks))

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The stages that each rank runs."""
        rank_stages: list[set[int]] = [set() for _ in range(self.ranks)]
        for event in self.events:
            if isinstance(event.instruction, COMPUTE):
                rank_stages[event.rank].add(event.instruction.stage)
        return tuple(tuple(sorted(stages)) for stages in rank_stages)

    # ------------------------------------------------------------------ pictures
    def text(self, width: int = 120) -> str:
        """One row of letters for each rank, followed by its live microbatches and idle time."""
        return _text(self, width)

    def __str__(self) -> str:
        return self.text()

    def to_svg(self, path: str | Path) -> None:
        write_text(path, _svg(self), [".svg"])

    def to_trace(self, path: str | Path) -> None:
        """Write a trace file for chrome://tracing or ui.perfetto.dev."""
        write_text(path, json.dumps(_trace(self)), [".json", ".trace"])


def checked_costs(costs: object, stages: int) -> Costs:
    """The user's costs, checked: they must be `Costs` of this many stages."""
    hint = f"pass shardc.schedule.costs.Costs, with a StageCost for each of the {stages} stages"
    if not isinstance(costs, Costs):
        raise error("SC224", f"a timeline goes by Costs, not by {costs!r}", hint=hint)
    if len(costs.stages) != stages:
        raise error("SC224", f"the costs are of {len(costs.stages)} stages; the pipeline has {stages}", hint=hint)
    return costs


def _most_live(work: Sequence[TimelineEvent]) -> int:
    """The peak depends only on the order of the work, since a rank computes one event at a time."""
    live = most = 0
    if all(isinstance(event.instruction, Forward) for event in work):  # of an evaluation, which keeps nothing
        return int(bool(work))
    for event in work:
        if isinstance(event.instruction, Forward):
            live += 1
            most = max(most, live)
        elif isinstance(event.instruction, Backward | Wgrad):
            live -= 1
    return most


# ------------------------------------------------------------------ pictures of a timeline
def _text(timeline: Timeline, width: int) -> str:
    shortest = min((e.end - e.start for e in timeline.events if e.busy and e.end > e.start), default=1.0)
    # The shortest work gets three letters, if the width allows it.
    scale = min(3 / shortest, width / (timeline.makespan or 1.0))
    begin = min((e.start for e in timeline.events), default=0.0)
    lines = [_summary(timeline)]
    for rank in range(timeline.ranks):
        row = ["·" if column % 3 == 0 else " " for column in range(round(timeline.makespan * scale))]
        for event in timeline.work(rank):
            first, last = round((event.start - begin) * scale), round((event.end - begin) * scale)
            row[first:last] = _label(timeline, event)[: last - first].ljust(last - first)
        lines.append(f"rank {rank:<3}{''.join(row)}  {_figures(timeline, rank)}")
    return "\n".join(lines)


def _summary(timeline: Timeline) -> str:
    return f"makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.1%} of the work"


def _label(timeline: Timeline, event: TimelineEvent) -> str:
    """The letter of the work and its microbatch: `F12`."""
    letter = _letter(event.instruction)
    if not isinstance(event.instruction, COMPUTE):
        return letter
    return f"{letter.lower() if _is_odd_stage(timeline, event) else letter}{event.instruction.microbatch}"


def _svg(timeline: Timeline) -> str:
    """One row for each rank. Colours show the kind of work; the second stage of a rank is shaded."""
    scale = WIDTH / (timeline.makespan or 1.0)
    begin = min((e.start for e in timeline.events), default=0.0)
    height = TOP + ROW * timeline.ranks + 24
    size = f'width="{LEFT + WIDTH + 170}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="18">{escape(_summary(timeline))}</text>',
    ]
    for rank in range(timeline.ranks):
        y = TOP + ROW * rank
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 4}" fill="#eeeeee"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 8}" y="{y + 16}">{escape(_figures(timeline, rank))}</text>')
        for event in timeline.work(rank):
            x, wide = LEFT + (event.start - begin) * scale, (event.end - event.start) * scale
            parts.append(_svg_box(timeline, event, x, y, wide))
    for column, (letter, name) in enumerate(NAMES.items()):
        x = LEFT + 100 * column
        parts.append(f'<rect x="{x}" y="{height - 20}" width="12" height="12" fill="{COLOURS[letter]}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - 10}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _trace(timeline: Timeline) -> dict[str, Any]:
    """One process for each rank, with one thread for work and one for communication. Times are in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("work", "communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": instruction_text(event.instruction),
                "cat": type(event.instruction).__name__,
                "pid": event.rank,
                "tid": 0 if event.busy else 1,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _svg_box(timeline: Timeline, event: TimelineEvent, x: float, y: int, width: float) -> str:
    title = instruction_text(event.instruction) + f", {event.start:.6g} to {event.end:.6g} s"
    dark = ' opacity="0.7"' if _is_odd_stage(timeline, event) else ""
    label = _label(timeline, event)
    shown = f'<text x="{x + 2:.2f}" y="{y + 15}">{label}</text>' if width > 7 * len(label) + 2 else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW - 4}"'
        f' fill="{COLOURS[_letter(event.instruction)]}" stroke="white" stroke-width="0.5"{dark}/>{shown}</g>'
    )


def _letter(instruction: Instruction) -> str:
    return "O" if isinstance(instruction, Optimizer) else type(instruction).__name__[0]


def _is_odd_stage(timeline: Timeline, event: TimelineEvent) -> bool:
    """Whether the event's stage has an odd index among the stages of its rank."""
    if not isinstance(event.instruction, COMPUTE):
        return False
    return timeline.stages[event.rank].index(event.instruction.stage) % 2 == 1


def _figures(timeline: Timeline, rank: int) -> str:
    busy = sum(e.end - e.start for e in timeline.work(rank))
    idle = 1 - busy / timeline.makespan if timeline.makespan else 0.0
    return f"{timeline.peak_live[rank]:.3g} live, {idle:.0%} idle"
