"""Measures the steps of `benchmarks.own_steps` on the GPUs at hand: a JSON line a run, as `own_steps.jsonl` has them.

    torchrun --nproc-per-node 1 -m benchmarks.measure_own_steps gpt2:one gpt-1.3b:one
    torchrun --nproc-per-node 2 -m benchmarks.measure_own_steps gpt-1.3b:dp gpt-1.3b:zero3 gpt2:dp gpt2:zero3
    torchrun --nproc-per-node 1 -m benchmarks.measure_own_steps --tiny --steps 2 gpt2:one        a rehearsal on a CPU

`step_ms` is the median of steps between two synchronisations, the slowest rank's; `free_ms` a step's share of as many
without any. `python_ms` and `busy_ms` (at least one kernel ran, in a profile) are of each rank. The first steps compile
kernels, and some ten more take Python longer than later ones: `--warm` of them are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import own_steps
from benchmarks.gpt import SHAPES, TINY, Shape
from benchmarks.profile_step import profile

BATCHES = 4


def measured(shape: Shape, config: str, run: str, steps: int, warm: int, device: torch.device) -> dict[str, Any]:
    """The line of a run; every rank gives the same one."""
    ranks, on_gpu = dist.get_world_size(), device.type == "cuda"

    def sync() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        dist.barrier()

    torch.manual_seed(0)
    with device:
        state = {name: tensor.cpu() for name, tensor in shape.model(torch.float32).state_dict().items()}
    batches = shape.batches(BATCHES, shape.batch * ranks, device)
    program = own_steps.compiled({"config": config, "run": run, "gpus": ranks, "overlap": True}, shape)
    trainer = program.launch(state=state, device=device.type, timeout=120)
    for index in range(warm):
        trainer.step(batches[index % BATCHES])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    whole, python = list[float](), list[float]()
    for index in range(steps):
        sync()
        begin = time.perf_counter()
        trainer.step(batches[index % BATCHES])
        python.append(1e3 * (time.perf_counter() - begin))
        if on_gpu:
            torch.cuda.synchronize()
        whole.append(1e3 * (time.perf_counter() - begin))
    sync()
    begin = time.perf_counter()
    for index in range(steps):
        trainer.step(batches[index % BATCHES])
    sync()
    free = 1e3 * (time.perf_counter() - begin) / steps
    profiled = profile(lambda batch: trainer.step(batch).loss, batches[:3], device)
    mine = {
        "times": whole,
        "python_ms": round(statistics.median(python), 2),
        "busy_ms": profiled.get("busy_ms"),
        "mem_gib": round(torch.cuda.max_memory_allocated() / 2**30, 3) if on_gpu else None,
    }
    every: list[dict[str, Any]] = [{}] * ranks
    dist.all_gather_object(every, mine)
    trainer.close()
    times = sorted(map(max, zip(*(rank["times"] for rank in every), strict=True)))
    return {
        "kind": "own_step", "config": config, "run": run, "gpus": ranks, "overlap": True,
        "step_ms": round(statistics.median(times), 2), "step_min": round(times[0], 2),
        "step_p90": round(times[int(0.9 * (len(times) - 1))], 2), "free_ms": round(free, 2),
        "mem_gib": max((rank["mem_gib"] for rank in every), key=lambda held: held or 0.0),
        "calls": sum(1 for _ in program.body.calls()), "collectives": len(program.collectives()),
        "launches": profiled.get("launches"), "busy_ms": [rank["busy_ms"] for rank in every],
        "python_ms": [rank["python_ms"] for rank in every], "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="a shape and one of one, dp, zero3")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small models, on CPUs")
    asked = parser.parse_args()
    device = torch.device("cpu")
    if not asked.tiny:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if asked.tiny else "nccl")
    for name in asked.runs:
        config, run = name.split(":")
        line = measured((TINY if asked.tiny else SHAPES)[config], config, run, asked.steps, asked.warm, device)
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
