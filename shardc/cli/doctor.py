"""`shardc doctor`: versions, devices and links of this host, and what shardc would choose on it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.text import Text
from torch.cuda import nccl

from kernels_triton.launch.launch import HAS_TRITON
from kernels_triton.launch.tables import VARIABLE, schedules
from shardc.cli.console import out, write_json
from shardc.cli.host_memory import available
from shardc.ir.collectives import human_bytes
from shardc.ir.diagnostic import ShardcError
from shardc.ir.version import VERSION
from shardc.plan.hardware import names as hardware_names
from shardc.plan.packaged import packaged

PACKAGES = ("torch", "triton", "transformers", "numpy", "pydantic", "networkx", "sympy")
TESTED = ((2, 11), (2, 13))  # of torch: the oldest, the newest
JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


def run(*, as_json: bool) -> None:
    findings = examine()
    if as_json:
        write_json(findings)
        return
    lines: list[str] = []
    for part, entries in findings.items():
        lines.append(part)
        if isinstance(entries, dict):
            width = max((len(key) for key in entries), default=0)
            lines += [f"  {key:<{width}}  {_shown(value)}" for key, value in entries.items()]
        else:
            lines += [f"  {entry}" for entry in entries] or ["  none"]
        lines.append("")
    out().print(Text("\n".join(lines).rstrip()), soft_wrap=True)


def examine() -> dict[str, Any]:
    """What there is, part by part, as plain data."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "versions": _versions(),
        "host": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "threads of torch": torch.get_num_threads(),
            "memory free": _size(available()),
        },
        "devices": [_device(i) for i in range(count)],
        "links": _links(count),
        "job": {name: os.environ[name] for name in JOB if name in os.environ} or {"torchrun": "no: not in a job"},
        "chosen": _chosen(count),
        "problems": _problems(),
    }


def _versions() -> dict[str, str]:
    versions = {"shardc": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
        versions["nccl"] = _asked(lambda: ".".join(map(str, nccl.version())))
    return versions


def _device(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    free, whole = torch.cuda.mem_get_info(index)
    capability = f"sm_{properties.major}{properties.minor}"
    return f"cuda:{index}  {properties.name}  {capability}  {human_bytes(free)} free of {human_bytes(whole)}"


def _links(count: int) -> list[str]:
    """Which GPUs reach each other's memory. Without peer access a transfer goes through the host."""
    lines: list[str] = []
    for i in range(count):
        peers = [j for j in range(count) if j != i and torch.cuda.can_device_access_peer(i, j)]
        if count > 1:
            lines.append(f"cuda:{i}  peer access to {', '.join(f'cuda:{j}' for j in peers) or 'none'}")
    return lines


def _chosen(count: int) -> dict[str, str]:
    """What `launch`, `fuse` and a plan's `hardware` come to here."""
    nccl = count > 0 and dist.is_available() and dist.is_nccl_available()
    name = torch.cuda.get_device_name(0) if count else ""
    known = [key for key in hardware_names() if key != "default" and key.lower() in name.lower()]
    kernels = "Triton" if count and HAS_TRITON else "references in plain torch (no GPU)" if HAS_TRITON else ""
    return {
        "ranks under torchrun": f"{'NCCL on GPUs' if nccl else 'gloo on CPUs'}",
        "ranks otherwise": "simulated, on the CPU",
        "kernels (fuse: true)": kernels or "references in plain torch (no Triton)",
        "kernels' schedules": _table(name) if count else "none needed",
        "hardware of a plan": f"write hardware: {known[0]}" if known else "default",
        "plans": ", ".join(f"shardc:{name}" for name in packaged("plans")) or "none",
    }


def _table(device: str) -> str:
    try:
        measured = bool(schedules(device))
    except ShardcError as problem:
        return problem.diagnostics[0].message
    return f"measured on {device}" if measured else f"from sizes: shardc tune -o FILE measures, {VARIABLE} names FILE"


def _problems() -> list[str]:
    """What will not work, or has not been tried."""
    problems: list[str] = []
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if not TESTED[0] <= release <= TESTED[1]:
        oldest, newest = (".".join(map(str, version)) for version in TESTED)
        problems.append(
            f"torch {torch.__version__} is not one of those that shardc is tested with: {oldest} to {newest}"
        )
    if not dist.is_available():
        problems.append("this torch has no torch.distributed: programs can be simulated, not launched")
    if torch.version.cuda and not torch.cuda.is_available():
        problems.append("torch is built for CUDA, and no GPU is to be seen: is there a driver?")
    if torch.cuda.is_available() and not HAS_TRITON:
        problems.append("there is no Triton: fuse is off by default, and fuse: true runs references, which are slow")
    return problems


def _asked(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except (RuntimeError, AttributeError):
        return "none"


def _size(count: int | None) -> str:
    return "unknown" if count is None else human_bytes(count)


def _shown(value: object) -> str:
    return "" if value is None else str(value)
