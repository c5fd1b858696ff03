"""What every rank of a running job does, whatever it runs: join it, hold its shards of tensors, leave it.

Environment variables are torchrun's: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardc.ir.diagnostic import ShardcError, error
from shardc.ir.mesh import Mesh
from shardc.ir.types import TensorType
from shardc.runtime.checkpoint.weights import Read
from shardc.runtime.execute.layout import assemble, load_shard, shard
from shardc.runtime.execute.monitor import BEAT, SILENCE
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.runtime.train.agreement import absent, agree
from shardc.torch_compat import high_priority, job_store

IDENTITY = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_stores: dict[tuple[object, ...], Any] = {}  # by process, and by the job that the environment names


class Member:
    """Joins the job on construction, unless the process is in one already: gloo on CPUs, NCCL on GPUs.

    `facts` are what all ranks must have in common (see `runtime.train.agreement`), which is found out first: ranks that
    run different programs would make different groups, and wait for each other.
    """

    def __init__(
        self, mesh: Mesh, timeout: float, device: str | None = None, facts: Mapping[str, str] | None = None
    ) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if self.world != mesh.world_size:
            message = f"the job has {self.world} ranks, the program's mesh ({mesh}) has {mesh.world_size}"
            raise error(
                "SC506", message, hint=f"start it with --nproc-per-node {mesh.world_size}, or compile for another mesh"
            )
        self.device = _device(device)
        self.on_gpu = self.device.type == "cuda"
        # Who is to blame takes a while to find out; it counts towards the limit.
        self.limit = timedelta(seconds=max(timeout - SILENCE - 2 * BEAT, timeout / 2))
        self._owns_group = not dist.is_initialized()
        store = self._meet() if self._owns_group else job_store()
        common = {**(facts or {}), "device": self.device.type}
        self._launch = agree(dist.PrefixStore("shardc", store), self.rank, self.world, common, self.limit)
        if self._owns_group:
            # Named, NCCL connects at once; else at a group's first collective, where all its ranks must take part.
            named = self.device if self.on_gpu else None
            backend = "nccl" if self.on_gpu else "gloo"
            try:
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore(f"shardc/{self._launch}/group", store),
                    rank=self.rank,
                    world_size=self.world,
                    timeout=self.limit,
                    device_id=named,
                    pg_options=high_priority(backend, self.limit),
                )
            except dist.DistError as failure:
                raise absent([], self.limit) from failure

    def _meet(self) -> Any:
        """The store of the job, which the ranks find each other through: one for all launches of a process.

        Rank 0 holds the store. If it were ended after a launch and made again for the next, a rank that is early would
        still meet the old one.
        """
        job = (os.getpid(), *(os.environ.get(name) for name in IDENTITY))
        try:
            if job in _stores and not _answers(_stores[job]):  # its process ended; another may have taken its place
                del _stores[job]
            if job not in _stores:
                _stores[job] = next(iter(dist.rendezvous("env://", self.rank, self.world, timeout=self.limit)))[0]
            _stores[job].set_timeout(self.limit)
            return _stores[job]
        except dist.DistError as failure:
            raise absent([], self.limit) from failure

    def gather(self, x: torch.Tensor, blame: Callable[[Exception], Exception]) -> list[torch.Tensor]:
        """What every rank of the job gives, in order; all must call it, with tensors of one shape on the device."""
        rows = [torch.empty_like(x) for _ in range(self.world)]
        try:
            dist.all_gather(rows, x.contiguous())
        except Exception as failure:
            raise blame(failure) from failure
        return rows

    def group(self, blame: Callable[[Exception], Exception]) -> Any:
        """A group of all ranks on CPUs, which no step uses; all must call it."""
        try:
            return dist.new_group(backend="gloo", timeout=self.limit)
        except Exception as failure:
            raise blame(failure) from failure

    def store(self, name: str) -> Any:
        """Where the ranks leave notes for each other in this launch, under a name."""
        return dist.PrefixStore(f"shardc/{self._launch}/{name}", job_store())

    def leave(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _answers(store: Any) -> bool:
    try:
        store.check(["shardc"])
    except dist.DistError:
        return False
    return True


class Keeping(Protocol):
    """How tensors are held between steps."""

    def load(self, read: Read, type: TensorType) -> torch.Tensor: ...
    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor: ...

    def whole(self, tensor: torch.Tensor, type: TensorType) -> torch.Tensor:
        """The whole tensor, gathered from all ranks that hold it; all of these must call it."""
        ...


class Whole:
    """Tensors as a simulation of all ranks holds them."""

    def load(self, read: Read, type: TensorType) -> torch.Tensor:
        return read(tuple(slice(0, n) for n in type.shape)).to(type.dtype, copy=True)

    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor:
        return whole

    def whole(self, tensor: torch.Tensor, type: TensorType) -> torch.Tensor:
        return tensor


class Shards:
    """Tensors as a rank of a mesh holds them, on its device; whole ones are gathered through `comm`."""

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        device: torch.device,
        comm: ProcessGroupCommunicator,
        blame: Callable[[Exception], Exception],
    ) -> None:
        self.mesh, self.rank, self.device, self._comm, self._blame = mesh, rank, device, comm, blame

    def load(self, read: Read, type: TensorType) -> torch.Tensor:
        return load_shard(read, type, self.mesh, self.rank).to(device=self.device, dtype=type.dtype)

    def hold(self, whole: torch.Tensor, type: TensorType) -> torch.Tensor:
        return shard(whole.detach(), type, self.mesh, self.rank).to(self.device)

    def whole(self, tensor: torch.Tensor, type: TensorType) -> torch.Tensor:
        tensor = tensor.to(self.device)  # of what lies on the host, a copy
        if not type.axes and not type.partial:
            return tensor
        try:
            rows = self._comm.all_gather(tensor, self.mesh.names)
        except ShardcError:
            raise
        except Exception as failure:
            raise self._blame(failure) from failure
        return assemble(dict(enumerate(rows)), type, self.mesh)


def _device(name: str | None) -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name is None:
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", local if ":" not in name else device.index)
        torch.cuda.set_device(device)
    return device
