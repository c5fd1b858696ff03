"""What a command would hold on this host, and a refusal where that does not fit (SC517), before it is tried.

Simulation holds the whole state, and what every rank holds at its peak; verification holds that in float64, beside the
single device that it compares with. An estimate counts tensors alone: what is refused does not fit, and what is not
refused may still be slow.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from shardc.api import Program
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import error
from shardc.partition.memory import memory

CGROUP = Path("/sys/fs/cgroup")
WIDENED = 2  # float64 of float32
HINT = "a smaller model or batch, as in hf:llama?num_hidden_layers=2; cost and compile hold no weights"


def available() -> int | None:
    """Bytes that this process may still take; None where the system does not say."""
    free = [size for size in (_free_of_host(), _free_of_cgroup()) if size is not None]
    return min(free) if free else None


def refuse_model(model: nn.Module, what: str) -> None:
    """Raise ShardcError (SC517) where the weights of a model, which lies on the meta device, do not fit."""
    tensors = [*model.parameters(), *model.buffers()]
    _refuse(sum(t.numel() * t.element_size() for t in tensors), f"the weights of {what} take")


def refuse_program(program: Program, *, verify: bool = False) -> None:
    """Raise ShardcError (SC517) where all ranks at once, simulated or as processes of this host, do not fit."""
    coordinates = memory(program.staged, early=False).coordinates
    ranks = sum(
        (coordinate.report.peak + coordinate.report.host.most) * len(coordinate.ranks) for coordinate in coordinates
    )
    held = ranks + program.parameter_bytes().whole
    count = program.mesh.world_size
    if verify:
        _refuse(held * WIDENED, f"verifying {count} ranks in float64 takes")
    else:
        _refuse(held, f"{count} ranks on this host take")


def _refuse(needed: int, what: str) -> None:
    free = available()
    if free is not None and needed > free:
        message = f"{what} {human_bytes(needed)}, and this host has {human_bytes(free)} free"
        raise error("SC517", message, hint=HINT)


def _free_of_host() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def _free_of_cgroup() -> int | None:
    """Of a container with a limit; the cache of files in it can be given back."""
    try:
        limit = (CGROUP / "memory.max").read_text(encoding="ascii").strip()
        used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        return None if limit == "max" else int(limit) - used + int(stat.get("inactive_file", 0))
    except (OSError, ValueError):
        return None
