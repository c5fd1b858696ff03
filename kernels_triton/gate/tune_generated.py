"""Measured schedules for generated kernels: the corpus timed on this GPU, and the best schedules as a table to commit.

A kernel's entry is its plan and its register pressure (`schedules.schedule_key`), so that measurements of a few kernels
serve all kernels of their kind. If several kernels share an entry, the best geometric mean wins.

    python -m kernels_triton.gate.tune_generated [--only rms_norm ...] [--seconds 600]      # YAML, for a table
    python -m kernels_triton.gate.tune_generated --worker I/N                      # N workers compile first, at once
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any

import torch
import yaml
from torch import Tensor

from kernels_triton.codegen.schedules import (
    column_sums,
    guess_schedule,
    has_transposed_access,
    plan_grid,
    plan_style,
    schedule_key,
    widest_element,
)
from kernels_triton.gate.bench_timing import time_calls
from kernels_triton.gate.corpus import CORPUS
from kernels_triton.generated.launcher import DeviceKernel, define_kernel
from kernels_triton.ir.kernel import Kernel
from kernels_triton.launch import launch
from kernels_triton.launch.launch import Device
from kernels_triton.launch.row_schedule import Schedule, power_of_two

ROWS = 8192
WIDTHS = {1024: 513, 4096: 3073, 8192: 7169, 12288: 11265}  # the value is the smallest width with the same schedule
GAIN = 0.985  # share of the guess's time that an entry must not exceed
ROUNDS = 12
Timer = Callable[[Kernel, Schedule], float]


def candidates(kernel: Kernel, guess: Schedule) -> Iterator[Schedule]:
    """The schedules to time; the guess comes first."""
    yield guess
    style, options = plan_style(kernel), list[dict[str, int]]()
    if style == "tiles":
        sides = ((64, 64), (32, 64), (64, 32), (128, 32), (32, 128)) if has_transposed_access(kernel) else ()
        options = [{"block": b, "rows": r, "warps": w} for r, b in sides for w in (4, 8)]
        if not sides:
            blocks = [b for b in (512, 1024, 2048) if b <= power_of_two(kernel.cols)]
            options = [{"block": b, "rows": r, "warps": w} for b in blocks for r in (1, 2) for w in (2, 4, 8)]
    elif style == "walk":
        tiles = ((512, 4), (512, 2), (1024, 2), (1024, 1), (256, 8))
        options = [
            {"block": b, "rows": r, "warps": w, "waves": p, "stages": s}
            for b, r in tiles
            for w in (4, 8)
            for p, s in ((4, 2), (8, 1), (8, 2), (6, 3), (12, 2))
        ]
    elif guess.chunks == 0:
        options = [{"block": b, "warps": w} for b in (1024, 2048, 4096) for w in (4, 8, 16)]
        if column_sums(kernel):
            options += [{"block": 2048, "warps": 8, "rows": r, "waves": p} for r in (1, 2, 4) for p in (1, 2, 4)]
    elif column_sums(kernel):
        shared = ((4, 2), (4, 4), (8, 1), (8, 2), (16, 1))
        options = [{"warps": w, "waves": p, "stages": s} for w, p in shared for s in (1, 2, 3)]
    else:
        options = [{"warps": w, "rows": r} for w in (1, 2, 4, 8, 16) for r in (1, 2, 4)]
    for option in options:
        schedule = replace(guess, **option)
        a_thread = schedule.block * max(1, schedule.chunks) * schedule.rows / (32 * schedule.warps)
        if schedule != guess and 1 <= a_thread <= 32:
            yield schedule


def jobs(only: Sequence[str], device: Device) -> Iterator[tuple[str, int, Kernel, Schedule]]:
    """Kernels by name and width, each with its schedules, the guess first. Flat kernels, which have no columns, are
    left out."""
    for cols in WIDTHS:
        for name in only or CORPUS:
            kernel = CORPUS[name](ROWS, cols, torch.bfloat16)
            if kernel.cols == cols:
                for schedule in candidates(kernel, guess_schedule(kernel, device)):
                    yield name, cols, kernel, schedule


def compile_once(kernel: Kernel, schedule: Schedule) -> None:
    """Compiles the kernel; its results are not used."""
    ready, inputs, outputs = _device_kernel(kernel, schedule)
    ready.run(inputs, outputs)


def time_schedule(kernel: Kernel, schedule: Schedule) -> float:
    """Milliseconds on the current GPU, with the L2 cache flushed before each run."""
    ready, inputs, outputs = _device_kernel(kernel, schedule)
    milliseconds, refused = time_calls({schedule: lambda: ready.run(inputs, outputs)}, ROUNDS)
    for refusal in refused.values():
        raise refusal
    return milliseconds[schedule]


def _device_kernel(kernel: Kernel, schedule: Schedule) -> tuple[DeviceKernel, list[Tensor], list[Tensor]]:
    x = torch.empty(1, device="cuda")
    inputs = [torch.ones(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in kernel.inputs]
    outputs = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda") for tensor in kernel.outputs]
    style = "loops" if plan_style(kernel) == "rows" and not schedule.chunks else plan_style(kernel)
    return DeviceKernel(define_kernel(kernel, plan_grid(kernel, style, schedule, launch.device_of(x)))), inputs, outputs


def tune(
    device: Device, timer: Timer, only: Sequence[str] = (), seconds: float = 1e9
) -> dict[str, list[dict[str, Any]]]:
    """The table: for each entry, ranges of widths and their schedules."""
    deadline = time.monotonic() + seconds
    ratios: dict[tuple[str, int, int], dict[Schedule, list[float]]] = {}
    for (name, cols, kernel), group in groupby(jobs(only, device), lambda job: job[:3]):
        milliseconds: dict[Schedule, float] = {}
        for *_, schedule in group:
            if time.monotonic() > deadline:
                break
            try:
                milliseconds[schedule] = timer(kernel, schedule)
            except Exception as refused:  # a schedule that needs more than the device has
                print(f"# {name} {cols} {schedule}: {refused!r}"[:200], file=sys.stderr)
        guess = guess_schedule(kernel, device)
        if guess not in milliseconds:
            continue
        best = min(milliseconds, key=lambda schedule: milliseconds[schedule])
        print(
            f"# {name} {cols}: guess {milliseconds[guess]:.4f} ms, best {milliseconds[best]:.4f} ms, {best}",
            file=sys.stderr,
        )
        logs_of_schedule = ratios.setdefault((schedule_key(kernel), cols, widest_element(kernel)), {})
        for schedule, spent in milliseconds.items():
            logs_of_schedule.setdefault(schedule, []).append(math.log(spent / milliseconds[guess]))
    table: dict[str, list[dict[str, Any]]] = {}
    for (name, cols, element), logs_of_schedule in ratios.items():
        most = max(map(len, logs_of_schedule.values()))
        means = {schedule: sum(logs) / most for schedule, logs in logs_of_schedule.items() if len(logs) == most}
        best = min(means, key=lambda schedule: means[schedule], default=None)
        if best is not None and means[best] < math.log(GAIN):
            found_entry = {"cols": [WIDTHS[cols], cols], "bytes": element, "schedule": asdict(best)}
            table.setdefault(name, []).append(found_entry)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="Time schedules of generated kernels, print the table as YAML.")
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--worker", help="I/N: compile the I-th of N parts, and time nothing")
    options = parser.parse_args()
    device = launch.device_of(torch.empty(1, device="cuda"))
    if options.worker:
        index, of = map(int, options.worker.split("/"))
        for *_, kernel, schedule in list(jobs(options.only, device))[index::of]:
            with suppress(Exception):
                compile_once(kernel, schedule)
        return
    table = tune(device, time_schedule, options.only, options.seconds)
    print(yaml.safe_dump({"schedules": table}, sort_keys=False, default_flow_style=None, width=120))


if __name__ == "__main__":
    main()
