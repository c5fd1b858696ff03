"""A process in its job: its device, what all ranks agree on, and lines that the first of them writes."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def joined(kind: str) -> torch.device:
    """This process in its job: its device."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    return device


def leads() -> bool:
    return dist.get_rank() == 0


def say(row: dict[str, object]) -> None:
    if leads():
        print(json.dumps(row), flush=True)


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Agreement:
    """What ranks agree on beside the device's collectives, so that one rank's failure does not hang it."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo", timeout=timedelta(minutes=15))

    def any(self, mine: bool) -> bool:
        said = torch.tensor([float(mine)])
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        return bool(said.item())

    def most(self, mine: list[float]) -> list[float]:
        said = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=self.group)
        return said.tolist()

    def past(self, end: float) -> bool:
        """Whether the time is up on any rank."""
        return self.any(time.monotonic() > end)


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("COMMIT", "unknown")


def clock() -> int | None:
    """MHz of the GPU's processors, where it can be asked."""
    try:
        return torch.cuda.clock_rate()
    except Exception:  # no NVML, or no GPU: which errors depends on what is installed
        return None


def circumstances(device: torch.device) -> dict[str, object]:
    on_gpu = device.type == "cuda"
    return {
        "gpus": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "commit": commit(),
    }
