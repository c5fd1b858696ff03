"""Pictures of a timeline: letters for a terminal, SVG for a page, events for chrome://tracing and Perfetto.

    rank 0  F0 F1 F2 F3 ·  ·  ·  B0    B1  ...      4.0 live, 27 % idle

The second of a rank's stages has small letters, as in a V: F0 f0 b0 B0.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from shardc.stages.instructions import COMPUTE, Instruction, Optimizer, in_words

if TYPE_CHECKING:
    from shardc.stages.timeline import Event, Timeline

COLOURS = {"F": "#8ecae6", "B": "#a7c957", "D": "#cfe1a0", "W": "#f4a261", "O": "#9d8ec7"}
ROW, LEFT, TOP, WIDTH = 26, 64, 30, 1400
NAMES = {"F": "forward", "B": "backward", "D": "dgrad", "W": "wgrad", "O": "optimizer"}


def text(timeline: Timeline, width: int) -> str:
    shortest = min((e.end - e.start for e in timeline.events if e.busy and e.end > e.start), default=1.0)
    # Three letters for the shortest work, if there is room.
    scale = min(3 / shortest, width / (timeline.makespan or 1.0))
    begin = min((e.start for e in timeline.events), default=0.0)
    lines = [summary(timeline)]
    for rank in range(timeline.ranks):
        row = ["·" if at % 3 == 0 else " " for at in range(round(timeline.makespan * scale))]
        for event in timeline.work(rank):
            first, last = round((event.start - begin) * scale), round((event.end - begin) * scale)
            row[first:last] = label(timeline, event)[: last - first].ljust(last - first)
        lines.append(f"rank {rank:<3}{''.join(row)}  {_figures(timeline, rank)}")
    return "\n".join(lines)


def summary(timeline: Timeline) -> str:
    return f"makespan {timeline.makespan:.6g}, bubble {timeline.bubble:.1%} of the work"


def label(timeline: Timeline, event: Event) -> str:
    """`F12`: the letter of the work and its microbatch."""
    letter = _letter(event.instruction)
    if not isinstance(event.instruction, COMPUTE):
        return letter
    return f"{letter.lower() if _second(timeline, event) else letter}{event.instruction.microbatch}"


def svg(timeline: Timeline) -> str:
    """One row a rank; colours are kinds of work, and the second of a rank's stages is darker."""
    scale = WIDTH / (timeline.makespan or 1.0)
    begin = min((e.start for e in timeline.events), default=0.0)
    height = TOP + ROW * timeline.ranks + 24
    size = f'width="{LEFT + WIDTH + 170}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="4" y="18">{escape(summary(timeline))}</text>',
    ]
    for rank in range(timeline.ranks):
        y = TOP + ROW * rank
        parts.append(f'<text x="4" y="{y + 16}">rank {rank}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{ROW - 4}" fill="#eeeeee"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 8}" y="{y + 16}">{escape(_figures(timeline, rank))}</text>')
        for event in timeline.work(rank):
            x, wide = LEFT + (event.start - begin) * scale, (event.end - event.start) * scale
            parts.append(_box(timeline, event, x, y, wide))
    for at, (letter, name) in enumerate(NAMES.items()):
        x = LEFT + 100 * at
        parts.append(f'<rect x="{x}" y="{height - 20}" width="12" height="12" fill="{COLOURS[letter]}"/>')
        parts.append(f'<text x="{x + 16}" y="{height - 10}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def trace(timeline: Timeline) -> dict[str, Any]:
    """A process for each rank, with threads for its work and its communication; times are in microseconds."""
    events: list[dict[str, Any]] = []
    for rank in range(timeline.ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("work", "communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for event in timeline.events:
        events.append(
            {
                "ph": "X",
                "name": in_words(event.instruction),
                "cat": type(event.instruction).__name__,
                "pid": event.rank,
                "tid": 0 if event.busy else 1,
                "ts": event.start * 1e6,
                "dur": (event.end - event.start) * 1e6,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _box(timeline: Timeline, event: Event, x: float, y: int, wide: float) -> str:
    title = in_words(event.instruction) + f", {event.start:.6g} to {event.end:.6g} s"
    dark = ' opacity="0.7"' if _second(timeline, event) else ""
    words = label(timeline, event)
    shown = f'<text x="{x + 2:.2f}" y="{y + 15}">{words}</text>' if wide > 7 * len(words) + 2 else ""
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{ROW - 4}"'
        f' fill="{COLOURS[_letter(event.instruction)]}" stroke="white" stroke-width="0.5"{dark}/>{shown}</g>'
    )


def _letter(instruction: Instruction) -> str:
    return "O" if isinstance(instruction, Optimizer) else type(instruction).__name__[0]


def _second(timeline: Timeline, event: Event) -> bool:
    """Whether this is an odd one of the rank's stages."""
    if not isinstance(event.instruction, COMPUTE):
        return False
    return timeline.stages[event.rank].index(event.instruction.stage) % 2 == 1


def _figures(timeline: Timeline, rank: int) -> str:
    busy = sum(e.end - e.start for e in timeline.work(rank))
    idle = 1 - busy / timeline.makespan if timeline.makespan else 0.0
    return f"{timeline.peak_live[rank]:.3g} live, {idle:.0%} idle"
