"""What a fused call costs the CPU: microseconds of Python for each of many calls of a tiny kernel, on a GPU.

`op` goes through torch's dispatcher, `call` through what a program that is run call by call does, `prepared` is what a
program's code holds once it is launched on a device, `triton` is `kernel[grid](*arguments)` and `runner` Triton's own
compiled kernel, both without allocations. `sums` is a kernel with sums over rows: two launches.

    python -m benchmarks.launch_cost [--calls 1000]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kernels_triton import launch
from kernels_triton.fused import into
from kernels_triton.fused.corpus import CORPUS
from kernels_triton.fused.launcher import launcher
from kernels_triton.fused.op import FUSED
from kernels_triton.fused.text import text

KERNELS = {"bias_gelu": 1, "add_layer_norm": 1, "layer_norm_backward": 2}  # launches


def cost(call: Callable[[], Any], calls: int) -> float:
    """Median microseconds a call, of ten rounds; the GPU is idle before each."""
    spent: list[float] = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls // 10):
            call()
        spent.append((time.perf_counter() - start) / (calls // 10) * 1e6)
    return round(statistics.median(spent), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1000)
    calls = parser.parse_args().calls
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.no_grad():
        for name, launches in KERNELS.items():
            kernel = CORPUS[name](8, 256, torch.bfloat16)
            inputs = [torch.ones(one.shape, dtype=one.dtype, device=device) for one in kernel.inputs]
            line = text(kernel)
            prepared = into.prepare(range(len(inputs)), line, {}, device)
            assert prepared is not None
            prepared(inputs)  # checks and compiles
            ready = launcher(kernel).ready[device.index]
            outputs = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in kernel.outputs]
            made = ready.calls(inputs, outputs)[0]
            options, grid = launch.options(made[4], made[5]), (*made[2], 1, 1)[:3]
            compiled = launch.kernel(made[1])[grid](*made[3], **options)
            found = {
                "op": cost(lambda i=inputs, t=line: FUSED(i, t), calls),
                "call": cost(lambda i=inputs, t=line: into.run(i, t), calls),
                "prepared": cost(lambda p=prepared, i=inputs: p(i), calls),
                "triton": cost(lambda m=made, g=grid, o=options: launch.kernel(m[1])[g](*m[3], **o), calls),
                "runner": cost(lambda r=compiled[grid], a=made[3]: r(*a), calls),
            }
            print(json.dumps({"kernel": name, "operands": len(inputs), "launches": launches, **found}), flush=True)


if __name__ == "__main__":
    main()
