"""One rank of a running job: its process groups, its executor, and the monitor that says who died.

Environment variables are torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.graph import Graph, Port, type_of
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint import Checkpoints
from shardc.runtime.executor import Executor
from shardc.runtime.groups import ProcessGroupCommunicator, axes_used
from shardc.runtime.instructions import rank_context
from shardc.runtime.layout import assemble, load_shard, shard
from shardc.runtime.microbatches import Feed
from shardc.runtime.monitor import BEAT, SILENCE, Monitor
from shardc.runtime.weights import Read
from shardc.torch_compat import job_store


class Job:
    """Joins the job on construction; tensors that it holds are this rank's shards, on its device."""

    def __init__(self, body: Graph, timeout: float, device: str | None = None) -> None:
        mesh, world = body.mesh, int(os.environ["WORLD_SIZE"])
        self.rank, self.mesh = int(os.environ["RANK"]), mesh
        if world != mesh.world_size:
            message = f"the job has {world} ranks, the program's mesh ({mesh}) has {mesh.world_size}"
            raise error(
                "SC506", message, hint=f"start it with --nproc-per-node {mesh.world_size}, or compile for another mesh"
            )
        self.device = _device(device)
        on_gpu = self.device.type == "cuda"
        # Who is to blame takes a while to find out; it counts towards the limit.
        self._limit = limit = timedelta(seconds=max(timeout - SILENCE - 2 * BEAT, timeout / 2))
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            # Named, NCCL connects at once; else at a group's first collective, where all its ranks must take part.
            named = self.device if on_gpu else None
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=limit, device_id=named)
        self.comm = ProcessGroupCommunicator(mesh, self.rank, axes_used(body), limit)
        self.executor = Executor(body, rank_context(mesh, self.rank, self.comm), self.rank, self.device)
        store = dist.PrefixStore(f"shardc/{body.name}", job_store())
        self.monitor = Monitor(store, self.rank, world, self.executor.names, fatal=on_gpu)

    def load(self, read: Read, type: TensorType) -> torch.Tensor:
        return load_shard(read, type, self.mesh, self.rank).to(device=self.device, dtype=type.dtype)

    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor:
        return shard(whole.detach(), type, self.mesh, self.rank).to(self.device)

    def whole(self, held: torch.Tensor, type: TensorType) -> torch.Tensor:
        if not type.axes and not type.partial:
            return held
        try:
            rows = self.comm.all_gather(held, self.mesh.names)
        except ShardcError:
            raise
        except Exception as failure:
            raise self.monitor.blame(failure) from failure
        return assemble(dict(enumerate(rows)), type, self.mesh)

    def run(self, held: Mapping[str, torch.Tensor], fed: Sequence[Feed], step: int) -> dict[Port, torch.Tensor]:
        types = {name: type_of(node) for name, node in self.executor.body.input_nodes().items()}
        parts = [{name: self.hold(x, types[name]) for name, x in feed.items()} for feed in fed]
        self.monitor.begin(step)
        return self.executor.run(held, parts, self.monitor)

    def nonfinite(self, body: Graph, held: Mapping[str, torch.Tensor], fed: Sequence[Feed]) -> list[str]:
        """The outputs of another body that are not finite on some rank."""
        types = {name: type_of(node) for name, node in body.input_nodes().items()}
        parts = [{name: self.hold(x, types[name]) for name, x in feed.items()} for feed in fed]
        found = Executor(body, self.executor.context, self.rank, self.device).run(held, parts)
        flags = torch.tensor([not value.isfinite().all() for value in found.values()], dtype=torch.uint8)
        anywhere = torch.stack(list(self.comm.all_gather(flags.to(self.device), self.mesh.names))).amax(0)
        return [port.name for port, flag in zip(found, anywhere.tolist(), strict=True) if flag]

    def checkpoints(self) -> Checkpoints:
        """Made at the first save or load, by all ranks at once: a group on CPUs that no step uses."""
        group = dist.new_group(backend="gloo", timeout=self._limit)
        return Checkpoints(self.mesh, self.rank, group, self.monitor.blame)

    def close(self, failure: BaseException | None = None) -> None:
        self.monitor.close(failure)
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _device(asked: str | None) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if asked is None:
        asked = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    device = torch.device(asked)
    if device.type == "cuda":
        device = torch.device("cuda", local if ":" not in asked else device.index)
        torch.cuda.set_device(device)
    return device
