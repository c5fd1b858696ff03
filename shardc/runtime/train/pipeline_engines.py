"""The engines of a pipelined program: all ranks' lists simulated in this process, or this rank's in a running job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardc.ir.graph import Graph, Port
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.runtime.train.engine import Engine, Simulation
from shardc.runtime.train.pipeline_job import PipelineJob


@dataclass(frozen=True)
class PipelineEngines:
    """What `runtime.train.trainer.launch` makes a trainer's engine with."""

    program: StagedProgram

    @property
    def body(self) -> Graph:
        return self.program.body

    def simulation(self) -> Engine:
        def run(held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> dict[Port, torch.Tensor]:
            return simulate_stages(self.program, held, fed=fed)

        return Simulation(self.body, run)

    def job(self, timeout: float, device: str | None, facts: Mapping[str, str]) -> Engine:
        texts = [self.program.text(c, comments=False) for c in range(len(self.program.lists.ranks))]
        return PipelineJob(self.program, timeout, device, {**facts, "program": "\n".join(texts)})
