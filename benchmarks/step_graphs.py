"""GPT-2 small trained with and without CUDA graphs: the same bits, and milliseconds of a step, as JSON lines.

    python -m benchmarks.step_graphs [--batches 1 4 16] [--sequence 256 1024] [--steps 30] [--rounds 3] [--tiny]
    torchrun --nproc-per-node 2 -m benchmarks.step_graphs ...      dp over all GPUs, `--zero 3` for sharded state

Of each setting, a first line compares `CHECKED` steps: `equal` with those without graphs, bit by bit (losses, weights
and AdamW's state), and `repeats`, whether these equal themselves when run again. Where kernels of attention add in no
fixed order, they do not; torch is then asked for deterministic ones, for this line. A second line has least and median
times of a step, over rounds that alternate, and the most memory that was reserved. The host's time is that of the call.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import shardc
from benchmarks.gpt import Shape
from benchmarks.own_steps import PRECISION
from benchmarks.train_step.setting import optimizer_of
from shardc.runtime.train.trainer import Trainer
from tests.ports import free_port

CHECKED = 10
UNMEASURED = 8  # steps: three run, one is captured
SMALL = Shape("gpt2-small", layers=12, width=768, heads=12, seq=1024, vocab=50304, batch=16)
TINY = Shape("tiny", layers=2, width=64, heads=4, seq=32, vocab=256, batch=2)


@dataclass(frozen=True)
class Setting:
    shape: Shape
    device: torch.device
    ranks: int = 1
    zero: int = 0

    def launch(self, graphs: bool) -> Trainer:
        with torch.device("meta"):
            model = self.shape.model(torch.float32)
            ids = torch.zeros(self.shape.batch * self.ranks, self.shape.seq, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids}
        plan: dict[str, Any] = {"fuse": True, "precision": PRECISION}
        if self.ranks > 1:
            plan |= {"inputs": dict.fromkeys(batch, "dp, -"), "bucket": True}
        if self.zero:
            plan["storage"] = {"zero": self.zero, "axes": ["dp"]}
        program = shardc.compile(model, batch, mesh=f"dp={self.ranks}", plan=plan, optimizer=optimizer_of(model))
        torch.manual_seed(0)
        weights = {name: 0.02 * torch.randn(p.shape) for name, p in model.named_parameters()}
        weights = {
            name: torch.ones_like(w) if "norm" in name and "weight" in name else w for name, w in weights.items()
        }
        return program.launch(state=weights, timeout=120, device=self.device.type, check_every=0, graphs=graphs)

    def batches(self, count: int) -> list[dict[str, Tensor]]:
        return self.shape.batches(count, self.shape.batch * self.ranks, self.device)

    def trained(self, graphs: bool) -> tuple[list[Tensor], str]:
        """Losses and the state after some steps, and whether they were replayed, or why not."""
        with self.launch(graphs) as trainer:
            losses = [trainer.step(batch).loss for batch in self.batches(CHECKED)]
            return [x.cpu() for x in (*losses, *trainer.state.values())], state_of(trainer)

    def timed(self, graphs: bool, steps: int) -> tuple[list[float], list[float], int, str]:
        """Milliseconds of each step and of the host in it, bytes reserved at most, and whether it was replayed."""
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with self.launch(graphs) as trainer:
            batches = self.batches(4)
            for k in range(UNMEASURED):
                trainer.step(batches[k % 4])
            self.synchronize()
            whole: list[float] = []
            host: list[float] = []
            for k in range(steps):
                start = time.perf_counter()
                trainer.step(batches[k % 4])
                host.append((time.perf_counter() - start) * 1e3)
                self.synchronize()
                whole.append((time.perf_counter() - start) * 1e3)
            reserved = torch.cuda.max_memory_reserved() if self.device.type == "cuda" else 0
            return whole, host, reserved, state_of(trainer)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def state_of(trainer: Trainer) -> str:
    graph: Any = trainer.engine.graph  # type: ignore[attr-defined]
    return "without graphs" if graph is None else "replayed" if graph.captured else f"not captured: {graph.refusal}"


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def compared(setting: Setting) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for deterministic in (True,) if setting.ranks > 1 else (False, True):  # all ranks decide alike
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        plain, again, (replayed, how) = setting.trained(False)[0], setting.trained(False)[0], setting.trained(True)
        off = max(float((x.double() - y.double()).abs().max()) for x, y in zip(replayed, plain, strict=True))
        losses = [float(x) for x in (*plain[:CHECKED:3], *replayed[:CHECKED:3])]
        row = {"deterministic": deterministic, "repeats": same(again, plain), "equal": same(replayed, plain)}
        row |= {"largest_difference": off, "graphs": how, "losses": losses}
        if row["repeats"]:
            break
    torch.use_deterministic_algorithms(False)
    return row


def measured(setting: Setting, steps: int, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    times: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
    for _ in range(rounds):
        for graphs, (whole, host) in times.items():
            new_whole, new_host, reserved, how = setting.timed(graphs, steps)
            whole += new_whole
            host += new_host
            prefix = "graph" if graphs else "plain"
            row |= {f"{prefix}_gib": reserved / 2**30, f"{prefix}_how": how}
    for graphs, (whole, host) in times.items():
        prefix = "graph" if graphs else "plain"
        row |= {f"{prefix}_ms": statistics.median(whole), f"{prefix}_least_ms": min(whole)}
        row |= {f"{prefix}_host_ms": statistics.median(host)}
    return {**row, "ratio": row["graph_ms"] / row["plain_ms"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--sequence", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--zero", type=int, default=0, choices=(0, 1, 2, 3))
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too, where nothing is captured")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", **place}
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for seq in options.sequence:
        for batch in options.batches:
            base = TINY if options.tiny else SMALL
            shape = Shape(base.name, base.layers, base.width, base.heads, seq, base.vocab, batch)
            setting = Setting(shape, device, ranks, options.zero)
            about = {"model": base.name, "ranks": ranks, "zero": options.zero, "batch": batch, "sequence": seq}
            for act in (compared, partial(measured, steps=options.steps, rounds=options.rounds)):
                row = act(setting)
                if rank == 0:
                    print(json.dumps(about | row), flush=True)


if __name__ == "__main__":
    main()
