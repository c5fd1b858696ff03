"""Fills kernels_triton/schedules: times some schedules of each op on this GPU. The best is kept if it beats the guess.

Nothing is tuned when a program runs. Tuning runs once for a GPU, and its table is committed. Candidates vary what sizes
cannot predict: warps, programs a multiprocessor, tiles in flight, rows a tile.

    shardc tune                                                              # kernels_triton.gate.tuning: all of it
    python -m kernels_triton.gate.tune [--only layer_norm ...] [--worker I/N]     # N workers only compile, in parallel
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
import yaml

from kernels_triton.gate.bench_timing import time_calls
from kernels_triton.launch import row_schedule
from kernels_triton.launch.row_schedule import Schedule
from kernels_triton.ops.registry import TEMPLATES, TemplateOp

ROWS = 8192
COLS = (1024, 4096, 8192, 12288)
VOCABULARIES = (50304, 128256)
FORWARD = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "softmax_backward")
AGAIN = ("layer_norm", "rms_norm", "softmax_backward")  # may reread a row
BACKWARD = ("layer_norm_backward", "rms_norm_backward")
HEADS = ("rope",)
TILES = ("bias_gelu", "squared_relu", "gated", "gated_backward", "bias_dropout_residual")
WALKS = ("bias_gelu_backward", "bias_dropout_residual_backward")
NAMES = (*FORWARD, *BACKWARD, *HEADS, *TILES, *WALKS, "cross_entropy")
HEAD = 128  # dims of a head
GAIN = 0.99  # share of the guess's time that an entry must not exceed; two timings of one kernel differ by 0.5 %
ROUNDS = 15


def candidates(name: str, guess: Schedule, cols: int) -> Iterator[Schedule]:
    """The schedules to time; the guess comes first."""
    yield guess
    options: list[dict[str, int]] = []
    if name in FORWARD:
        shared = ((0, 1), (8, 1), (4, 2), (2, 3))
        options = [{"warps": w, "waves": p, "stages": s} for w in (2, 4, 8, 16) for p, s in shared]
        options += [{"rows": r, "warps": w} for r in (1, 2, 4) for w in (1, 2, 4, 8) if cols * r <= 4096]
        options += [{"block": 2048, "chunks": cols // 2048, "warps": w} for w in (4, 8) if cols >= 4096]
        options += [{"block": 4096, "chunks": cols // 4096, "warps": w} for w in (8, 16) if cols > 4096]
        options += [
            {"block": row_schedule.power_of_two(cols), "chunks": 1, "warps": w} for w in (16, 32) if cols > 4096
        ]
        if name in AGAIN:
            options += [{**option, "again": True} for option in options if cols >= 4096 and "chunks" in option]
            options += [{"warps": w, "again": True} for w in (8, 16) if cols >= 4096]
    elif name in BACKWARD:
        shared = ((4, 2), (4, 4), (8, 1), (8, 2), (8, 3), (16, 1))
        heights = sorted({1, guess.rows})
        options = [
            {"rows": r, "warps": w, "waves": p, "stages": s} for r in heights for w, p in shared for s in (1, 2, 3, 4)
        ]
    elif name in HEADS:
        options = [{"rows": r, "warps": w} for r in (8, 16, 32, 64, 128) for w in (1, 2, 4, 8, 16)]
    elif name in TILES:
        sizes = (512, 1024, 2048)
        options = [{"rows": max(1, n // guess.block), "warps": w} for n in sizes for w in (1, 2, 4, 8)]
        options += [{"block": 512, "rows": r, "warps": w} for r, w in ((1, 1), (1, 2), (2, 1), (2, 2), (2, 4), (4, 4))]
    elif name in WALKS:
        tiles = ((512, 4, 4), (512, 2, 4), (512, 8, 4), (1024, 2, 4), (1024, 1, 4), (1024, 4, 8), (256, 8, 4))
        shared = ((4, 2), (6, 3), (8, 1), (8, 2), (12, 2))
        options = [
            {"block": min(b, guess.block * 2), "rows": r, "warps": w, "waves": p, "stages": s}
            for b, r, w in tiles
            for p, s in shared
        ]
    else:
        kept_tiles = (
            (4096, 16, 1, (8, 10, 11, 12, 13)),
            (4096, 16, 2, (2, 3, 4)),
            (2048, 8, 2, (6, 9, 11, 25)),
            (2048, 8, 1, (20, 24, 25)),
        )
        options = [
            {"block": b, "warps": w, "chunks": k, "waves": p, "stages": s, "registers": 65536 // (32 * w * p)}
            for b, w, p, chunks in kept_tiles
            for k in chunks
            for s in ((1,) if k * b >= cols else (4, 6, 8))
        ]
    for option in options:
        schedule = replace(guess, **option)
        a_thread = 208 if name == "cross_entropy" else 32 if name in BACKWARD else 64  # elements; more would spill
        size = schedule.block * max(1, schedule.chunks) * schedule.rows
        # At least 16 bytes a thread, and at most what fits into its registers.
        if 8 * 32 * schedule.warps <= size <= a_thread * 32 * schedule.warps and schedule != guess:
            yield schedule


def guess_schedule(template: TemplateOp, cols: int) -> Schedule:
    """What the size heuristics say."""
    x = torch.empty((1, 1), dtype=torch.bfloat16, device="meta")
    name = template.name
    table, row_schedule.table_schedule = row_schedule.table_schedule, lambda name, x, cols, guess: guess
    try:
        if name in FORWARD:
            return row_schedule.forward_schedule(name, x, cols)
        if name in BACKWARD:
            return row_schedule.backward_schedule(name, x, cols)
        if name in HEADS:
            return row_schedule.head_schedule(name, x.expand(1, HEAD), cols // HEAD, HEAD // 2)
        if name in TILES:
            return row_schedule.tile_schedule(name, x, cols)
        if name in WALKS:
            return row_schedule.column_walk_schedule(name, x, cols, sums=True)
        return row_schedule.vocabulary_register_schedule(name, x, cols)
    finally:
        row_schedule.table_schedule = table


def jobs(only: list[str] | None) -> Iterator[tuple[TemplateOp, int, Schedule]]:
    for name in NAMES:
        if only and name not in only:
            continue
        template = TEMPLATES[name]
        for cols in VOCABULARIES if name == "cross_entropy" else COLS:
            for schedule in candidates(name, guess_schedule(template, cols), cols):
                yield template, cols, schedule


def call_of(template: TemplateOp, cols: int, count: int) -> Callable[[], Any]:
    heads = {"batch": 1, "heads": cols // HEAD, "dim": HEAD, "half": HEAD // 2}
    arguments = template.arguments({"rows": count, "cols": cols, **heads}, torch.bfloat16, "cuda")
    return lambda: template.op(*arguments)


def tune(only: list[str] | None, seconds: float, verbose: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The table: for each op, entries for ranges of widths. An op's schedules at one width are timed side by side."""
    deadline = time.monotonic() + seconds
    table: dict[str, list[dict[str, Any]]] = {}
    for (name, cols), group in groupby(jobs(only), key=lambda job: (job[0].name, job[1])):
        if time.monotonic() > deadline:
            break
        call = call_of(TEMPLATES[name], cols, ROWS if cols < 1 << 14 else 4096)
        schedules = [schedule for *_, schedule in group]
        milliseconds, refused = time_calls(
            {schedule: partial(run_with_schedule, name, schedule, call) for schedule in schedules}, ROUNDS
        )
        for schedule, why in refused.items():  # usually too little shared memory
            print(f"# {name} {cols} {schedule}: {why!r}"[:200], file=sys.stderr)
        if verbose:
            for schedule, spent in milliseconds.items():
                print(json.dumps({"op": name, "cols": cols, "us": round(spent * 1e3, 2), **asdict(schedule)}))
        guess, best = schedules[0], min(milliseconds, key=milliseconds.__getitem__)
        summary = f"guess {milliseconds[guess] * 1e3:.1f} us, best {milliseconds[best] * 1e3:.1f} us, {best}"
        print(f"# {name} {cols}: {summary}", file=sys.stderr)
        if milliseconds[best] < GAIN * milliseconds[guess]:
            table.setdefault(name, []).append({"cols": _width_range(cols), "bytes": 2, "schedule": asdict(best)})
    return table


def run_with_schedule(name: str, schedule: Schedule, call: Callable[[], Any]) -> None:
    with row_schedule.trying(name, schedule):
        call()


def _width_range(cols: int) -> list[int]:
    """The widths that run as `cols` does: with the same block and number of chunks."""
    if cols in VOCABULARIES:
        return [cols // 4 * 3, cols]
    return [{1024: 513, 4096: 3073, 8192: 7169, 12288: 11265}[cols], cols]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time schedules, print the table as YAML.")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--worker", help="I/N: compile the I-th of N parts, and time nothing")
    parser.add_argument("--verbose", action="store_true", help="print every time, as JSON lines, before the table")
    parser.add_argument("--seconds", type=float, default=1e9)
    options = parser.parse_args()
    if options.worker:
        index, of = map(int, options.worker.split("/"))
        for template, cols, schedule in list(jobs(options.only))[index::of]:
            try:
                with row_schedule.trying(template.name, schedule):
                    call_of(template, cols, 64)()
            except Exception:
                continue
        return
    name = torch.cuda.get_device_name()
    table = {"device": name, "schedules": tune(options.only, options.seconds, options.verbose)}
    print(yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120))


if __name__ == "__main__":
    main()
