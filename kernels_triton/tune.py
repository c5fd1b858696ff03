"""Fill configs/kernels: time a few schedules of each op on the GPU at hand, keep the best where it beats the guess.

Nothing is tuned when a program runs; this is run once for a GPU, and its table is committed. Candidates vary what the
size heuristics cannot know: warps, programs a multiprocessor, tiles in flight, rows a tile.

    shardc tune                                                              # kernels_triton.tuning: all of it
    python -m kernels_triton.tune [--only layer_norm ...] [--worker I/N]     # N workers only compile, all at once
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

from kernels_triton import rows
from kernels_triton.registry import TEMPLATES, Template
from kernels_triton.replays import times
from kernels_triton.rows import Schedule

ROWS = 8192
COLS = (1024, 4096, 8192, 12288)
VOCABULARIES = (50304, 128256)
FORWARD = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "softmax_backward")
AGAIN = ("layer_norm", "rms_norm", "softmax_backward")  # may read a row again
BACKWARD = ("layer_norm_backward", "rms_norm_backward")
HEADS = ("rope",)
TILES = ("bias_gelu", "squared_relu", "gated", "gated_backward", "bias_dropout_residual")
WALKS = ("bias_gelu_backward", "bias_dropout_residual_backward")
NAMES = (*FORWARD, *BACKWARD, *HEADS, *TILES, *WALKS, "cross_entropy")
HEAD = 128  # dims of a head
GAIN = 0.99  # of the guess's time: what a table entry has to be worth, with two times of a kernel 0.5 % apart
ROUNDS = 15


def candidates(name: str, guess: Schedule, cols: int) -> Iterator[Schedule]:
    """The guess first."""
    yield guess
    options: list[dict[str, int]] = []
    if name in FORWARD:
        shared = ((0, 1), (8, 1), (4, 2), (2, 3))
        options = [{"warps": w, "waves": p, "stages": s} for w in (2, 4, 8, 16) for p, s in shared]
        options += [{"rows": r, "warps": w} for r in (1, 2, 4) for w in (1, 2, 4, 8) if cols * r <= 4096]
        options += [{"block": 2048, "chunks": cols // 2048, "warps": w} for w in (4, 8) if cols >= 4096]
        options += [{"block": 4096, "chunks": cols // 4096, "warps": w} for w in (8, 16) if cols > 4096]
        options += [{"block": rows.power_of_two(cols), "chunks": 1, "warps": w} for w in (16, 32) if cols > 4096]
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
        kept = (
            (4096, 16, 1, (8, 10, 11, 12, 13)),
            (4096, 16, 2, (2, 3, 4)),
            (2048, 8, 2, (6, 9, 11, 25)),
            (2048, 8, 1, (20, 24, 25)),
        )
        options = [
            {"block": b, "warps": w, "chunks": k, "waves": p, "stages": s, "registers": 65536 // (32 * w * p)}
            for b, w, p, chunks in kept
            for k in chunks
            for s in ((1,) if k * b >= cols else (4, 6, 8))
        ]
    for option in options:
        schedule = replace(guess, **option)
        a_thread = 208 if name == "cross_entropy" else 32 if name in BACKWARD else 64  # elements: more would only spill
        size = schedule.block * max(1, schedule.chunks) * schedule.rows
        # At least 16 bytes a thread, and no more than it has registers for.
        if 8 * 32 * schedule.warps <= size <= a_thread * 32 * schedule.warps and schedule != guess:
            yield schedule


def guessed(template: Template, cols: int) -> Schedule:
    """What the size heuristics say."""
    x = torch.empty((1, 1), dtype=torch.bfloat16, device="meta")
    name = template.name
    table, rows.tabled = rows.tabled, lambda name, x, cols, guess: guess
    try:
        if name in FORWARD:
            return rows.forward_schedule(name, x, cols)
        if name in BACKWARD:
            return rows.backward_schedule(name, x, cols)
        if name in HEADS:
            return rows.head_schedule(name, x.expand(1, HEAD), cols // HEAD, HEAD // 2)
        if name in TILES:
            return rows.tile_schedule(name, x, cols)
        if name in WALKS:
            return rows.walking_schedule(name, x, cols, sums=True)
        return rows.kept_schedule(name, x, cols)
    finally:
        rows.tabled = table


def jobs(only: list[str] | None) -> Iterator[tuple[Template, int, Schedule]]:
    for name in NAMES:
        if only and name not in only:
            continue
        template = TEMPLATES[name]
        for cols in VOCABULARIES if name == "cross_entropy" else COLS:
            for schedule in candidates(name, guessed(template, cols), cols):
                yield template, cols, schedule


def call_of(template: Template, cols: int, count: int) -> Callable[[], Any]:
    heads = {"batch": 1, "heads": cols // HEAD, "dim": HEAD, "half": HEAD // 2}
    arguments = template.arguments({"rows": count, "cols": cols, **heads}, torch.bfloat16, "cuda")
    return lambda: template.op(*arguments)


def tune(only: list[str] | None, seconds: float, verbose: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The table: by op, entries of a range of widths. An op's schedules at a width are timed side by side."""
    deadline = time.monotonic() + seconds
    table: dict[str, list[dict[str, Any]]] = {}
    for (name, cols), group in groupby(jobs(only), key=lambda job: (job[0].name, job[1])):
        if time.monotonic() > deadline:
            break
        call = call_of(TEMPLATES[name], cols, ROWS if cols < 1 << 14 else 4096)
        schedules = [schedule for *_, schedule in group]
        found, refused = times({one: partial(tried, name, one, call) for one in schedules}, ROUNDS)
        for schedule, why in refused.items():  # it needs more shared memory than there is
            print(f"# {name} {cols} {schedule}: {why!r}"[:200], file=sys.stderr)
        if verbose:
            for schedule, spent in found.items():
                print(json.dumps({"op": name, "cols": cols, "us": round(spent * 1e3, 2), **asdict(schedule)}))
        guess, best = schedules[0], min(found, key=found.__getitem__)
        told = f"guess {found[guess] * 1e3:.1f} us, best {found[best] * 1e3:.1f} us, {best}"
        print(f"# {name} {cols}: {told}", file=sys.stderr)
        if found[best] < GAIN * found[guess]:
            table.setdefault(name, []).append({"cols": _range(cols), "bytes": 2, "schedule": asdict(best)})
    return table


def tried(name: str, schedule: Schedule, call: Callable[[], Any]) -> None:
    with rows.trying(name, schedule):
        call()


def _range(cols: int) -> list[int]:
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
                with rows.trying(template.name, schedule):
                    call_of(template, cols, 64)()
            except Exception:
                continue
        return
    name = torch.cuda.get_device_name()
    table = {"device": name, "schedules": tune(options.only, options.seconds, options.verbose)}
    print(yaml.safe_dump(table, sort_keys=False, default_flow_style=None, width=120))


if __name__ == "__main__":
    main()
