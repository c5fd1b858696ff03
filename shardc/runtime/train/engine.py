"""Who runs a trainer's steps: all ranks simulated in this process, or this rank of a running job.

A trainer is the same over either. `Engines` are the two of one program; a program that is more than one body, such as a
pipeline, brings its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port
from shardc.ir.mesh import Mesh
from shardc.ir.text import print_graph
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.oracle.simulate import simulate
from shardc.runtime.train.job import Job
from shardc.runtime.train.nonfinite import probe
from shardc.runtime.train.rank_session import Keeping, Whole
from shardc.runtime.train.replicas import Peers


class Engine(Protocol):
    """`Simulation` below, or a `Job`. A `held` tensor is whole in the one, a shard in the other."""

    rank: int
    device: torch.device

    @property
    def peers(self) -> Peers | None:
        """The other ranks of the job; None in simulation."""
        ...

    @property
    def shards(self) -> Keeping:
        """How tensors become what is held, and whole again."""
        ...

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, a buffer or state: a stage of a pipeline has its own alone."""
        ...

    def fetch(self, name: str, held: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        """The same on every rank, of a parameter, a buffer or state, or of a parameter's gradient; all must call it."""
        ...

    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]: ...

    def nonfinite(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        """The parameters whose gradients are not finite in a step that changed nothing."""
        ...

    def checkpoints(self) -> Checkpoints: ...

    def timed(self, act: Callable[[], object]) -> Any:
        """Do something that makes one step; when each rank did what."""
        ...

    def close(self, failure: BaseException | None = None) -> None: ...


class Engines(Protocol):
    """`body` is the step that both make, by its inputs and outputs."""

    @property
    def body(self) -> Graph: ...
    def simulation(self) -> Engine: ...

    def job(self, timeout: float, device: str | None, facts: Mapping[str, str]) -> Engine:
        """`facts` are what all ranks must have in common; what is run is added to them."""
        ...


@dataclass(frozen=True)
class OneBody:
    """The engines of a program that is one body for all ranks."""

    body: Graph

    def simulation(self) -> Engine:
        return Simulation(self.body)

    def job(self, timeout: float, device: str | None, facts: Mapping[str, str]) -> Engine:
        text = print_graph(self.body, comments=False)
        return Job(self.body, timeout, device, {**facts, "program": text})


class Simulation:
    """All ranks here, in lock-step. `run` is how, given what is held and what each microbatch is fed."""

    def __init__(
        self,
        body: Graph,
        run: Callable[[Mapping[str, torch.Tensor], Sequence[Feed]], dict[Port, torch.Tensor]] | None = None,
    ) -> None:
        self.body, self.rank, self.device, self.shards = body, 0, torch.device("cpu"), Whole()
        self.peers = None
        self._run = run or (lambda held, fed: simulate(body, held, fed=fed))

    def holds(self, name: str) -> bool:
        return True

    def fetch(self, name: str, held: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        assert held is not None
        return held

    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        return self._run(held, fed)

    def nonfinite(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        found = simulate(probe(self.body), held, fed=fed)
        return [port.name for port, value in found.items() if not value.isfinite().all()]

    def checkpoints(self) -> Checkpoints:
        return Checkpoints(Mesh(), 0)

    def timed(self, act: Callable[[], object]) -> Any:
        hint = "`program.timeline()` predicts one; to measure it, run a pipeline under torchrun"
        raise error("SC510", "a simulated step has no timeline: all ranks share a process", hint=hint)

    def close(self, failure: BaseException | None = None) -> None:
        pass
