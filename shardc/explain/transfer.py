"""`explain` for what stages send each other: who reads it, which cut it crosses, and where a cut would send less.

A cut may be moved to where any other module between its neighbours begins. What would cross there is known of all such
places at once; those that promise to send less are really cut, and measured: bytes sent, and the cost of the dearest
stage, by which a cut that merely leaves the pipeline unbalanced is told from one that is better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardc.explain.collective import PHASES, SECONDS, Explanation, explain, field_lines, hardware_of
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import ShardcError, did_you_mean, error
from shardc.ir.graph import Graph, info, op_name
from shardc.ir.hardware import Hardware
from shardc.ir.program import PlanRecord, Program
from shardc.partition import rank_costs, transfer_report
from shardc.partition.balance import cut_bytes, named_starts, unit_costs
from shardc.partition.cut import cut
from shardc.partition.fused_costs import weighed_layers
from shardc.partition.prediction import whole_mesh
from shardc.partition.staged_program import StagedProgram
from shardc.partition.step_analysis import StepAnalysis, finest_analysis
from shardc.partition.transfer_report import ReportedTransfer
from shardc.passes.fusion.fuse import Fuse
from shardc.plan.schema import Plan

DEARER = 0.01  # a dearest stage that costs more than this leaves the pipeline unbalanced


@dataclass(frozen=True)
class Recut:
    """A cut that was tried: what it sends of a microbatch and what its dearest stage costs, against the present one."""

    split: tuple[str, ...]
    sent: int  # bytes; negative is less
    cost: float  # relative: 0.5 is half as much again

    def __str__(self) -> str:
        less = f"{human_bytes(abs(self.sent))} {'less' if self.sent < 0 else 'more'} is then sent of each microbatch"
        cost = f"{abs(self.cost):.0%} {'more' if self.cost > 0 else 'less'}"
        cost = f"; the dearest stage costs {cost}" if abs(self.cost) > DEARER / 2 else ""
        return f"under pipeline, write split: [{', '.join(self.split)}]\n{less}{cost}"


@dataclass(frozen=True)
class TransferExplanation:
    """Why one transfer exists. `recuts` are the cuts that send less, the best first."""

    transfer: ReportedTransfer
    axis: str
    fqn: str
    source_text: str
    why: str
    needed: str
    recuts: tuple[Recut, ...]
    tried: int
    places: int  # at which the cuts that it crosses could be instead
    inherent: str  # "" when some cut is better

    @property
    def cheapest(self) -> Recut | None:
        """The cut that sends least without leaving the pipeline unbalanced; None if there is none."""
        return next((recut for recut in self.recuts if recut.cost <= DEARER), None)

    def __str__(self) -> str:
        t = self.transfer
        often = f", {t.times} times a step" if t.times > 1 else ""
        route = f"send over {self.axis} from stage {t.origin} to stage {t.target}"
        lines = [f"%{t.name}: {route}, {PHASES[t.phase]}, {human_bytes(t.bytes_per_rank)} sent by a rank{often}"]
        location = ", ".join(filter(None, (t.source, self.fqn and f"in {self.fqn}")))
        lines += [f"  --> {location}"] if location else []
        lines += [f"   | {self.source_text.strip()}"] if self.source_text else []
        lines += field_lines("why", self.why)
        lines += field_lines("needed", self.needed)
        lines += field_lines("cause", t.cause)
        lines += field_lines("inherent", self.inherent)
        if self.cheapest is not None:
            lines += field_lines("change", str(self.cheapest))
        elif self.recuts:
            lines += field_lines("give up", str(self.recuts[0]))
        tried = f"{self.places} other places to cut; "
        if self.tried:
            tried += f"the {self.tried} that promise to send less were cut, and {len(self.recuts)} do"
        else:
            tried += "none promises to send less"
        return "\n".join([*lines, *field_lines("tried", tried)])


def cause_of(plan: PlanRecord) -> str:
    """The words of a program's plan that say where it is cut."""
    pipeline = Plan.parse(plan.get("text", "")).pipeline
    suffix = f"   ({cut_at})" if (cut_at := plan.get("cut")) else ""
    if split := pipeline.split if pipeline else ():
        return f"split: {', '.join(split)}{suffix}"
    return f"no split: the cut is the most balanced one{suffix}"


def explain_step(program: Program, staged: StagedProgram, value: str | int) -> Explanation | TransferExplanation:
    """Explain a collective along the other axes or a transfer, by its name or its number: transfers come last."""
    known, collectives = transfer_report.report_transfers(staged, cause_of(program.plan)), program.collectives()
    if not known:
        return explain(program, value)
    name = str(value).removeprefix("%")
    if name.isdecimal():
        position = int(name) - len(collectives)
        if position >= len(known):
            message = f"there is no communication {name}: the program has {len(collectives) + len(known)}"
            hint = "they are numbered from 0: collectives in the order of the program, then transfers"
            raise error("SC106", message, hint=hint)
        transfer = known[position] if position >= 0 else None
    else:
        transfer = next((report for report in known if report.name == name), None)
        names = [*(collective.value for collective in collectives), *(report.name for report in known)]
        if transfer is None and name not in names and not name.startswith("-"):
            message = f"'{name}' is no collective or transfer of the program"
            raise error("SC106", message, hint=did_you_mean(name, names, "collectives and transfers"))
    if transfer is not None:
        return _explained(program, staged, transfer)
    explanation = explain(program, value)
    stages = rank_costs.stages_with_value(staged, explanation.collective.value)
    stages_text = ", ".join(map(str, stages)) or "the end of the step"
    return replace(explanation, stages=f"{stages_text}; what changes would send and save is of all stages together")


def _explained(program: Program, pipelined: StagedProgram, transfer: ReportedTransfer) -> TransferExplanation:
    about = info(program.body.by_name(transfer.value))
    coordinates = transfer_report.stage_coordinates(pipelined)
    reader = next(_readers(pipelined, transfer), None)
    consumer = "a result of it" if reader is None else f"%{info(reader).name} ({op_name(reader.target)})"
    why = f"stage {transfer.origin} makes it, on ranks with {pipelined.axis}={coordinates[transfer.origin]}"
    ranks = f"ranks with {pipelined.axis}={coordinates[transfer.target]}"
    needed = f"{consumer} of stage {transfer.target} reads it, on {ranks}"
    search = _Search.of(program, pipelined)
    places = search.places(transfer.cuts)
    recuts, tried = search.try_those_that_send_less(places, coordinates)
    inherent = ""
    if not any(recut.cost <= DEARER for recut in recuts):
        what = "sends less and leaves the stages as balanced" if recuts else "sends less"
        inherent = f"no other module between the cuts beside, to begin the stage, {what}"
    return TransferExplanation(
        transfer, pipelined.axis, about.fqn, about.source_text, why, needed, recuts, tried, len(places), inherent
    )


def _readers(pipelined: StagedProgram, transfer: ReportedTransfer) -> Iterator[Any]:
    """Calls of the target that read the value, forward first."""
    stage = pipelined.stages[transfer.target]
    for graph in (stage.parts[name] for name in ("forward", "backward") if name in stage.parts):
        for port, node in zip(graph.inputs, graph.placeholders, strict=True):
            if port.role == "value" and port.name == transfer.value:
                yield from (user for user in node.users if user.op == "call_function")


@dataclass(frozen=True)
class _Search:
    """The units that a step may be cut between, and where it is."""

    body: Graph
    analysis: StepAnalysis
    starts: tuple[int, ...]
    costs: Sequence[float]
    crossing: Sequence[int]
    now: int
    hardware: Hardware

    @classmethod
    def of(cls, program: Program, pipelined: StagedProgram) -> _Search:
        analysis = finest_analysis(program.body)
        starts = _starts(analysis, pipelined)
        bytes_now = transfer_report.crossing_bytes(
            pipelined.lists.pipeline, transfer_report.stage_coordinates(pipelined)
        )
        hardware = hardware_of(program)
        count, mesh = len(pipelined.stages), whole_mesh(pipelined)
        _, costs = weighed_layers(program.body, count, _fuse_of(program), hardware, mesh)
        of_units = unit_costs(analysis, hardware, mesh, costs)
        return cls(program.body, analysis, starts, of_units, cut_bytes(analysis), bytes_now, hardware)

    def places(self, cuts: range) -> list[tuple[int, ...]]:
        """The other starts of stages that moving one of these cuts would give, what sends least first."""
        ends = (*self.starts, len(self.analysis.units))
        alternatives = [
            (*self.starts[:cut], unit, *self.starts[cut + 1 :])
            for cut in cuts
            for unit in range(ends[cut - 1] + 1, ends[cut + 1])
            if unit != self.starts[cut]
        ]
        return sorted(alternatives, key=self._crossing)

    def _crossing(self, starts: Sequence[int]) -> int:
        return sum(self.crossing[unit] for unit in starts[1:])

    def try_those_that_send_less(
        self, places: Sequence[tuple[int, ...]], coordinates: Mapping[int, int]
    ) -> tuple[tuple[Recut, ...], int]:
        recuts: list[Recut] = []
        deadline, tried = time.monotonic() + SECONDS, 0
        for starts in places:
            if self._crossing(starts) >= self._crossing(self.starts) or (tried and time.monotonic() > deadline):
                break
            split = tuple(self.analysis.units[unit].name for unit in starts[1:])
            try:
                if named_starts(self.analysis, split) != starts:
                    continue  # a module that runs twice is cut at where it first does
                tried += 1
                recut = cut(self.body, None, split, self.hardware)
                saved = transfer_report.crossing_bytes(recut.pipeline, coordinates) - self.now
            except ShardcError:
                continue  # nobody asked for this cut
            if saved < 0:
                recuts.append(Recut(split, saved, self._dearest(starts) / self._dearest(self.starts) - 1))
        return tuple(sorted(recuts, key=lambda recut: (recut.cost > DEARER, recut.sent, recut.cost))), tried

    def _dearest(self, starts: Sequence[int]) -> float:
        ends = (*starts[1:], len(self.costs))
        return max(sum(self.costs[a:b]) for a, b in zip(starts, ends, strict=True))


def _fuse_of(program: Program) -> Fuse:
    """How the program's stages are fused."""
    fuse = Plan.parse(program.plan.get("text", "")).fuse
    return Fuse(bool(fuse.enabled), fuse.left, fuse.templates, hardware_of(program))


def _starts(analysis: StepAnalysis, pipelined: StagedProgram) -> tuple[int, ...]:
    """The first unit of each stage: where its calls are. Of what became a kernel only some still have their names."""
    stages = enumerate(pipelined.stages)
    nodes = ((index, node) for index, stage in stages for node in stage.forward.fx.nodes)
    stage_of = {info(node).name: index for index, node in nodes if node.op == "call_function"}
    unit_stages = [
        {stage_of[info(call).name] for call in unit.calls if info(call).name in stage_of} for unit in analysis.units
    ]
    starts = [0]
    for stage in range(1, len(pipelined.stages)):
        starts.append(next(index for index in range(starts[-1] + 1, len(unit_stages)) if stage in unit_stages[index]))
    return tuple(starts)
