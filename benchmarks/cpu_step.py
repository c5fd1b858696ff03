"""How long does a training step take on CPUs, against torch's own way of the same parallelism? Over gloo, 2 ranks.

    python -m benchmarks.cpu_step                           all modes of GPT-2 and Llama, small
    python -m benchmarks.cpu_step --models llama --modes dp pipeline
    python -m benchmarks.cpu_step --tiny                    whether it runs, not how fast

| mode | ours | peer |
|---|---|---|
| dp | dp=2 | DistributedDataParallel |
| zero-3 | dp=2, storage zero 3 | FSDP2, a group a layer |
| tp | tp=2 | DTensor, column and row parallel (Llama: no style fits GPT-2's product of q, k and v) |
| pipeline | pp=2, 1f1b of 4 microbatches | torch.distributed.pipelining, Schedule1F1B (Llama: its head is not tied) |
| eager, compiled | a mesh of one | eager PyTorch, torch.compile |

Hugging Face's models in float32, one thread a rank, AdamW in the step: ours traced, the peers' `fused=True`. Our plans
say nothing of passes: defaults are measured. Both sides start from the same weights; the losses of the first steps must
agree to 1e-4, or the mode fails. Then rounds alternate: a few steps of one side, then of the other, the order turned
around from round to round; a round's time is the slowest rank's. Ratios (ours / peer) are of medians of rounds; the
spread is of the rounds' own ratios. `bytes` is what a side's steps hold at the peak: the largest resident set while it
steps, less what was resident before it was built, of the rank that holds most. `first_step_ratio` is of the first step
alone: modules are imported, our program is compiled, and so is torch.compile's.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["SHARDC_CACHE"] = "off"  # first steps compile
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core a rank, as torchrun has it; before torch is imported

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import shardc
from benchmarks.gpt import GPT2_PLAN
from shardc.torch_compat import hosted_store

RATE = 1e-3
CHECKED = 3  # steps whose losses are compared
MICROBATCHES = 4
MODES = ("dp", "zero-3", "tp", "pipeline", "eager", "compiled")
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
LLAMA_TP = {f"**.{name}_proj.weight": "tp, -" for name in ("q", "k", "v", "gate", "up")}
Batch = Mapping[str, Tensor]
Step = Callable[[Batch], float]


@dataclass(frozen=True)
class Job:
    """The sizes of both models, and how they are measured."""

    models: tuple[str, ...]
    modes: tuple[str, ...]
    rounds: int
    steps: int
    layers: int = 4
    width: int = 256
    seq: int = 128
    vocab: int = 4096
    batch: int = 8

    def model(self, name: str) -> tuple[nn.Module, dict[str, Tensor]]:
        """A model with its weights of seed 0, and a batch."""
        from examples.gpt2 import gpt2
        from examples.llama import llama

        make = {"gpt2": gpt2, "llama": llama}[name]
        model, batch = make(self.batch, self.seq, self.layers, self.vocab, heads=4, width=self.width)
        model.loss_type = "ForCausalLM"  # type: ignore[assignment]  # else each call looks for it, and logs
        return model.train(), batch


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: its step, which gives the loss of the whole batch."""

    step: Step
    close: Callable[[], None] = lambda: None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(LAYERS), default=list(LAYERS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3, help="of a side in a round")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args(arguments)
    job = Job(tuple(asked.models), tuple(asked.modes), asked.rounds, asked.steps)
    if asked.tiny:
        job = Job(job.models, job.modes, 2, 1, layers=2, width=64, seq=16, vocab=128)
    with tempfile.TemporaryDirectory(prefix="shardc-") as folder:
        for world, modes in ((2, ("dp", "zero-3", "tp", "pipeline")), (1, ("eager", "compiled"))):
            if set(modes) & set(job.modes):
                with hosted_store() as variables:
                    mp.spawn(run_rank, (job, world, modes, variables, folder), world)
    return 0


def run_rank(rank: int, job: Job, world: int, modes: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
    """Measure the modes of a job of so many ranks; the first rank prints a line each."""
    torch.set_num_threads(1)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    dist.init_process_group("gloo")
    for name in job.models:
        for mode in [m for m in job.modes if m in modes and not (name == "gpt2" and m in ("tp", "pipeline"))]:
            line = {"model": name, "mode": mode, **compared(job, name, mode)}
            if rank == 0:
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def compared(job: Job, name: str, mode: str) -> dict[str, object]:
    """The ratios of one mode. Raises AssertionError where the two sides do not train alike."""
    makers = {"ours": ours(job, name, mode), "peer": lambda: peer(job, name, mode)}
    _, batch = job.model(name)
    held = {side: peak_bytes(make, batch) for side, make in makers.items()}
    begun: dict[str, float] = {}
    sides: dict[str, Side] = {}
    losses: dict[str, list[float]] = {}
    for side, make in makers.items():
        sides[side] = make()
        start = time.perf_counter()
        first = sides[side].step(batch)
        begun[side] = time.perf_counter() - start
        losses[side] = [first, *(sides[side].step(batch) for _ in range(CHECKED - 1))]
    gap = agreed(losses["ours"], losses["peer"], f"{name}, {mode}")
    rounds: dict[str, list[float]] = {"ours": [], "peer": []}
    for number in range(job.rounds):
        for side in ("ours", "peer")[:: -1 if number % 2 else 1]:
            sides[side].step(batch)  # finds none of its memory in the caches
            dist.barrier()
            start = time.perf_counter()
            for _ in range(job.steps):
                sides[side].step(batch)
            rounds[side].append(largest(time.perf_counter() - start) / job.steps)
    for side in sides.values():
        side.close()
    ratios = [a / b for a, b in zip(rounds["ours"], rounds["peer"], strict=True)]
    median = {side: statistics.median(seconds) for side, seconds in rounds.items()}
    return {
        "ratio": round(median["ours"] / median["peer"], 3),
        "spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "ms": {side: round(seconds * 1e3, 2) for side, seconds in median.items()},
        "bytes_ratio": round(held["ours"] / max(1, held["peer"]), 3),
        "mib": {side: round(size / 2**20, 1) for side, size in held.items()},
        "first_step_ratio": round(begun["ours"] / begun["peer"], 2),
        "loss_gap": gap,
    }


def agreed(ours: Sequence[float], peers: Sequence[float], what: str) -> float:
    """The largest relative difference of losses. Raises AssertionError where it is 1e-4, or where no loss falls."""
    gap = max(abs(a / b - 1) for a, b in zip(ours, peers, strict=True))
    assert gap < 1e-4, f"{what}: the losses differ: {ours} and {peers}"
    assert ours[0] > ours[-1], f"{what}: nothing is trained: {ours}"
    return gap


def largest(value: float) -> float:
    most = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def mean(loss: Tensor) -> float:
    """The loss of the whole batch, from the losses of ranks' equal parts."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


# ---------------------------------------------------------------------- memory
def peak_bytes(make: Callable[[], Side], batch: Batch) -> int:
    """What the steps of a side hold at the peak, beside what was resident before it was built."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _resident("VmRSS")
    side = make()
    for _ in range(2):
        side.step(batch)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the largest resident set is counted anew
    for _ in range(2):
        side.step(batch)
    peak = _resident("VmHWM")
    side.close()
    return int(largest(peak - before))


def _resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


# ---------------------------------------------------------------------- ours
def ours(job: Job, name: str, mode: str) -> Callable[[], Side]:
    """Compiled once; what launches it, each time from the model's first weights."""
    model, batch = job.model(name)
    ranks = dist.get_world_size()
    over_dp = {"inputs": dict.fromkeys(batch, "dp, -")}
    mesh, plan = {
        "dp": (f"dp={ranks}", over_dp),
        "zero-3": (f"dp={ranks}", {**over_dp, "storage": {"zero": 3, "axes": ["dp"]}}),
        "tp": (f"tp={ranks}", {"params": LLAMA_TP if name == "llama" else GPT2_PLAN}),
        "pipeline": (f"pp={ranks}", {"pipeline": {"microbatches": MICROBATCHES, "schedule": "1f1b"}}),
        "eager": ("dp=1", {}),
        "compiled": ("dp=1", {}),
    }[mode]
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    unfused = {**plan, "fuse": False}  # on a host with GPUs, too
    program = shardc.compile(model, batch, mesh=mesh, plan=unfused, optimizer=optimizer)

    def launched() -> Side:
        trainer = program.launch(device="cpu", timeout=120)
        return Side(lambda batch: float(trainer.step(batch).loss), trainer.close)

    return launched


# ---------------------------------------------------------------------- peers
def peer(job: Job, name: str, mode: str) -> Side:
    model, _ = job.model(name)
    if mode == "pipeline":
        return pipelined(model, job)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    split = mode in ("dp", "zero-3")
    run: Any = model
    if mode == "dp":
        run = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif mode == "zero-3":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.get_submodule(LAYERS[name]).children():
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif mode == "tp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        names = {f"self_attn.{n}_proj": ColwiseParallel() for n in "qkv"} | {"self_attn.o_proj": RowwiseParallel()}
        names |= {f"mlp.{n}_proj": ColwiseParallel() for n in ("gate", "up")} | {"mlp.down_proj": RowwiseParallel()}
        mesh = init_device_mesh("cpu", (ranks,))
        for layer in model.get_submodule(LAYERS[name]).children():
            parallelize_module(layer, mesh, names)  # type: ignore[arg-type]
    elif mode == "compiled":
        run = torch.compile(model)
    # Parameters that are DTensors and others cannot be updated by one fused call: torch's own loop is.
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=None if mode == "tp" else True)

    def step(batch: Batch) -> float:
        if split:
            batch = {name: x.chunk(ranks)[rank] for name, x in batch.items()}
        loss: Tensor = run(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return mean(loss) if split else float(loss.detach())

    return Side(step)


class Stage(nn.Module):
    """Half of Llama's layers, with the embedding before or the head behind them."""

    def __init__(self, model: Any, rank: int, ranks: int) -> None:
        super().__init__()
        layers = model.model.layers
        size = len(layers) // ranks
        self.embed = model.model.embed_tokens if rank == 0 else None
        self.layers = nn.ModuleList(layers[rank * size : (rank + 1) * size])
        self.rotary = model.model.rotary_emb
        self.norm, self.head = (model.model.norm, model.lm_head) if rank == ranks - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).unsqueeze(0)
        rotary = self.rotary(x, positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=rotary)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def pipelined(model: nn.Module, job: Job) -> Side:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, ranks = dist.get_rank(), dist.get_world_size()
    module = Stage(model, rank, ranks)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())

    stage = PipelineStage(module, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, fused=True)

    def step(batch: Batch) -> float:
        losses: list[Tensor] = []
        last = rank == ranks - 1
        arguments = (batch["input_ids"],) if rank == 0 else ()
        schedule.step(*arguments, target=batch["labels"] if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.broadcast(loss, ranks - 1)  # as ours says the loss on all ranks
        return float(loss)

    return Side(step)


if __name__ == "__main__":
    sys.exit(main())
