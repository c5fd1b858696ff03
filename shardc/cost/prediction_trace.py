"""A prediction as trace events, for ui.perfetto.dev and chrome://tracing: a process for each coordinate of a pipeline,
and in it a track for each stream: compute, each process group, transfers between stages.

Times are in microseconds. A call that runs in several microbatches has an event each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardc.cost.call_seconds import COMPUTE
from shardc.cost.streams import Span, Timed
from shardc.schedule.instructions import Instruction, instruction_text
from shardc.schedule.timeline import Timeline

INSTRUCTIONS, COMPUTE_TRACK = "instructions", "compute"


def body_trace(timed: Timed, ranks: int) -> dict[str, Any]:
    """Of a step without a pipeline: all ranks run it alike."""
    tracks = _Tracks()
    tracks.process(0, f"each of {ranks} ranks")
    tracks.add_spans(0, timed.spans, 0.0)
    return tracks.trace()


def pipeline_trace(
    timeline: Timeline, ranks: Sequence[Sequence[int]], of: Mapping[tuple[int, Instruction], Sequence[Timed]]
) -> dict[str, Any]:
    """`ranks` are those of each coordinate; `of` are the graphs that an instruction runs there, one after another."""
    tracks = _Tracks()
    for c, members in enumerate(ranks):
        tracks.process(c, f"coordinate {c}: ranks {', '.join(map(str, members[:4]))}{', ...' * (len(members) > 4)}")
    for event in timeline.events:
        timed = of.get((event.rank, event.instruction), ())
        name = instruction_text(event.instruction)
        track = INSTRUCTIONS if event.busy or timed else type(event.instruction).__name__
        tracks.add(event.rank, track, name, type(event.instruction).__name__, event.start, event.end)
        start = event.start
        for graph in timed:
            tracks.add_spans(event.rank, graph.spans, start)
            start += graph.seconds
    return tracks.trace()


class _Tracks:
    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._tracks: dict[tuple[int, str], int] = {}

    def process(self, pid: int, name: str) -> None:
        self._events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})

    def _track(self, pid: int, name: str) -> int:
        known = self._tracks.get((pid, name))
        if known is None:
            known = self._tracks[pid, name] = len(self._tracks)
            args = {"name": name}
            self._events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": known, "args": args})
        return known

    def add(self, pid: int, track: str, name: str, kind: str, start: float, end: float, **args: Any) -> None:
        event = {"ph": "X", "name": name, "cat": kind, "pid": pid, "tid": self._track(pid, track)}
        self._events.append({**event, "ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})

    def add_spans(self, pid: int, spans: Sequence[Span], offset: float) -> None:
        for span in spans:
            track = COMPUTE_TRACK if span.stream == COMPUTE else f"collectives over {span.stream}"
            more = {"phase": span.phase} | ({"microbatch": span.microbatch} if span.microbatch >= 0 else {})
            self.add(pid, track, span.name, span.kind, offset + span.start, offset + span.end, **more)

    def trace(self) -> dict[str, Any]:
        return {"traceEvents": self._events, "displayTimeUnit": "ms"}
