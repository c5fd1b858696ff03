"""How long does a training step take, against eager torch, torch.compile, DDP and FSDP2 in the same processes?

    python -m benchmarks.train_step                               all GPUs of this machine: GPT-2 and gpt-1.3b
    python -m benchmarks.train_step --shapes gpt2 --runs ours-dp ddp
    python -m benchmarks.train_step --gpus 1 --runs eager compiled ours-one-fused
    python -m benchmarks.train_step --device cpu --tiny           a rehearsal over gloo; its times mean nothing

One JSON line for the circumstances, one a run, one for the ratios of step times (ours / peer) of a shape.

The same for all: the model's code and first weights, the tokens, sequences a GPU, sequence length, cuDNN attention on
GPUs. The optimizer is part of the step: ours is in the graph, the peers' is torch's `fused=True`. Tensor parallelism
gets as many sequences a GPU as data parallelism, so that every ratio compares equal work a GPU. Two precisions:

    pure      parameters, gradients and AdamW's state in bfloat16
    master    all of these in float32, compute in bfloat16: ours by the plan's `precision`, FSDP2 by its
              MixedPrecisionPolicy (gradients reduced in float32), eager torch and DDP by autocast

A step is timed between two synchronisations, and the slowest rank counts; `free_ms` is the mean of as many steps
without any between them. MFU = FLOPs of the model a GPU / median step time / 989 TFLOP/s (an H200's dense bf16), with
the FLOPs that `Shape.flops` counts. Losses are of the first 20 steps; `loss_gap` is the largest relative difference
from those of `reference`: eager torch on one GPU, over the whole batch, with the optimizer that ours was traced from.
`float32_gap` is that from those of `float32`, which is run if it is asked for: the same with nothing rounded.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpt import SHAPES, TINY, Shape
from benchmarks.profile_step import profile
from benchmarks.training_runs import ALONE, ONE, RATE, RUNS, WHOLE, Run, Setting, whole_loss

PEAK = 989e12  # FLOP/s
LOSSES = 20  # steps whose losses are kept; they also warm up


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--runs", nargs="+", choices=RUNS, help="all that the number of GPUs allows")
    parser.add_argument("--precision", nargs="+", choices=("pure", "master"), default=["pure", "master"])
    parser.add_argument("--steps", type=int, default=20, help="that are timed, after the 20 of the losses")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=0, help="all of them by default; on the CPU, 2 processes")
    parser.add_argument("--tiny", action="store_true", help="small models, which any machine can run")
    parser.add_argument("--profile", action="store_true", help="also say where the time of each run goes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    asked = options(argv)
    if "RANK" not in os.environ:
        ranks = asked.gpus or (torch.cuda.device_count() if asked.device == "cuda" else 2)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.call([*command, "-m", "benchmarks.train_step", *(argv or sys.argv[1:])], env=env)
    device = joined(asked.device)
    if leads():
        say(circumstances(device))
    for name in asked.shapes:
        for precision in asked.precision:
            measure_shape((TINY if asked.tiny else SHAPES)[name], precision, asked, device)
    dist.destroy_process_group()
    return 0


def joined(kind: str) -> torch.device:
    """This process in its job: its device."""
    device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None)
    return device


def leads() -> bool:
    return dist.get_rank() == 0


def say(row: dict[str, object]) -> None:
    print(json.dumps(row), flush=True)


def circumstances(device: torch.device) -> dict[str, object]:
    on_gpu = device.type == "cuda"
    return {
        "gpus": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "learning_rate": RATE,
        "attention": "cudnn" if on_gpu else "torch's choice; ours: reference",
        "optimizer": "AdamW: ours in the graph, peers fused=True, reference foreach",
        "mfu": "3 * tokens * (2 * (12 layers width^2 + vocab width) + 2 layers seq width) / GPUs / median / 989e12",
    }


def measure_shape(shape: Shape, precision: str, asked: argparse.Namespace, device: torch.device) -> None:
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    dtype = torch.float32 if precision == "master" else torch.bfloat16
    with device:
        state = {name: t.cpu() for name, t in shape.model(dtype).state_dict().items()}
    batches = shape.batches(LOSSES + 2 * asked.steps, shape.batch * ranks, device)
    losses: dict[str, list[float]] = {}
    medians: dict[str, float] = {}
    runs = asked.runs or [name for name in RUNS if name != "float32" and (ranks == 1 or name not in ONE)]
    for name in runs:
        setting = Setting(shape, state, batches[0], device, ranks, precision == "master")
        sequences = shape.batch * (1 if name in ALONE else ranks)
        clear(device)
        with cudnn_attention(device) if name != "float32" else nullcontext():
            run = RUNS[name][0](setting)
            losses[name] = [whole_loss(run, run.step(batch), ranks) for batch in batches[:LOSSES]]
            row, median = timed(run, batches[LOSSES:], device)
            row |= {"mfu": mfu(shape, sequences, 1 if name in (*ALONE, *WHOLE) else ranks, median)}
            row |= {"tokens_per_s": round(sequences * shape.seq / median)}
            if asked.profile:
                row |= {"profile": profile(run.step, batches[:3], device)}
            run.close()
        medians[name] = median
        gaps = {"loss_gap": "reference", "float32_gap": "float32"}
        if name in ALONE and ranks > 1:  # other data
            gaps = dict.fromkeys(gaps, "")
        row |= {key: gap(losses[name], losses.get(to, ())) for key, to in gaps.items()}
        about = {"compile_s": run.compile_s} | run.about if run.compile_s is not None else {}
        first, last = losses[name][0], losses[name][-1]
        head = {"shape": shape.name, "precision": precision, "run": name, "sequences": sequences, "seq": shape.seq}
        del run
        if leads():
            say({**head, **row, **about, "loss_1": first, "loss_20": last})
    if leads():
        found = {
            f"{name} / {peer}": round(medians[name] / medians[peer], 3)
            for name in runs
            for peer in RUNS[name][1]
            if peer in medians
        }
        say({"shape": shape.name, "precision": precision, "ratios": found})


def gap(losses: Sequence[float], others: Sequence[float]) -> float | None:
    return max((abs(a / b - 1) for a, b in zip(losses, others, strict=False)), default=None)


def cudnn_attention(device: torch.device) -> AbstractContextManager[None]:
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION]) if device.type == "cuda" else nullcontext()


def clear(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(run: Run, batches: Sequence[dict[str, Tensor]], device: torch.device) -> tuple[dict[str, object], float]:
    """Half of the batches one at a time, half in one go; the median in seconds beside what is printed."""
    half = len(batches) // 2
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    each: list[float] = []
    for batch in batches[:half]:
        synchronize(device)
        start = time.perf_counter()
        run.step(batch)
        synchronize(device)
        each.append(time.perf_counter() - start)
    start = time.perf_counter()
    for batch in batches[half:]:
        run.step(batch)
    synchronize(device)
    found = torch.tensor([*each, (time.perf_counter() - start) / half], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    *each, free = found.tolist()
    median = statistics.median(each)
    row: dict[str, object] = {
        "median_ms": round(median * 1e3, 2),
        "min_ms": round(min(each) * 1e3, 2),
        "p90_ms": round(statistics.quantiles(each, n=10)[-1] * 1e3, 2),
        "free_ms": round(free * 1e3, 2),
    }
    if device.type == "cuda":
        peaks = torch.tensor([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()], device=device)
        dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
        row |= dict(zip(("peak_gib", "reserved_gib"), (round(n / 2**30, 2) for n in peaks.tolist()), strict=True))
    return row, median


def mfu(shape: Shape, sequences: int, gpus: int, seconds: float) -> float:
    return round(shape.flops(sequences) / gpus / seconds / PEAK, 4)


if __name__ == "__main__":
    sys.exit(main())
