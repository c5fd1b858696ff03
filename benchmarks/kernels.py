"""How fast the templates are: ours, torch's builtins, torch.compile (max-autotune) and Liger, in one run on one GPU.

Every line is one op at one shape by one provider, in bfloat16: the time of a CUDA-graph replay with the L2 cache
flushed before it, all providers of an op and shape in turns (benchmarks/replays.py); GB/s of the fewest bytes that the
op must move; and `of_copy`, its share of what a plain elementwise kernel moves in the same turns with as many bytes.
`again` is ours once more, captured apart: how far two times of the same kernel are from each other. At its end it
prints every line that falls short of 0.9 of the copy or of the best peer, and why, how many reach the goals, and the
geometric mean over the best peer.

    python -m benchmarks.kernels [--only layer_norm 'softmax*'] [--rows 8192] [--cols 4096 12288] [--part 1/3]
    python -m benchmarks.kernels --workers 14 --gpus 4                           # the GPUs of a host share the work
    python -m benchmarks.kernels --merge first.jsonl second.jsonl [--table]      # the end of several runs together

Tracing and compiling take most of the time, of one CPU core each. `--workers N` lets N processes share a GPU: each
takes the next piece of work that none has taken, and they take turns on the GPU, one at a time. All providers of an op
and shape run on the same GPU, in the same process.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks import kernel_cases as made
from benchmarks import kernel_summary as told
from benchmarks import replays
from benchmarks.kernel_cases import COLS, ROWS, Case
from kernels_triton.gate.bench_timing import stream

NOT_CAPTURED = {("cross_entropy", "liger")}  # it asks the GPU for the number of targets
PATIENCE = 4  # times that one waits for memory
FIRST = (8192, 4096)  # of the shapes, and what the table shows
GROUPS: dict[str, Callable[[int, int], Iterator[Case]]] = {
    "norm": made.norms,
    "softmax": made.softmaxes,
    "activation": made.activations,
    "rope": made.ropes,
    "group_norm": made.groups,
    "adamw": made.optimizers,
    "cross_entropy": made.losses,
}
PIECES = {"norm": 4, "activation": 4, "softmax": 3, "cross_entropy": 3, "rope": 2, "group_norm": 2, "adamw": 1}
Piece = tuple[str, tuple[int, int], int]  # a group at a shape, and which of its PIECES


def pieces(options: argparse.Namespace) -> list[Piece]:
    """The work, cut so that a piece takes some 20 seconds."""
    shapes = sorted(((r, c) for r in options.rows for c in options.cols), key=lambda s: (s != FIRST, s[0] != 8192, s))
    whole = [(name, shape) for shape in shapes for name in GROUPS if name not in ("adamw", "cross_entropy")]
    later = whole[5:]
    random.Random(0).shuffle(later)  # large ones and small ones side by side: memory is shared, too
    whole[5:] = [("adamw", FIRST), *(("cross_entropy", (made.CE_TOKENS, size)) for size in made.VOCABULARIES), *later]
    index, of = map(int, options.part.split("/"))
    groups = set(options.only or GROUPS) if set(options.only or ()) <= set(GROUPS) else set(GROUPS)
    return [(name, shape, k) for name, shape in whole if name in groups for k in range(PIECES[name])][index - 1 :: of]


def cases(piece: Piece, only: list[str] | None) -> Iterator[Case]:
    name, shape, number = piece
    for case in patient(lambda: list(GROUPS[name](*shape)))[number :: PIECES[name]]:
        if not only or any(fnmatch(case.op, pattern) or pattern == name for pattern in only):
            yield case


def patient(make: Callable[[], list[Any]]) -> list[Any]:
    """What it makes, when other processes have left memory for it."""
    for _ in range(PATIENCE):
        try:
            return make()
        except torch.OutOfMemoryError:
            gc.collect()
            torch.cuda.empty_cache()
            time.sleep(5)
    return make()


def taken(work: list[Piece], turns: Path | None) -> Iterator[Piece]:
    """Those that this process is the first to take."""
    for number, piece in enumerate(work):
        if turns is not None:
            try:
                (turns / f"piece{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
        yield piece


def measured(case: Case, spent: dict[str, float]) -> Iterator[dict[str, Any]]:
    """A line a provider, ours first."""
    started = time.monotonic()
    calls: dict[str, Callable[[], Any]] = {"copy": replays.copy(case.bytes), "ours": case.ours, "again": case.ours}
    failed: dict[str, Exception] = {}
    torch.compiler.reset()
    with torch.cuda.stream(stream()):
        case.ours()  # compiles, as do the others: not while this process has the GPU alone
        for name, make in case.peers.items():
            try:
                call = make()
                call()
                calls[name] = call
            except Exception as why:
                failed[name] = why
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # other processes need memory, too
    compiled = time.monotonic()
    found, uncaptured = replays.times(calls, case.bytes, {name for op, name in NOT_CAPTURED if op == case.op})
    failed |= uncaptured
    spent["compiling"] += compiled - started
    spent["timing"] += time.monotonic() - compiled
    for name in ("ours", "again", *case.peers):
        line: dict[str, Any] = {"op": case.op, "shape": case.shape, "provider": name}
        if name in failed:
            yield {**line, "failed": repr(failed[name])[:200]}
            continue
        us, share = found[name], found["copy"] / found[name]
        if (case.op, name) in NOT_CAPTURED:
            line["captured"] = False  # its time is that of launching, too
        yield {**line, "us": round(us, 2), "GB/s": round(case.bytes / us / 1e3), "of_copy": round(share, 3)}


def timed(case: Case, spent: dict[str, float]) -> list[dict[str, Any]]:
    """Its lines, once each provider has found memory, or after some patience."""
    lines: list[dict[str, Any]] = []
    for _ in range(PATIENCE):
        lines = patient(lambda: list(measured(case, spent)))
        if not any("OutOfMemoryError" in line.get("failed", "") for line in lines):
            break
        time.sleep(5)
    return lines


def spread(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of `workers` processes a GPU, printed as they come."""
    started, spent = time.monotonic(), defaultdict[str, float](float)
    devices = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(options.gpus)))
    command = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:], "--turns"]

    def follow(device: str) -> list[dict[str, Any]]:
        # Each process compiles by itself: there are enough of them.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        lines: list[dict[str, Any]] = []
        with subprocess.Popen([*command, turns], env=environment, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout
            for text in worker.stdout:
                line = json.loads(text) if text.startswith("{") else {}
                if "provider" in line:
                    print(text, end="", flush=True)
                    lines.append(line)
                for name, seconds in line.get("seconds", {}).items():
                    spent[name] += seconds
        return lines

    with tempfile.TemporaryDirectory() as turns:
        names = devices.split(",")[: options.gpus] * max(1, options.workers)
        with ThreadPoolExecutor(len(names)) as pool:
            lines = [line for found in pool.map(follow, names) for line in found]
    print(json.dumps({"seconds": round(time.monotonic() - started), **{k: round(v) for k, v in spent.items()}}))
    return lines


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of this process."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    functorch.donated_buffer = False  # a backward is replayed here, and must leave its saved values alone
    inductor.autotune_local_cache = False  # what was best in another run is not kept
    turns = Path(options.turns) if options.turns else None
    if turns is not None:
        replays.share(turns / f"gpu{os.environ['CUDA_VISIBLE_DEVICES']}")
    started, spent = time.monotonic(), defaultdict[str, float](float)
    lines: list[dict[str, Any]] = []
    for piece in taken(pieces(options), turns):
        for case in cases(piece, options.only):
            if time.monotonic() - started > options.seconds:
                continue
            try:
                found = timed(case, spent)
            except Exception as why:  # the next case may do
                found = [{"op": case.op, "shape": case.shape, "provider": "ours", "failed": repr(why)[:200]}]
            for line in found:
                print(json.dumps(line), flush=True)
            lines += found
            torch.cuda.empty_cache()
        gc.collect()
        torch.cuda.empty_cache()
    whole = {"working": time.monotonic() - started, "waiting": replays.waited[0], **spent}
    print(json.dumps({"seconds": {name: round(seconds, 1) for name, seconds in whole.items()}}), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help=f"ops, with wildcards, or groups: {', '.join(GROUPS)}")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--part", default="1/1", help="I/N: one of N parts of all of it, for a run of its own")
    parser.add_argument("--workers", type=int, default=0, help="processes that share a GPU")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so many")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host that share the work")
    parser.add_argument("--turns", help=argparse.SUPPRESS)  # the folder that such processes have in common
    parser.add_argument("--merge", nargs="+", help="files of lines: time nothing, print their end")
    parser.add_argument("--table", action="store_true", help="also print the table of benchmarks/README.md")
    options = parser.parse_args()
    if options.turns:
        run(options)
        return
    if options.merge:
        lines = list(told.read(options.merge))
    else:
        lines = spread(options) if options.gpus > 1 or options.workers else run(options)
    found = told.results(lines)
    for line in told.summary(found):
        print(json.dumps(line))
    if options.table:
        print("\n".join(told.table(found, FIRST)))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
