"""Who runs a trainer's steps: all ranks simulated in this process, or this rank of a running job.

A trainer is the same over either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardc.cost.profile import Profile
from shardc.ir.diagnostic import error
from shardc.ir.graph import Port
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.partition.staged_program import StagedProgram
from shardc.runtime.execute.data_parts import DataParts
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.step_graph import Graphs
from shardc.runtime.oracle.simulate import simulate
from shardc.runtime.oracle.simulate_stages import simulate_stages
from shardc.runtime.train.consensus import Consensus
from shardc.runtime.train.job import Job
from shardc.runtime.train.nonfinite import probe
from shardc.runtime.train.rank_part import RankPart
from shardc.runtime.train.rank_session import Keeping, Whole
from shardc.runtime.train.replicas import Peers

if TYPE_CHECKING:
    from shardc.runtime.checkpoint.checkpoint import Checkpoints


class Engine(Protocol):
    """`Simulation` below, or a `Job`. A `held` tensor is whole in the one, a shard in the other."""

    rank: int
    device: torch.device
    homes: Mapping[str, Sequence[int]]  # by parameter, buffer and state: the coordinates of a pipeline that hold it

    @property
    def peers(self) -> Peers | None:
        """The other ranks of the job; None in simulation."""
        ...

    @property
    def shards(self) -> Keeping:
        """Converts whole tensors to the held form, and back."""
        ...

    def brings(self, parts: DataParts) -> RankPart | None:
        """Have the rank bring its part of each batch from now on, and which that is; None in simulation, which is given
        whole batches."""
        ...

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A held tensor where it lies between steps: on the device, or in pinned memory of the host."""
        ...

    def settle(self) -> None:
        """Wait until what steps copy to the host is there: before it is read or written here."""
        ...

    def holds(self, name: str) -> bool:
        """Whether this rank has a parameter, a buffer or state: a stage of a pipeline has its own alone."""
        ...

    def fetch(self, name: str, tensor: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        """The same on every rank, of a parameter, a buffer or state, or of a parameter's gradient; all must call it."""
        ...

    def run(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]: ...

    def output(self, port: Port, tensor: torch.Tensor | None) -> torch.Tensor:
        """The whole of a model's output, of all microbatches, given what this rank has of it; all must call it."""
        ...

    def derived(self, port: Port, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """What ranks that have a model's output made of it, a tensor like this one, on all ranks; all must call it."""
        ...

    def beside(self, program: StagedProgram, evaluates: bool) -> Engine:
        """An engine of another program over the same ranks and tensors; all must call it."""
        ...

    def release(self) -> None:
        """Let go of a program that ran beside another, and is not run again."""
        ...

    def agree(self, form: str, when: str, *, alone: bool = False) -> None:
        """Raise ShardcError (SC542), on all ranks, where one was given a batch of another form. All must call it; but
        `alone`, where the others may know the form and go on without a word."""
        ...

    def nonfinite(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        """The parameters whose gradients are not finite in a step that changed nothing."""
        ...

    def checkpoints(self) -> Checkpoints: ...

    def consensus(self) -> Consensus:
        """How the ranks decide after a step; all must call it."""
        ...

    def timed(self, act: Callable[[], object]) -> Any:
        """Run an action that makes one step, and return the timeline of all ranks."""
        ...

    def profiled(self, act: Callable[[], object]) -> Profile:
        """Run an action that makes one step, and return what each call of this rank took."""
        ...

    def close(self, failure: BaseException | None = None) -> None: ...


@dataclass(frozen=True)
class Engines:
    """The engines of a program: all ranks simulated in this process, or this rank of a running job."""

    program: StagedProgram

    def simulation(self) -> Engine:
        return Simulation(self.program)

    def job(self, timeout: float, device: str | None, facts: Mapping[str, str], graphs: Graphs | None = None) -> Engine:
        """`facts` are what all ranks must have in common; what is run is added to them. With `graphs` steps are
        replayed from CUDA graphs, where they can be."""
        texts = [self.program.text(c, comments=False) for c in self.program.coordinate_range]
        return Job(self.program, timeout, device, {**facts, "program": "\n".join(texts)}, graphs)


class Simulation:
    """All ranks here."""

    def __init__(self, program: StagedProgram) -> None:
        self.program, self.rank, self.device, self.shards = program, 0, torch.device("cpu"), Whole()
        self.peers = None
        self.homes: Mapping[str, Sequence[int]] = {}

    def brings(self, parts: DataParts) -> RankPart | None:
        return None

    def placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def settle(self) -> None:
        pass

    def holds(self, name: str) -> bool:
        return True

    def fetch(self, name: str, tensor: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        assert tensor is not None
        return tensor

    def run(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        return simulate_stages(self.program, state, fed=fed)

    def output(self, port: Port, tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None
        return tensor

    def derived(self, port: Port, whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        assert whole is not None
        return whole

    def beside(self, program: StagedProgram, evaluates: bool) -> Engine:
        return Simulation(program)

    def release(self) -> None:
        pass

    def agree(self, form: str, when: str, *, alone: bool = False) -> None:
        pass

    def nonfinite(self, state: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        sums = simulate(probe(self.program.body), state, fed=fed)
        return [port.name for port, value in sums.items() if not value.isfinite().all()]

    def checkpoints(self) -> Checkpoints:
        from shardc.runtime.checkpoint.checkpoint import Checkpoints

        return Checkpoints(Mesh(), 0)

    def consensus(self) -> Consensus:
        return Consensus()

    def timed(self, act: Callable[[], object]) -> Any:
        hint = "`program.timeline()` predicts one; to measure it, run a pipeline under torchrun"
        raise error("SC510", "a simulated step has no timeline: all ranks share a process", hint=hint)

    def profiled(self, act: Callable[[], object]) -> Profile:
        hint = "`program.predict(hardware)` predicts its time; to measure it, launch under torchrun"
        raise error("SC510", "a simulated step has no profile: all ranks share a process", hint=hint)

    def close(self, failure: BaseException | None = None) -> None:
        pass
