"""The program counter of a rank's instruction list, one number that the monitor keeps, and its text in errors.

    counter = instruction * STRIDE + call         call 0 is the instruction itself; its graph's calls count from 1
    Recv x3#5 <- 3 (rank 6)                       a transfer, with the job's rank of the peer
    %h.2.mlp.mm (model.py:17) of Forward 2 #5     a call: module, line, stage and microbatch

Ranks run different lists, so a counter has a meaning only together with its rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.graph import Graph, cited
from shardc.ir.microbatch import calls_as_run
from shardc.partition.staged_program import StagedProgram
from shardc.schedule.instructions import (
    COLLECTIVE,
    STAGE_WORK,
    TRANSFER,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    RunBody,
    instruction_text,
)
from shardc.schedule.pipeline import PART_OF

STRIDE = 1 << 20


@dataclass(frozen=True)
class ListCounterNames:
    """Names the counters of all ranks. After the end of its list a rank of a pipeline broadcasts the loss."""

    program: StagedProgram

    def name(self, rank: int, counter: int) -> str:
        c, i = self.program.coordinates(rank)
        instructions, (index, call) = self.program.lists.ranks[c], divmod(counter, STRIDE)
        if index >= len(instructions):
            return "the loss, passed on to all stages"
        instruction = instructions[index]
        if isinstance(instruction, TRANSFER):
            words = instruction_text(instruction).partition(",")[0]
            return f"{words} (rank {self.program.rank_of(instruction.peer, i)})"
        names = [cited(node) for graph in graphs_of(self.program, c, instruction) for node in calls_as_run(graph)]
        if isinstance(instruction, RunBody):  # the whole list: only its calls tell where a rank is
            return names[max(call - 1, 0)] if names else instruction_text(instruction)
        return f"{names[call - 1]} of {instruction_text(instruction)}" if call else instruction_text(instruction)

    def waits(self, rank: int, counter: int) -> bool:
        instructions = self.program.lists.ranks[self.program.coordinates(rank)[0]]
        index, call = divmod(counter, STRIDE)
        return index >= len(instructions) or (not call and isinstance(instructions[index], (*TRANSFER, *COLLECTIVE)))


def runner_of(instruction: Instruction) -> str:
    """Which instruction of a list runs a call, the same for all microbatches: `Forward 2`; "" for a body's."""
    if isinstance(instruction, RunBody):
        return ""
    words = instruction_text(instruction).partition(",")[0].partition("#")[0].split()
    return " ".join(words[:2] if isinstance(instruction, (*STAGE_WORK, ReduceGrads, *TRANSFER)) else words[:1])


def graphs_of(program: StagedProgram, c: int, instruction: Instruction) -> list[Graph]:
    """The graphs that an instruction runs on a coordinate of the pipeline's axis, in order."""
    if isinstance(instruction, Gather):
        return [program.stages[instruction.stage].gathers[name] for name in instruction.values]
    if isinstance(instruction, STAGE_WORK):
        return [program.stages[instruction.stage][PART_OF[type(instruction)]]]
    if isinstance(instruction, ReduceGrads):
        stage, *others = program.lists.pipeline.accumulators[instruction.value]
        reduce = None if others or instruction.value in program.shared else program.stages[stage].reduce
        return [] if reduce is None else [reduce]
    if isinstance(instruction, Optimizer):
        epilogue = program.epilogues[c]
        return [epilogue.norm, epilogue.update]
    return []
