"""The instruction lists of all ranks: the form that is run, proved, drawn and saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardc.ir.microbatch import checked_count
from shardc.ir.plain import listed, text_of
from shardc.schedule.instructions import (
    COMPUTE,
    STAGE_WORK,
    TRANSFER,
    Compute,
    Instruction,
    instruction_from_plain,
    instruction_to_plain,
)
from shardc.schedule.pipeline import Pipeline, pipeline_from_plain, pipeline_to_plain

SENDS_IN_FLIGHT = 8  # the most batches whose sends a rank does not wait for


def split_batches(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """The steps of a list: a run of adjacent transfers is one step, any other instruction is one by itself."""
    groups: list[list[Instruction]] = []
    open_batch = False
    for instruction in instructions:
        is_transfer = isinstance(instruction, TRANSFER)
        if is_transfer and open_batch:
            groups[-1].append(instruction)
        else:
            groups.append([instruction])
        open_batch = is_transfer
    return groups


@dataclass(frozen=True)
class RankLists:
    """One list for each coordinate on the pipeline's axis. `schedule` names the schedule that ordered the work.

    Without a pipeline there is one list for all ranks, of one instruction.
    """

    pipeline: Pipeline
    microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]
    schedule: str = ""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs. The rank holds their parameters."""
        return tuple(sorted({i.stage for i in self.ranks[rank] if isinstance(i, STAGE_WORK)}))

    def work(self, rank: int) -> list[Compute]:
        return [i for i in self.ranks[rank] if isinstance(i, COMPUTE)]

    def text(self, rank: int) -> str:
        """One line for each instruction. A bracket joins the transfers of one batch."""
        stages = ", ".join(map(str, self.stages_of(rank)))
        lines = [
            f"rank {rank} of {len(self.ranks)}: {self.schedule}, {self.microbatches} microbatches, stages {stages}"
        ]
        for batch in split_batches(self.ranks[rank]):
            brackets = ["┌", *"│" * (len(batch) - 2), "└"] if len(batch) > 1 else [" "]
            for bracket, instruction in zip(brackets, batch, strict=True):
                lines.append(f"{len(lines) - 1:>5} {bracket} {instruction}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n\n".join(self.text(rank) for rank in range(len(self.ranks)))

    def to_plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers: what JSON can hold."""
        return {
            "pipeline": pipeline_to_plain(self.pipeline),
            "microbatches": self.microbatches,
            "ranks": [[instruction_to_plain(i) for i in rank_list] for rank_list in self.ranks],
            "schedule": self.schedule,
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RankLists:
        ranks = tuple(tuple(map(instruction_from_plain, listed(rank_list))) for rank_list in listed(data["ranks"]))
        count = checked_count(data["microbatches"])
        return cls(pipeline_from_plain(data["pipeline"]), count, ranks, text_of(data["schedule"]))
