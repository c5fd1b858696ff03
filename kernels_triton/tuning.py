"""`shardc tune`: the table of kernels_triton.tune for the GPU at hand, as a file that kernels_triton.tables finds.

Schedules are compiled by several processes at once before any is timed: compiling takes ten times as long as timing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import yaml

from kernels_triton import launch
from shardc.ir.diagnostic import error

HEAD = """\
# Measured by `shardc tune` (torch {torch}, triton {triton}): bfloat16, 8192 rows (4096 for cross_entropy), CUDA-graph
# replay, L2 flushed. An entry is used for widths from the first to the second of `cols` and elements of `bytes`;
# elsewhere kernels_triton.rows decides by size. `fused_KIND_N` are generated kernels (fused.schedules.entry).
"""
GENERATED = "fused"  # the name that generated kernels are tuned by, all of them


def table(only: Sequence[str] | None = None, seconds: float = 600.0, workers: int | None = None) -> str:
    """The text of the table. Needs a GPU and Triton, and says so where there is none."""
    if not torch.cuda.is_available():
        raise error("SC532", "kernels are tuned on a GPU, and this machine has none", hint="run `shardc tune` on one")
    if not launch.HAS_TRITON or launch.interpreting():
        raise error("SC532", "kernels are tuned as Triton compiles them, and it does not here", hint="install triton")
    from kernels_triton import tune  # imports what only such a machine has
    from kernels_triton.fused import tune as fused

    unknown = sorted(set(only or ()) - {*tune.NAMES, GENERATED})
    if unknown:
        names = ", ".join((*tune.NAMES, GENERATED))
        raise error("SC532", f"{unknown[0]} has no schedules to choose from", hint=f"one of {names}")
    deadline, workers = time.monotonic() + seconds, workers or max(1, (os.cpu_count() or 2) - 1)
    templates = [name for name in only or tune.NAMES if name != GENERATED]
    schedules: dict[str, Any] = {}
    if templates:
        _compile(["kernels_triton.tune", "--only", *templates], workers)
        schedules |= tune.tune(templates, deadline - time.monotonic())
    if not only or GENERATED in only:
        _compile(["kernels_triton.fused.tune"], workers)
        device = launch.device_of(torch.empty(1, device="cuda"))
        schedules |= fused.tune(device, fused.timed, seconds=deadline - time.monotonic())
    version = str(import_module("triton").__version__)
    found = {"device": torch.cuda.get_device_name(), "schedules": schedules}
    head = HEAD.format(torch=torch.__version__.partition("+")[0], triton=version)
    return head + yaml.safe_dump(found, sort_keys=False, default_flow_style=None, width=120)


def _compile(module: Sequence[str], workers: int) -> None:
    """Fill Triton's cache on disk. What does not compile there will not here either, and is said then."""
    command = [sys.executable, "-m", *module, "--worker"]
    running = [
        subprocess.Popen([*command, f"{n}/{workers}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for n in range(workers)
    ]
    for process in running:
        process.wait()
