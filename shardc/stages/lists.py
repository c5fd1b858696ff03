"""The instruction lists of all ranks of a pipeline: what is run, proved, drawn and saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardc.ir.microbatch import checked_count
from shardc.ir.plain import listed, text_of
from shardc.stages.instructions import (
    COMPUTE,
    TRANSFER,
    Compute,
    Instruction,
    instruction_from_plain,
    instruction_to_plain,
)
from shardc.stages.pipeline import Pipeline, pipeline_from_plain, pipeline_to_plain


def batches(instructions: Iterable[Instruction]) -> list[list[Instruction]]:
    """The steps of a list: a run of adjacent transfers is one step, any other instruction is one by itself."""
    found: list[list[Instruction]] = []
    open_batch = False
    for instruction in instructions:
        transfer = isinstance(instruction, TRANSFER)
        if transfer and open_batch:
            found[-1].append(instruction)
        else:
            found.append([instruction])
        open_batch = transfer
    return found


@dataclass(frozen=True)
class RankLists:
    """One list for each coordinate on the pipeline's axis. `schedule` is the name that they were made by."""

    pipeline: Pipeline
    microbatches: int
    ranks: tuple[tuple[Instruction, ...], ...]
    schedule: str = ""

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, and so whose parameters it holds."""
        return tuple(sorted({work.stage for work in self.work(rank)}))

    def work(self, rank: int) -> list[Compute]:
        return [i for i in self.ranks[rank] if isinstance(i, COMPUTE)]

    def text(self, rank: int) -> str:
        """One line an instruction; those that belong to one batch are joined by a bracket."""
        stages = ", ".join(map(str, self.stages_of(rank)))
        lines = [
            f"rank {rank} of {len(self.ranks)}: {self.schedule}, {self.microbatches} microbatches, stages {stages}"
        ]
        for batch in batches(self.ranks[rank]):
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
            "ranks": [[instruction_to_plain(i) for i in own] for own in self.ranks],
            "schedule": self.schedule,
        }

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> RankLists:
        ranks = tuple(tuple(map(instruction_from_plain, listed(own))) for own in listed(data["ranks"]))
        count = checked_count(data["microbatches"])
        return cls(pipeline_from_plain(data["pipeline"]), count, ranks, text_of(data["schedule"]))
