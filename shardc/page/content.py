"""What a page shows of a program, as plain data: text that is folded by layers, and a few facts for each line of it.

    graphs     sections of folded lines: {"layers": "h.1 to 31", "count": 31, "lines": [...]}
    values     by name, of what the shown lines define: source line, module, phase, cause
    edges      by name, the collectives among them: axes, bytes, times, cause, and why each is needed
    passes     the graph after each pass, folded, as the lines that differ from the pass before
    memory     bytes of the fullest rank over a step, by action; the categories and the largest values at the peak
    ranks      coordinate, groups and stages of each rank; parameters with their local shapes

Only lines that are shown have facts: a page of 32 equal layers is as large as one of three.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardc.explain.collective import trails_of
from shardc.explain.provenance import Trail
from shardc.ir.collectives import Collective, collective
from shardc.ir.fold import Between, Line, described, fold
from shardc.ir.graph import Graph, info, results, type_of
from shardc.ir.layers import layer_of
from shardc.ir.program import Program
from shardc.ir.text import sections, value_name
from shardc.partition import rank_costs
from shardc.partition.memory import memory
from shardc.partition.staged_program import StagedProgram
from shardc.partition.transfer_report import report_transfers
from shardc.passes.base import Pass
from shardc.schedule.instructions import instruction_text
from shardc.schedule.replay import replay

RANKS = 64  # shown with their lists; a job of more has more of the same
MOST_VALUES = 40  # of the largest at the peak
CONTEXT = 1  # lines around a difference

Segment = dict[str, Any]


@dataclass
class PassRecorder:
    """Keeps the folded text of the graph after each pass; give `watch` to `shardc.compile`."""

    texts: list[tuple[str, str, list[str]]] = field(default_factory=list[tuple[str, str, list[str]]])

    def watch(self, pass_: Pass, graph: Graph, _: float) -> None:
        lines: list[str] = []
        for segment in segments(graph, comments=False):
            if segment["count"] > 1:
                lines.append(f"  # x {segment['count']} layers: {segment['layers']}")
            lines += segment["lines"]
        self.texts.append((pass_.name, graph.name, lines))


def content(program: Program, staged: StagedProgram, passes: PassRecorder | None) -> dict[str, Any]:
    """All that the page knows."""
    graphs = {} if staged.axis else {"the step": program.body}
    graphs |= rank_costs.graphs_by_name(staged) if staged.axis else {}
    shown = {name: list(segments(graph)) for name, graph in graphs.items()}
    values = {name: _values(graph, shown[name]) for name, graph in graphs.items()}
    numbers = {c.value: number for number, c in enumerate(program.collectives())}
    edges = {name: _edges(graph, values[name], numbers) for name, graph in graphs.items()}
    why = _reasons(program, [name for found in edges.values() for name in found])
    for found in edges.values():
        for name, edge in found.items():
            edge["why"] = why.get(name, [])
    return {
        "mesh": {axis: program.mesh.size((axis,)) for axis in program.mesh.names},
        "world": program.mesh.world_size,
        "pipeline": staged.axis,
        "graphs": [
            {"name": name, "segments": shown[name], "values": values[name], "edges": edges[name]} for name in graphs
        ],
        "totals": _totals(program.collectives()),
        "transfers": [
            {"value": t.value, "sender": t.origin, "receiver": t.target, "bytes": t.bytes_per_rank, "source": t.source}
            for t in report_transfers(staged)
        ],
        "diagnostics": [str(d) for d in program.diagnostics],
        "passes": [] if passes is None else _differences(passes),
        "memory": _memory(staged),
        "timeline": _timeline(staged),
        "parameters": _parameters(program),
        "ranks": [_rank(staged, number) for number in range(min(program.mesh.world_size, RANKS))],
    }


# ------------------------------------------------------------------ graphs
def segments(graph: Graph, *, comments: bool = False) -> Iterator[Segment]:
    """The graph's text in parts: what is of one layer, or of equal ones, and what lies between."""
    between: Between = {}
    for lines in sections(graph, comments):
        for part in fold(lines, between):
            shown = lines[part.start : part.stop]
            yield {
                "layer": _layer(shown),
                "layers": described(part.layers) if len(part.layers) > 1 else _layer(shown),
                "count": max(len(part.layers), 1),
                "lines": [line.text for line in shown],
            }


def _layer(lines: Sequence[Line]) -> str:
    return next((line.layer for line in lines if line.layer), "")


def _values(graph: Graph, shown: Sequence[Segment]) -> dict[str, Any]:
    """By name, with its %, facts of each value that a shown line defines."""
    defined = {
        name.strip().removesuffix(",")
        for segment in shown
        for line in segment["lines"]
        for name in line.partition(" = ")[0].split(", ")
    }
    found: dict[str, Any] = {}
    for node in graph.fx.nodes:
        for value in [node] if node.op == "placeholder" else [] if node.op == "output" else results(node):
            if value is None or info(value).type is None or value_name(value) not in defined:
                continue
            about = info(node)
            found[value_name(value)] = {
                "type": str(type_of(value)),
                "local": list(type_of(value).local_shape(graph.mesh)),
                "bytes": type_of(value).local_bytes(graph.mesh),
                "fqn": about.fqn,
                "source": about.source,
                "text": about.source_text.strip(),
                "phase": about.phase,
                "cause": str(about.cause) if about.cause else "",
            }
    return found


def _edges(graph: Graph, values: Mapping[str, Any], numbers: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for node in graph.calls():
        moved = collective(graph, node)
        if moved is not None and f"%{moved.value}" in values:
            found[f"%{moved.value}"] = {
                "kind": moved.kind + (f" ({moved.op})" if moved.op else ""),
                "axes": list(moved.axes),
                "bytes": moved.bytes_per_rank,
                "payload": moved.payload_bytes,
                "ranks": moved.group_size,
                "times": moved.times,
                "cause": moved.cause,
                "number": numbers.get(moved.value, -1),
            }
    return found


def _reasons(program: Program, names: Sequence[str]) -> dict[str, list[dict[str, str]]]:
    """Why each collective is there, as `explain` says it, without the changes that it would try."""
    found = trails_of(program, [name.removeprefix("%") for name in dict.fromkeys(names)])
    return {f"%{name}": [_reason(trail) for trail in trails] for name, trails in found.items()}


def _reason(trail: Trail) -> dict[str, str]:
    cause = trail.cause or ("the plan's storage" if trail.stored else "no annotation: an op asked for it")
    return {"axis": trail.axis, "why": trail.why, "needed": trail.needed, "cause": cause}


def _totals(collectives: Sequence[Collective]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str, str], list[int]] = {}
    for c in collectives:
        row = rows.setdefault((c.phase, ".".join(c.axes), c.kind + (f" ({c.op})" if c.op else "")), [0, 0])
        row[0] += c.times
        row[1] += c.bytes_per_step
    return [
        {"phase": phase, "axes": axes, "kind": kind, "count": count, "bytes": size}
        for (phase, axes, kind), (count, size) in rows.items()
    ]


# ------------------------------------------------------------------ passes
def _differences(passes: PassRecorder) -> list[dict[str, Any]]:
    """Each pass with what it changed; of the first pass over a graph, the whole graph."""
    before: dict[str, list[str]] = {}
    found: list[dict[str, Any]] = []
    for name, graph, after in passes.texts:
        if graph in before:
            lines = list(difflib.unified_diff(before[graph], after, n=CONTEXT, lineterm=""))[2:]
        else:
            lines = [f" {line}" for line in after]
        before[graph] = after
        added, gone = (sum(line.startswith(sign) for line in lines) for sign in "+-")
        found.append({"name": name, "graph": graph, "lines": lines, "added": added, "removed": gone})
    return found


# ------------------------------------------------------------------ memory, timeline, ranks
def _memory(staged: StagedProgram) -> dict[str, Any]:
    report = memory(staged)
    rank = report.fullest.ranks[0]
    return {
        "stored": report.fullest.report.stored,
        "peak": report.peak,
        "rank": rank,
        "at": str(report.peak_at or ""),
        "steps": list(report.timeline),
        "rows": [[row.category, row.stored, row.bytes] for row in report.of_rank(rank)],
        "largest": [[v.name, v.category, str(v.type), v.source, v.bytes] for v in report.top(MOST_VALUES)],
    }


def _timeline(staged: StagedProgram) -> dict[str, Any] | None:
    """Of a pipeline, when each rank along it would do what. Times are FLOPs of a rank: no clock has run."""
    if not staged.axis:
        return None
    timeline = replay(staged.lists, staged.costs)
    works = [
        [
            {"what": instruction_text(e.instruction).split("(")[0].strip(), "start": e.start, "end": e.end}
            | {"stage": e.instruction.stage, "microbatch": e.instruction.microbatch}  # pyright: ignore[reportAttributeAccessIssue]
            for e in timeline.work(rank)
        ]
        for rank in range(timeline.ranks)
    ]
    return {"makespan": timeline.makespan, "bubble": timeline.bubble, "unit": "FLOPs of a rank", "works": works}


def _parameters(program: Program) -> list[dict[str, Any]]:
    """Parameters and buffers, equal layers once."""
    ports = [
        (port, type_of(value))
        for port, value in zip(program.body.inputs, program.body.placeholders, strict=True)
        if port.role in ("param", "buffer", "input")
    ]
    mesh = program.body.mesh
    lines = [Line(f"  %{p.name} = {p.role} : {t}", layer_of(p.name)) for p, t in ports]
    found: list[dict[str, Any]] = []
    for part in fold(lines):
        for port, type_ in ports[part.start : part.stop]:
            layers = described(part.layers) if len(part.layers) > 1 else ""
            found.append(
                {"name": port.name, "role": port.role, "type": str(type_), "layers": layers}
                | {"local": list(type_.local_shape(mesh)), "bytes": type_.local_bytes(mesh)}
            )
    return found


def _rank(staged: StagedProgram, number: int) -> dict[str, Any]:
    mesh = staged.mesh
    coordinate = mesh.coordinate(number)
    c = staged.coordinates(number)[0]
    groups = {
        axis: [r for r in range(mesh.world_size) if _differs_only(mesh.coordinate(r), coordinate, axis)]
        for axis in mesh.names
    }
    return {
        "number": number,
        "coordinate": coordinate,
        "groups": groups,
        "stages": list(staged.lists.stages_of(c)),
        "list": [instruction_text(i) for i in staged.lists.ranks[c]],
    }


def _differs_only(a: Mapping[str, int], b: Mapping[str, int], axis: str) -> bool:
    return all(a[name] == b[name] for name in a if name != axis)
