"""One rank of a running job whose ranks all run one body: its process groups, its executor, and the monitor that says
who died."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardc.ir.arena import planned
from shardc.ir.diagnostic import error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.checkpoint import Checkpoints
from shardc.runtime.execute.arena import Arena
from shardc.runtime.execute.body_executor import BodyExecutor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import Feed
from shardc.runtime.execute.monitor import Monitor, SharedCounterNames
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator, axes_used
from shardc.runtime.train.nonfinite import probe
from shardc.runtime.train.rank_session import Member, Shards
from shardc.runtime.train.replicas import Peers


class Job:
    """Joins the job on construction; tensors that it holds are this rank's shards, on its device."""

    def __init__(
        self, body: Graph, timeout: float, device: str | None = None, facts: Mapping[str, str] | None = None
    ) -> None:
        mesh = body.mesh
        self.member = member = Member(mesh, timeout, device, facts)
        self.rank, self.device, self.mesh = member.rank, member.device, mesh
        self.comm = ProcessGroupCommunicator(mesh, self.rank, axes_used(body), member.limit)
        arena = Arena({body: planned(body)}, self.device)
        self.executor = BodyExecutor(body, rank_context(mesh, self.rank, self.comm), self.rank, self.device, arena)
        names = SharedCounterNames(self.executor.routine.names)
        self.monitor = Monitor(member.store(body.name), self.rank, member.world, names, fatal=member.on_gpu)
        self.shards = Shards(mesh, self.rank, self.device, self.comm, self.monitor.blame)
        places = [(0, rank) for rank in range(mesh.world_size)]
        self.peers = Peers(mesh, self.device, lambda x: member.gather(x, self.monitor.blame), places)

    def holds(self, name: str) -> bool:
        return True

    def fetch(self, name: str, held: torch.Tensor | None, type: TensorType) -> torch.Tensor:
        assert held is not None
        return self.shards.whole(held, type)

    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        parts = self._parts(self.executor.body, fed)
        self.monitor.begin(step)
        return self.executor.run(held, parts, self.monitor)

    def nonfinite(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        body = probe(self.executor.body)
        found = BodyExecutor(body, self.executor.context, self.rank, self.device).run(held, self._parts(body, fed))
        flags = torch.tensor([not value.isfinite().all() for value in found.values()], dtype=torch.uint8)
        anywhere = torch.stack(list(self.comm.all_gather(flags.to(self.device), self.mesh.names))).amax(0)
        return [port.name for port, flag in zip(found, anywhere.tolist(), strict=True) if flag]

    def _parts(self, body: Graph, fed: Sequence[Feed]) -> list[Feed]:
        types = {name: type_of(node) for name, node in body.input_nodes().items()}
        return [{name: self.shards.hold(x, types[name]) for name, x in feed.items()} for feed in fed]

    def checkpoints(self) -> Checkpoints:
        """Made at the first save or load, by all ranks at once: a group on CPUs that no step uses."""
        group = self.member.group(self.monitor.blame)
        return Checkpoints(self.mesh, self.rank, group, self.monitor.blame)

    def timed(self, act: Callable[[], object]) -> Any:
        raise error("SC510", "there is no timeline of a program without a pipeline", hint="profile it with torch")

    def close(self, failure: BaseException | None = None) -> None:
        self.monitor.close(failure)
        self.member.leave()
