"""Times of the calls that benchmarks compare (kernels_triton/gate/bench_timing.py), on a GPU that processes may share.

What is timed, and what torch.compile times to choose among its kernels, then has the GPU `alone`, while other processes
trace and compile.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import threading
import time
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kernels_triton.gate import bench_timing

SMALL, MANY, FEW = 100 << 20, 41, 17  # rounds of what moves less than so many bytes, and of what moves more

_turn = threading.RLock()  # torch.compile chooses kernels of a backward in autograd's thread
_held: list[IO[str]] = []  # the file whose lock is the turn, where the GPU is shared
_depth = [0]
waited = [0.0]  # seconds for a turn


def share(lock: Path) -> None:
    """From now on this process takes turns with those that name the same file."""
    from torch._inductor.runtime import benchmarking

    _held.append(lock.open("w"))
    kind = type(benchmarking.benchmarker)
    plain = kind.benchmark_gpu

    @functools.wraps(plain)
    def in_turn(*args: Any, **kwargs: Any) -> Any:
        with alone():
            return plain(*args, **kwargs)

    kind.benchmark_gpu = in_turn


@contextlib.contextmanager
def alone() -> Generator[None]:
    """Within, no other process that shares the GPU times anything."""
    with _turn:
        if _held and not _depth[0]:
            started = time.monotonic()
            fcntl.flock(_held[0], fcntl.LOCK_EX)
            waited[0] += time.monotonic() - started
        _depth[0] += 1
        try:
            yield
        finally:
            _depth[0] -= 1
            if not _depth[0]:
                torch.cuda.synchronize()
                if _held:
                    fcntl.flock(_held[0], fcntl.LOCK_UN)


def copy(size: int) -> Callable[[], Tensor]:
    """A plain elementwise kernel that reads and writes `size` bytes in all."""
    source = torch.ones(size // 4, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target)


def times(
    calls: dict[str, Callable[[], Any]], size: int, uncaptured: Collection[str] = ()
) -> tuple[dict[str, float], dict[str, Exception]]:
    """Microseconds of each call, which moves some `size` bytes; and of those that could not be captured, why."""
    rounds = MANY if size < SMALL else FEW
    with alone():
        found, failed = bench_timing.time_calls(
            {name: call for name, call in calls.items() if name not in uncaptured}, rounds
        )
        for name in set(uncaptured) & set(calls):  # it waits for the GPU, and no other's turn is to
            found |= bench_timing.time_in_turns({name: calls[name]}, rounds)
    return {name: spent * 1e3 for name, spent in found.items()}, failed
