"""What a fused call costs the CPU: microseconds of Python for each of many calls of a tiny kernel, on a GPU.

`op` goes through torch's dispatcher, `call` through what a program that is run call by call does, `prepared` is what a
program's code holds once it is launched on a device. `placed` is the same where results and sums over rows have places
in an arena, and `fixed` where operands have too, as between two kernels. `bare` are the C functions of its launches
alone, `triton` is `kernel[grid](*arguments)` and `runner` Triton's own compiled kernel, both without allocations, of
the first launch.

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

from kernels_triton.gate.corpus import CORPUS
from kernels_triton.generated import inplace_call
from kernels_triton.generated.launcher import launcher
from kernels_triton.generated.op import FUSED
from kernels_triton.ir.text import text
from kernels_triton.launch import launch
from shardc.runtime.execute.arena import SCRATCH

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
            outputs = [torch.empty(one.shape, dtype=one.dtype, device=device) for one in kernel.outputs]
            slots, places = range(len(inputs)), dict(enumerate(outputs))
            scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
            prepared = inplace_call.prepare(slots, line, {}, device)
            placed = inplace_call.prepare(slots, line, places, device, lambda size, held=scratch: held)
            fixed = inplace_call.prepare(inputs, line, places, device, lambda size, held=scratch: held)
            assert prepared is not None
            assert placed is not None
            assert fixed is not None
            for one in (prepared, placed, fixed):
                one(inputs)  # checks, and compiles the first time
            ready = launcher(kernel).ready[device.index]
            made = ready.calls(inputs, outputs)[0]
            options, grid = launch.compile_options(made[4], made[5]), (*made[2], 1, 1)[:3]
            compiled = launch.kernel(made[1])[grid](*made[3], **options)
            bare = [
                (repeat, [x.data_ptr() for x in one[3]])
                for repeat, one in zip(ready.direct_launches, ready.calls(inputs, outputs), strict=False)
                if repeat is not None
            ]
            stream = torch.cuda.current_stream().cuda_stream
            found = {
                "op": cost(lambda i=inputs, t=line: FUSED(i, t), calls),
                "call": cost(lambda i=inputs, t=line: inplace_call.run(i, t), calls),
                "prepared": cost(lambda p=prepared, i=inputs: p(i), calls),
                "placed": cost(lambda p=placed, i=inputs: p(i), calls),
                "fixed": cost(lambda p=fixed, i=inputs: p(i), calls),
                "bare": cost(lambda b=bare, s=stream: [run(s, *at) for run, at in b], calls),
                "triton": cost(lambda m=made, g=grid, o=options: launch.kernel(m[1])[g](*m[3], **o), calls),
                "runner": cost(lambda r=compiled[grid], a=made[3]: r(*a), calls),
            }
            about = {"kernel": name, "operands": len(inputs), "results": len(outputs), "launches": launches}
            print(json.dumps({**about, **found}), flush=True)


if __name__ == "__main__":
    main()
