"""Where a rank is in its instruction list, as one number: what the monitor keeps, and what an error calls it.

    place = instruction * STRIDE + call           0 for the instruction itself, from 1 on the calls of its graph
    Recv x3#5 <- 3 (rank 6)                       a transfer, with the rank of the job that the peer is here
    %h.2.mlp.mm (model.py:17) of Forward 2 #5     a call: module, line, stage and microbatch

Ranks run different lists, so a number means something only with the rank that gives it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardc.ir.graph import Graph
from shardc.runtime.instructions import cited
from shardc.stages.instructions import (
    COLLECTIVE,
    COMPUTE,
    TRANSFER,
    Gather,
    Instruction,
    Optimizer,
    ReduceGrads,
    in_words,
)
from shardc.stages.pipeline import PART_OF
from shardc.stages.program import Pipelined

STRIDE = 1 << 20


@dataclass(frozen=True)
class ListPlaces:
    """The places of all ranks of a pipeline. Past the end of its list a rank passes on what others lack: the loss."""

    program: Pipelined

    def name(self, rank: int, at: int) -> str:
        c, i = self.program.coordinates(rank)
        listed, (index, call) = self.program.lists.ranks[c], divmod(at, STRIDE)
        if index >= len(listed):
            return "the loss, passed on to all stages"
        instruction = listed[index]
        if isinstance(instruction, TRANSFER):
            words = in_words(instruction).partition(",")[0]
            return f"{words} (rank {self.program.rank_of(instruction.peer, i)})"
        if not call:
            return in_words(instruction)
        names = [cited(node) for graph in graphs_of(self.program, c, instruction) for node in graph.calls()]
        return f"{names[call - 1]} of {in_words(instruction)}"

    def waits(self, rank: int, at: int) -> bool:
        listed = self.program.lists.ranks[self.program.coordinates(rank)[0]]
        index, call = divmod(at, STRIDE)
        return index >= len(listed) or (not call and isinstance(listed[index], (*TRANSFER, *COLLECTIVE)))


def graphs_of(program: Pipelined, c: int, instruction: Instruction) -> list[Graph]:
    """The graphs that an instruction runs on a coordinate of the pipeline's axis, in order."""
    if isinstance(instruction, Gather):
        return [program.stages[instruction.stage].gathers[name] for name in instruction.values]
    if isinstance(instruction, COMPUTE):
        return [program.stages[instruction.stage][PART_OF[type(instruction)]]]
    if isinstance(instruction, ReduceGrads):
        stage, *others = program.lists.pipeline.accumulators[instruction.value]
        reduce = None if others or instruction.value in program.shared else program.stages[stage].reduce
        return [] if reduce is None else [reduce]
    if isinstance(instruction, Optimizer):
        finish = program.finishes[c]
        return [finish.norm, finish.update]
    return []
