"""Where the time of a training step goes on a GPU: kernels by kind, how long the GPU was busy, how long Python took.

    busy_ms        at least one kernel ran (the union of all streams' kernels)
    overlapped_ms  a collective ran beside another kernel
    exposed_ms     a collective ran and no other kernel did
    python_ms      from the first call of the step until the last was made: more than busy_ms means that Python is what
                   the GPU waits for

    longest        the kernels that take most, by name: milliseconds and how many

Kernels are told apart by their names, so a class is as good as its patterns; `rest` is what none of them knows.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as record

NAME, LONGEST = 72, 24
KINDS = {
    "collectives": ("nccl",),
    "attention": ("fmha", "flash", "cudnn_generated", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitKreduce"),
    "norms": ("layer_norm", "LayerNorm", "GammaBeta"),
    "copies": ("Memcpy", "Memset", "copy", "CatArray", "fill"),
    "optimizer, fused": ("multi_tensor",),
    "reductions": ("reduce_kernel",),
    "elementwise": ("elementwise",),
    "softmax and loss": ("softmax", "nll_loss", "SoftMax"),
    "embedding": ("embedding", "index", "scatter", "sort", "Sort"),
}


def profile(
    step: Callable[[Mapping[str, Tensor]], Tensor], batches: Sequence[Mapping[str, Tensor]], device: torch.device
) -> dict[str, object]:
    """Of the mean step. Recording slows Python down, so `python_ms` is taken without it."""
    if device.type != "cuda":
        return {}
    python: list[float] = []
    for batch in batches:
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(batch)
        python.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for batch in batches:
            step(batch)
        torch.cuda.synchronize()
    kinds: dict[str, float] = defaultdict(float)
    counts: dict[str, int] = defaultdict(int)
    names: dict[str, list[float]] = defaultdict(list)
    spans: list[tuple[float, float, bool]] = []
    for event in trace.events():
        # Ranges that torch names (an optimizer's step, a collective) appear beside their kernels.
        named = event.is_user_annotation or event.name.startswith(("nccl:", "Optimizer.", "FSDP", "Distributed"))
        if event.device_type != torch.autograd.DeviceType.CUDA or named:
            continue
        kind = kind_of(event.name)
        spans.append((event.time_range.start, event.time_range.end, kind == "collectives"))
        kinds[kind] += event.time_range.elapsed_us()
        counts[kind] += 1
        names[event.name[:NAME]].append(event.time_range.elapsed_us())
    per = 1e3 * len(batches)
    busy, overlapped = covered(spans)
    sending, _ = covered([span for span in spans if span[2]])
    return {
        "python_ms": round(1e3 * sum(python) / len(python), 2),
        "busy_ms": round(busy / per, 2),
        "overlapped_ms": round(overlapped / per, 2),
        "exposed_ms": round((sending - overlapped) / per, 2),
        "launches": round(sum(counts.values()) / len(batches)),
        "kernels_ms": {kind: round(us / per, 2) for kind, us in sorted(kinds.items(), key=lambda item: -item[1])},
        "kernels": {kind: round(n / len(batches)) for kind, n in sorted(counts.items(), key=lambda item: -item[1])},
        "longest": {
            name: [round(sum(us) / per, 2), round(len(us) / len(batches))]
            for name, us in sorted(names.items(), key=lambda item: -sum(item[1]))[:LONGEST]
        },
    }


def kind_of(kernel: str) -> str:
    return next((kind for kind, patterns in KINDS.items() if any(p in kernel for p in patterns)), "rest")


def covered(spans: Sequence[tuple[float, float, bool]]) -> tuple[float, float]:
    """How long any span lasts, and how long a collective's and another's do at once."""
    edges = sorted(edge for start, end, moves in spans for edge in ((start, 1, moves), (end, -1, moves)))
    open_ = {True: 0, False: 0}
    busy = both = last = 0.0
    for at, change, moves in edges:
        if open_[True] or open_[False]:
            busy += at - last
        if open_[True] and open_[False]:
            both += at - last
        open_[moves] += change
        last = at
    return busy, both
