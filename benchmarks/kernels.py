"""How fast the templates are: ours, torch's builtins, torch.compile (max-autotune) and Liger, in one run on one GPU.

Every line is one op at one shape by one provider, in bfloat16: the median time of a CUDA-graph replay with the L2 cache
flushed before it, and of that the median over three placements in memory; GB/s of the fewest bytes that the op must
move; and `of_copy`, its share of what a plain elementwise kernel moves in the same harness with as many bytes. At its
end it prints every line that falls short of 0.9 of the copy or of the best peer, and why, how many reach the goals, and
the geometric mean over the best peer.

    python -m benchmarks.kernels [--only layer_norm 'softmax*'] [--rows 8192] [--cols 4096 12288] [--part 1/3]
    python -m benchmarks.kernels --workers 14 --gpus 4                           # a part on each GPU of a host
    python -m benchmarks.kernels --merge first.jsonl second.jsonl [--table]      # the end of several runs together

torch.compile takes most of the time. `--workers N` first compiles what the peers and we need by N processes a GPU at
once, into the caches on disk; what they measured of it is forgotten: the run itself tunes the peers alone on its GPU.
All providers of a line run on the same GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor

from benchmarks import kernel_cases as made
from benchmarks import kernel_summary as told
from benchmarks.kernel_cases import BF16, COLS, DEVICE, ROWS, Case
from kernels_triton.tune import flushed_time

NOT_CAPTURED = {("cross_entropy", "liger")}  # it asks the GPU for the number of targets
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


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Those asked for. Part I of N has every N-th group of cases, which share their tensors."""
    shapes = sorted(((r, c) for r in options.rows for c in options.cols), key=lambda s: (s != FIRST, s[0] != 8192, s))
    whole = [(name, shape) for shape in shapes for name in GROUPS if name not in ("adamw", "cross_entropy")]
    whole[5:5] = [("adamw", FIRST), *(("cross_entropy", (made.CE_TOKENS, size)) for size in made.VOCABULARIES)]
    index, of = map(int, options.part.split("/"))
    groups = set(options.only or GROUPS) if set(options.only or ()) <= set(GROUPS) else set(GROUPS)
    for name, shape in (one for one in whole[index - 1 :: of] if one[0] in groups):
        for case in GROUPS[name](*shape):
            if not options.only or any(fnmatch(case.op, pattern) or pattern == name for pattern in options.only):
                yield case
        gc.collect()
        torch.cuda.empty_cache()


def warm(options: argparse.Namespace) -> None:
    """One of the processes that compile: its share of the cases."""
    index, of = map(int, options.warm.split("/"))
    for number, case in enumerate(cases(options)):
        if number % of == index:
            for call in (case.ours, lambda case=case: case.peers["compile"]()()):
                with contextlib.suppress(Exception):
                    torch._dynamo.reset()
                    call()
                    torch.cuda.synchronize()


def warmed(workers: int) -> None:
    """Fill the caches on disk. What does not compile there will not here either, and is said then."""
    started = time.monotonic()
    environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # each worker is one
    command = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:], "--warm"]
    no = subprocess.DEVNULL
    running = [
        subprocess.Popen([*command, f"{n}/{workers}"], env=environment, stdout=no, stderr=no) for n in range(workers)
    ]
    for process in running:
        process.wait()
    print(json.dumps({"compiled by": workers, "seconds": round(time.monotonic() - started)}), flush=True)


_copies: dict[int, float] = {}


def copy_time(size: int) -> float:
    """Milliseconds of a plain elementwise kernel that reads and writes `size` bytes in all."""
    if size not in _copies:
        source = torch.ones(size // 4, dtype=BF16, device=DEVICE)
        target = torch.empty_like(source)
        _copies[size] = timed(lambda: torch.neg(source, out=target))
    return _copies[size]


def timed(call: Callable[[], Any], capture: bool = True) -> float:
    """The median over a few placements of the outputs in memory, which alone can make 5 % of a difference."""
    spent: list[float] = []
    pads: list[Tensor] = []
    for mebibytes in (0, 34, 70):
        pads.append(torch.empty(mebibytes << 20, dtype=torch.int8, device=DEVICE))
        try:
            spent.append(flushed_time(call, capture=capture))
        except RuntimeError:  # what a library makes on its first call in a capture fails it: then again
            torch.cuda.synchronize()
            spent.append(flushed_time(call, capture=capture))
    return sorted(spent)[1]


def measured(case: Case) -> Iterator[dict[str, Any]]:
    """A line a provider, ours first."""
    copy = copy_time(case.bytes)
    for name, make in {"ours": lambda: case.ours, **case.peers}.items():
        line: dict[str, Any] = {"op": case.op, "shape": case.shape, "provider": name}
        try:
            torch._dynamo.reset()
            spent = timed(make(), capture=(case.op, name) not in NOT_CAPTURED)
        except Exception as failed:
            yield {**line, "failed": repr(failed)[:200]}
            continue
        rate = {"GB/s": round(case.bytes / spent / 1e6), "of_copy": round(copy / spent, 3)}
        yield {**line, "us": round(spent * 1e3, 2), **rate}


def spread(gpus: int) -> list[dict[str, Any]]:
    """The lines of a run a GPU, each of its own part, printed as they come."""

    def follow(number: int) -> list[dict[str, Any]]:
        command = [sys.executable, "-m", "benchmarks.kernels", *sys.argv[1:], "--part", f"{number + 1}/{gpus}"]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(number)}
        lines: list[dict[str, Any]] = []
        with subprocess.Popen([*command, "--gpus", "1"], env=environment, stdout=subprocess.PIPE, text=True) as part:
            assert part.stdout
            for text in part.stdout:
                line = json.loads(text) if text.startswith("{") else {"summary": "none"}
                if "summary" not in line:  # that of a part is not wanted
                    print(text, end="", flush=True)
                    lines.append(line)
        return lines

    with ThreadPoolExecutor(gpus) as pool:
        return [line for lines in pool.map(follow, range(gpus)) for line in lines if "provider" in line]


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of this process."""
    started, lines = time.monotonic(), []
    for case in cases(options):
        for line in measured(case):
            print(json.dumps(line), flush=True)
            lines.append(line)
    print(json.dumps({"timed in seconds": round(time.monotonic() - started)}), flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help=f"ops, with wildcards, or groups: {', '.join(GROUPS)}")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--cols", type=int, nargs="*", default=COLS)
    parser.add_argument("--part", default="1/1", help="I/N: one of N parts of all of it, for a run of its own")
    parser.add_argument("--workers", type=int, default=0, help="processes that compile before anything is timed")
    parser.add_argument("--warm", help="I/N: be the I-th of N such processes")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of this host that share the work")
    parser.add_argument("--merge", nargs="+", help="files of lines: time nothing, print their end")
    parser.add_argument("--table", action="store_true", help="also print the table of benchmarks/README.md")
    options = parser.parse_args()
    if options.merge:
        lines = list(told.read(options.merge))
    elif options.gpus > 1:
        lines = spread(options.gpus)
    else:
        import torch._functorch.config as functorch
        import torch._inductor.config as inductor

        functorch.donated_buffer = False  # a backward is replayed here, and must leave its saved values alone
        inductor.autotune_local_cache = False  # what was best on a GPU shared with compiling processes is not kept
        if options.warm:
            return warm(options)
        if options.workers:
            warmed(options.workers)
        lines = run(options)
    found = told.results(lines)
    for line in told.summary(found):
        print(json.dumps(line))
    if options.table:
        print("\n".join(told.table(found, FIRST)))
    return None


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
