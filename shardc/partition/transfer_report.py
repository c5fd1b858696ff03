"""Reports the transfers between stages: value, source and target stage, bytes, and cause.

A value is sent once a microbatch to each coordinate of the pipeline's axis that has a stage which reads it. Stages of
one coordinate share values in memory. The transfers therefore depend on the cut and on which stages share a
coordinate, and not on the order of work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardc.ir.graph import Phase, info
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import Send
from shardc.schedule.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class ReportedTransfer:
    """One value that is sent to one coordinate. `target` is the coordinate's first stage that reads it."""

    value: str
    origin: int  # stages
    target: int
    bytes_per_rank: int  # sent by one rank, of one microbatch
    phase: Phase
    cause: str
    source: str
    times: int  # transfers in a step: one for each microbatch

    @property
    def name(self) -> str:
        return f"{self.value}.send{self.target}"

    @property
    def bytes_per_step(self) -> int:
        """Bytes sent by one rank of its stage in a step."""
        return self.bytes_per_rank * self.times

    @property
    def cuts(self) -> range:
        """The cuts that the value crosses, each named by the stage that begins there."""
        return range(min(self.origin, self.target) + 1, max(self.origin, self.target) + 1)


def report_transfers(program: StagedProgram, cause: str = "") -> list[ReportedTransfer]:
    """Every transfer of a microbatch, in the order of the lists."""
    lists, nodes = program.lists, {info(node).name: node for node in program.body.fx.nodes if node.op != "output"}
    report: list[ReportedTransfer] = []
    for c, instructions in enumerate(lists.ranks):
        for i in instructions:
            if not isinstance(i, Send) or i.microbatch != 0:
                continue
            origin, peer_stages = lists.pipeline.producers[i.value], lists.stages_of(i.peer)
            target = next(stage for stage in peer_stages if i.value in stage_reads(lists.pipeline, stage))
            assert origin in lists.stages_of(c), f"{i.value} is sent by rank {c}, which does not make it"
            value_info = info(nodes[program.members(i.value)[0]])
            report.append(
                ReportedTransfer(
                    i.value, origin, target, i.bytes, value_info.phase, cause, value_info.source, lists.microbatches
                )
            )
    return report


def stage_reads(pipeline: Pipeline, stage: int) -> set[str]:
    """All values that a stage's parts read."""
    parts = pipeline.stages[stage]
    return {name for part in (parts.forward, parts.dgrad, parts.wgrad) for name in part.reads}


def stage_coordinates(program: StagedProgram) -> dict[int, int]:
    """The coordinate of each stage."""
    return {stage: c for c in range(len(program.lists.ranks)) for stage in program.lists.stages_of(c)}


def crossing_bytes(pipeline: Pipeline, coordinate_of: Mapping[int, int]) -> int:
    """Bytes of one microbatch that cross between coordinates: the total over all of them, by one rank of each."""
    crossing: set[tuple[str, int]] = set()
    for stage in range(len(pipeline.stages)):
        for name in stage_reads(pipeline, stage):
            producer = pipeline.producers.get(name)
            if producer is not None and coordinate_of[producer] != coordinate_of[stage]:
                crossing.add((name, coordinate_of[stage]))
    return sum(pipeline.bytes[name] for name, _ in crossing)
