"""Are plans predicted in the order in which they are measured? On CPUs with gloo, in one minute, on this machine.

    python -m benchmarks.plan_order                 4 ranks where there are 8 cores, 2 otherwise
    python -m benchmarks.plan_order --tiny          a model of two small layers: whether it runs, not how fast

The machine is calibrated as `shardc calibrate --device cpu` does it, with a core a rank: once before the steps, and
once after them, since hosts change their speed. All processes keep the memory that they free (glibc's thresholds): else
a step faults its pages in anew. Ten plans of one model are compiled, and each predicted on that hardware. Their steps
are measured in rounds: each round takes a few steps of every plan, in another order, so that what else runs on the
machine hits them alike. A JSON line a plan, and in the end
Spearman's rank correlation of predicted and measured milliseconds: of the medians over all rounds, and of each round
alone (the least and the median of those). Plans that take nearly the same time swap places from round to round; so it
also says how many pairs differ by more than 5 % as measured, and how many of these are in the right order. `alone` is a
step of one rank, which has no collectives.

    {"plan": "tp", "mesh": "tp=4", "predicted_ms": 212.1, "measured_ms": 220.4, "spread_ms": [218.0, 231.9], ...}
    {"kind": "order", "rank_correlation": 0.98, "of_rounds": {"least": 0.93, "median": 0.98},
     "pairs": {"differ": 38, "right": 38}, ...}
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a core a rank, as torchrun has it; before torch is imported
# Ranks keep the memory that they free: without, a tenth of a step is page faults.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**36))
os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(2**36))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import shardc
from benchmarks.measured_models import Sizes
from shardc.plan.hardware import read_file
from shardc.runtime.calibrate.calibrate import Machine, hardware_text, measure, title_of
from shardc.runtime.calibrate.rows import Row
from shardc.torch_compat import hosted_store

COLUMNS = ("q", "k", "v", "up")
TENSOR_PARALLEL = {"tok.weight": "tp, -", "head.weight": "tp, -"} | {f"**.{n}.weight": "tp, -" for n in COLUMNS}
SEQUENCE = {"activations": {"blocks.*": "-, tp, -", "tok": "-, tp, -"}}
RATE = 1e-4
ALIKE = 0.05  # two plans that differ by no more take the same time, as noisy as machines are


@dataclass(frozen=True)
class Job:
    """The model, the batch, and how it is measured."""

    sizes: Sizes
    batch: int
    world: int
    rounds: int
    steps: int
    calibration: float

    @classmethod
    def of(cls, world: int, tiny: bool, rounds: int, calibration: float) -> Job:
        if tiny:
            return cls(Sizes(2, 64, 4, 4, 256, 32, 128), 8, world, rounds, 1, calibration)
        return cls(Sizes(4, 384, 8, 8, 1536, 128, 4096), 16, world, rounds, 2, calibration)

    def model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        return self.sizes.model().float()

    def tokens(self) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1)
        shape = self.batch, self.sizes.sequence
        return {
            name: torch.randint(self.sizes.vocabulary, shape, generator=generator) for name in ("tokens", "targets")
        }


def rows_over(*axes: str) -> dict[str, str]:
    return dict.fromkeys(("tokens", "targets"), ", ".join(axes))


def plans(world: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Ten of them, by name: the mesh and the plan."""
    data, tensors = {"inputs": rows_over("dp", "-")}, {"params": TENSOR_PARALLEL}
    sharded = {**data, "storage": {"zero": 3, "axes": ["dp"]}}
    some: dict[str, tuple[str, dict[str, Any]]] = {
        "dp": (f"dp={world}", {**data, "bucket": True}),
        "zero-3": (f"dp={world}", sharded),
        "zero-3, as many microbatches as rows": (f"dp={world}", {**sharded, "accumulate": 16 // world}),
        "tp": (f"tp={world}", tensors),
        "tp + sp": (f"tp={world}", {**tensors, **SEQUENCE}),
        "cp": (f"cp={world}", {"inputs": rows_over("-", "cp"), "bucket": True}),
        "pp, 1 microbatch": (f"pp={world}", {"pipeline": {"microbatches": 1, "schedule": "gpipe"}}),
        "pp, 2 microbatches": (f"pp={world}", {"pipeline": {"microbatches": 2, "schedule": "gpipe"}}),
    }
    if world == 2:
        some["pp, 8 microbatches"] = "pp=2", {"pipeline": {"microbatches": 8, "schedule": "1f1b"}}
        some["dp, unbucketed, 4 accumulated"] = "dp=2", {**data, "accumulate": 4, "bucket": False}
    else:
        half = world // 2
        some["dp x tp"] = f"dp=2, tp={half}", {**data, **tensors}
        some["pp x dp"] = f"pp=2, dp={half}", {**data, "pipeline": {"microbatches": 4, "schedule": "1f1b"}}
    return some


def plans_of(job: Job) -> dict[str, tuple[str, dict[str, Any]]]:
    return plans(job.world) if job.world > 1 else {"alone": ("dp=1", {"inputs": rows_over("dp", "-")})}


def program_of(job: Job, mesh: str, plan: dict[str, Any]) -> Any:
    model = job.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    unfused = {**plan, "fuse": False}  # on a host with GPUs, too
    return shardc.compile(model, job.tokens(), mesh=mesh, plan=unfused, optimizer=optimizer)


def predicted_lines(job: Job, hardware: Path) -> dict[str, dict[str, Any]]:
    """A line a plan, by its name."""
    machine, lines = read_file(hardware), dict[str, dict[str, Any]]()
    for name, (mesh, plan) in plans_of(job).items():
        predicted = program_of(job, mesh, plan).predict(machine)
        kinds = {kind: round(ms, 3) for kind, ms in predicted.kinds_ms.items() if ms}
        lines[name] = {
            "kind": "plan", "plan": name, "mesh": mesh, "predicted_ms": round(predicted.step_ms, 3),
            "exposed_ms": round(predicted.exposed_total_ms, 3), "bubble": round(predicted.bubble, 4), "kinds_ms": kinds,
        }  # fmt: skip
    return lines


# ---------------------------------------------------------------------- one process a rank
def run_rank(rank: int, job: Job, file: str, variables: Mapping[str, str]) -> None:
    """Compile all plans, and measure their steps in rounds; the first rank writes the milliseconds of each."""
    torch.set_num_threads(1)
    os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world))
    os.environ["LOCAL_WORLD_SIZE"] = str(job.world)
    dist.init_process_group("gloo")
    batch, wanted = job.tokens(), plans_of(job)
    steps: dict[str, Callable[[], object]] = {}
    trainers: list[Any] = []
    for name, (mesh, plan) in wanted.items():
        trainer = program_of(job, mesh, plan).launch(device="cpu", timeout=120)
        trainers.append(trainer)
        steps[name] = lambda trainer=trainer: trainer.step(batch)
    measured: dict[str, list[float]] = {name: [] for name in wanted}
    for step in steps.values():  # opens connections, and allocates
        step()
    for number in range(job.rounds):
        names = list(wanted)[:: -1 if number % 2 else 1]
        for name in names:
            steps[name]()  # the first after another plan's finds none of its memory in the caches
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(job.steps):
                steps[name]()
            dist.barrier()
            measured[name].append((time.perf_counter() - begin) / job.steps * 1e3)
    if rank == 0:
        Path(file).write_text(json.dumps(measured))
    for trainer in trainers:
        trainer.close()
    dist.barrier()
    dist.destroy_process_group()


def measured_steps(job: Job, folder: Path) -> dict[str, list[float]]:
    """Milliseconds of each round, by the plan."""
    file = folder / f"steps{job.world}.json"
    with hosted_store() as variables:
        mp.spawn(run_rank, (job, str(file), variables), job.world)
    return json.loads(file.read_text())


def calibrated(job: Job, file: Path) -> Sequence[Row]:
    rows = measure(Machine("cpu", job.world, job.calibration / 2), file)
    assert rows is not None
    return rows


def joined(predicted: Mapping[str, Mapping[str, Any]], measured: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    return [
        {
            **line,
            "measured_ms": round(median(samples), 3), "spread_ms": [round(min(samples), 3), round(max(samples), 3)],
            "ratio": round(line["predicted_ms"] / median(samples), 3), "rounds": [round(ms, 3) for ms in samples],
        }
        for name, line in predicted.items() for samples in [measured[name]]
    ]  # fmt: skip


# ---------------------------------------------------------------------- ranks
def ranks_of(values: Sequence[float]) -> list[float]:
    """1 for the least; equal ones share the mean of their ranks."""
    order = sorted(values)
    return [(order.index(v) + len(order) - order[::-1].index(v) + 1) / 2 for v in values]


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: Pearson's of the ranks."""
    x, y = (torch.tensor(ranks_of(values), dtype=torch.float64) for values in (a, b))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x.norm() * y.norm()).clamp_min(1e-300))


def order_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The correlation over the medians, and over the rounds one by one."""
    predicted = [line["predicted_ms"] for line in lines]
    each = [
        rank_correlation(predicted, [line["rounds"][number] for line in lines])
        for number in range(len(lines[0]["rounds"]))
    ]
    ratios = [line["ratio"] for line in lines]
    differ = [(a, b) for a in lines for b in lines if a["measured_ms"] * (1 + ALIKE) < b["measured_ms"]]
    right = [(a, b) for a, b in differ if a["predicted_ms"] < b["predicted_ms"]]
    return {
        "kind": "order",
        "plans": len(lines),
        "rank_correlation": round(rank_correlation(predicted, [line["measured_ms"] for line in lines]), 4),
        "of_rounds": {"least": round(min(each), 4), "median": round(median(each), 4), "rounds": len(each)},
        "pairs": {"differ": len(differ), "right": len(right)},
        "predicted_over_measured": {"least": min(ratios), "most": max(ratios)},
        "predicted": [line["plan"] for line in sorted(lines, key=lambda line: line["predicted_ms"])],
        "measured": [line["plan"] for line in sorted(lines, key=lambda line: line["measured_ms"])],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--world", type=int, default=4 if cores >= 8 else 2, choices=(2, 4, 8))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the calibrations, both")
    parser.add_argument("--hardware", type=Path, help="a file of this machine; without it, it is calibrated")
    parser.add_argument("--keep", type=Path, help="a folder for the file of hardware and the measurements")
    options = parser.parse_args(arguments)
    job = Job.of(options.world, options.tiny, options.rounds, options.seconds)
    begin = time.perf_counter()

    def write(line: Mapping[str, Any]) -> None:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="shardc-") as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        hardware = options.hardware or folder / "here.yaml"
        rows = list(calibrated(job, folder / "before.jsonl")) if options.hardware is None else []
        alone = replace(job, world=1, rounds=3)
        jobs = {job: measured_steps(job, folder) for job in (alone, job)}
        if options.hardware is None:
            rows += calibrated(job, folder / "after.jsonl")
            hardware.write_text(hardware_text(rows, title_of(rows[0])))
        about = {"cores": cores, "ranks": job.world, "torch": torch.__version__, "model": str(job.sizes)}
        write({"kind": "job", **about, "batch": job.batch})
        for of, measured in jobs.items():
            lines = joined(predicted_lines(of, hardware), measured)
            for line in lines:
                write(line)
        write({**order_of(lines), "seconds": round(time.perf_counter() - begin, 1)})


if __name__ == "__main__":
    main()
