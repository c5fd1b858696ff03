"""`shardc tune`: writes the table of kernels_triton.gate.tune for this GPU, where kernels_triton.launch.tables finds
it.

Several processes compile the schedules in parallel before any is timed: compiling takes ten times as long as timing.
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

from kernels_triton.base.diagnostic import error
from kernels_triton.launch import launch

HEAD = """\
# Measured by `shardc tune` (torch {torch}, triton {triton}): bfloat16, 8192 rows (4096 for cross_entropy), CUDA-graph
# replay, L2 flushed. An entry is used for widths from the first to the second of `cols` and elements of `bytes`;
# elsewhere kernels_triton.launch.row_schedule decides by size. `fused_KIND_N` are generated kernels
# (kernels_triton.codegen.schedules.schedule_key).
"""
GENERATED = "fused"  # selects all generated kernels


def table(only: Sequence[str] | None = None, seconds: float = 600.0, workers: int | None = None) -> str:
    """The text of the table. Raises SC532 without a GPU or without Triton."""
    if not torch.cuda.is_available():
        raise error("SC532", "kernels are tuned on a GPU, and this machine has none", hint="run `shardc tune` on one")
    if not launch.HAS_TRITON or launch.is_interpreting():
        raise error("SC532", "kernels are tuned as Triton compiles them, and it does not here", hint="install triton")
    from kernels_triton.gate import tune  # needs Triton
    from kernels_triton.gate import tune_generated as fused

    unknown = sorted(set(only or ()) - {*tune.NAMES, GENERATED})
    if unknown:
        names = ", ".join((*tune.NAMES, GENERATED))
        raise error("SC532", f"{unknown[0]} has no schedules to choose from", hint=f"one of {names}")
    deadline, workers = time.monotonic() + seconds, workers or max(1, (os.cpu_count() or 2) - 1)
    templates = [name for name in only or tune.NAMES if name != GENERATED]
    schedules: dict[str, Any] = {}
    if templates:
        _compile(["kernels_triton.gate.tune", "--only", *templates], workers)
        schedules |= tune.tune(templates, deadline - time.monotonic())
    if not only or GENERATED in only:
        _compile(["kernels_triton.gate.tune_generated"], workers)
        device = launch.device_of(torch.empty(1, device="cuda"))
        schedules |= fused.tune(device, fused.time_schedule, seconds=deadline - time.monotonic())
    version = str(import_module("triton").__version__)
    document = {"device": torch.cuda.get_device_name(), "schedules": schedules}
    head = HEAD.format(torch=torch.__version__.partition("+")[0], triton=version)
    return head + yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120)


def _compile(module: Sequence[str], workers: int) -> None:
    """Fills Triton's cache on disk. Schedules that do not compile are reported later, when they are timed."""
    command = [sys.executable, "-m", *module, "--worker"]
    running = [
        subprocess.Popen([*command, f"{n}/{workers}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for n in range(workers)
    ]
    for process in running:
        process.wait()
