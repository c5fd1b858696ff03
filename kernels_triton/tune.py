"""Fill configs/kernels: time a few schedules of each op on the GPU at hand, keep the best where it beats the guess.

Nothing is tuned when a program runs; this is run once for a GPU, and its table is committed. Candidates vary what the
size heuristics cannot know: warps, programs a multiprocessor, tiles in flight, rows a tile.

    shardc tune                                                              # kernels_triton.tuning: all of it
    python -m kernels_triton.tune [--only layer_norm ...] [--worker I/N]     # N workers only compile, all at once
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import yaml

from kernels_triton import rows
from kernels_triton.registry import TEMPLATES, Template
from kernels_triton.rows import Schedule

ROWS = 8192
COLS = (1024, 4096, 8192, 12288)
VOCABULARIES = (50304, 128256)
FORWARD = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm", "softmax", "softmax_backward")
BACKWARD = ("layer_norm_backward", "rms_norm_backward")
HEADS = ("rope",)
TILES = ("bias_gelu", "gated", "gated_backward", "bias_dropout_residual")
WALKS = ("bias_gelu_backward", "bias_dropout_residual_backward")
NAMES = (*FORWARD, *BACKWARD, *HEADS, *TILES, *WALKS, "cross_entropy")
PAIR = {"rope": 2}  # elements that stand for one of a schedule's
HEAD = 128  # dims of a head
GAIN = 0.985  # of the guess's time: what a table entry has to be worth


def flushed_time(call: Callable[[], Any], repeats: int = 12, capture: bool = True) -> float:
    """Median milliseconds of a call, replayed from a CUDA graph, the L2 cache flushed before each replay."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # what is made lazily must be made before the capture, and on its stream
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    replay = call
    if capture:
        graph = torch.cuda.CUDAGraph()
        # Autograd and Inductor have threads of their own, whose allocations are not the captured work's.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            call()
        replay = graph.replay
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in pairs:
        flush.zero_()
        start.record()
        replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def candidates(name: str, guess: Schedule, cols: int) -> Iterator[Schedule]:
    """The guess first."""
    yield guess
    options: list[dict[str, int]] = []
    if name in FORWARD:
        shared = ((0, 1), (8, 1), (4, 2), (2, 3))
        options = [{"warps": w, "waves": p, "stages": s} for w in (2, 4, 8, 16) for p, s in shared]
        options += [{"rows": r, "warps": w} for r in (1, 2, 4) for w in (1, 2, 4, 8) if cols * r <= 4096]
        options += [{"block": 2048, "chunks": cols // 2048, "warps": w} for w in (4, 8) if cols >= 4096]
    elif name in BACKWARD:
        shared = ((4, 2), (4, 4), (8, 1), (8, 2), (8, 3), (16, 1))
        heights = sorted({1, guess.rows})
        options = [
            {"rows": r, "warps": w, "waves": p, "stages": s} for r in heights for w, p in shared for s in (1, 2, 3, 4)
        ]
    elif name in HEADS:
        options = [{"rows": r, "warps": w} for r in (4, 8, 16, 32, 64) for w in (1, 2, 4, 8) if r <= cols // 128]
    elif name in TILES:
        sizes = (512, 1024, 2048)
        options = [{"rows": max(1, n // guess.block), "warps": w} for n in sizes for w in (2, 4, 8)]
        options += [{"block": 512, "rows": 1, "warps": w} for w in (1, 2)]
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
            (4096, 16, 1, (8, 10, 11, 12)),
            (4096, 16, 2, (2, 3, 4)),
            (2048, 8, 2, (6, 9, 11)),
            (2048, 8, 1, (20, 24)),
        )
        options = [
            {"block": b, "warps": w, "chunks": k, "waves": p, "stages": s, "registers": 65536 // (32 * w * p)}
            for b, w, p, chunks in kept
            for k in chunks
            for s in ((1,) if k * b >= cols else (4, 6, 8))
        ]
    for option in options:
        schedule = replace(guess, **option)
        a_thread = 128 if name == "cross_entropy" else 32 if name in BACKWARD else 64  # elements: more would only spill
        size = schedule.block * max(1, schedule.chunks) * schedule.rows
        # At least 16 bytes a thread, and no more than it has registers for.
        if 8 * 32 * schedule.warps <= size * PAIR.get(name, 1) <= a_thread * 32 * schedule.warps and schedule != guess:
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
    """The table: by op, entries of a range of widths."""
    deadline = time.monotonic() + seconds
    times: dict[tuple[str, int], list[tuple[float, Schedule]]] = {}
    calls: dict[tuple[str, int], Callable[[], Any]] = {}  # of one op and width at a time: their tensors are large
    for template, cols, schedule in jobs(only):
        if time.monotonic() > deadline:
            break
        count = ROWS if cols < 1 << 14 else 4096
        key = (template.name, cols)
        if key not in calls:
            calls = {key: call_of(template, cols, count)}
        try:
            with rows.trying(template.name, schedule):
                spent = flushed_time(calls[key])
        except Exception as refused:  # a schedule that needs more shared memory than there is
            print(f"# {template.name} {cols} {schedule}: {refused!r}"[:200], file=sys.stderr)
            continue
        times.setdefault(key, []).append((spent, schedule))
        if verbose:
            print(json.dumps({"op": template.name, "cols": cols, "us": round(spent * 1e3, 2), **asdict(schedule)}))
    table: dict[str, list[dict[str, Any]]] = {}
    for (name, cols), found in times.items():
        guess, (best, schedule) = found[0][0], min(found, key=lambda pair: pair[0])
        print(f"# {name} {cols}: guess {guess * 1e3:.1f} us, best {best * 1e3:.1f} us, {schedule}", file=sys.stderr)
        if best < GAIN * guess:
            entry = {"cols": _range(cols), "bytes": 2, "schedule": asdict(schedule)}
            table.setdefault(name, []).append(entry)
    return table


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
