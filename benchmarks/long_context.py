"""How long does a step of a long sequence take, against torch's context parallelism and a ring written by hand?

    python -m benchmarks.long_context --out "$OUT/long.jsonl"    4 GPUs of one machine, 32k and 128k tokens; some 200 s
    python -m benchmarks.long_context --lengths 131072 --runs ours-ring hand-ring --seconds 120
    python -m benchmarks.long_context --device cpu --tiny        a rehearsal over gloo; its times mean nothing
    python -m benchmarks.long_context --table long.jsonl         the table of what was written
    python -m benchmarks.long_context --predict h100             our steps as predicted on some hardware, without GPUs

One JSON line for the circumstances, one when a run has begun and one when it is measured, one for the ratios of a
length, then the table. After `--seconds` no run is begun and no round: what there is by then is written.

The same for all: `transformers`' Llama with Llama-3-8B's sizes and two of its 32 layers; a vocabulary of 8,016, which
is 2/32 of 128,256, so that the head has the share of the work that it has in the whole model, and no run needs a loss
in chunks; one sequence; bfloat16; the first weights and the tokens; nothing recomputed, but keys that are sent again
for backward where a strategy does; forward and backward, and the sum of the gradients over the ranks, without an
optimizer. Labels are shifted in the step. cuDNN computes attention, unless a run's name says flash.

    ours-S              the plan says context: {attention: S}, fuse, bucket; `auto` in its lines is what that chooses,
                        and the table says which run it is
    torch-R             `torch.distributed.tensor.experimental.context_parallel`, load balanced, keys rotated by R
    hand-ring, -gather  `long_context_peers.py`: one opaque op for attention
    -eager              not compiled. All other peers' layers and their loss are compiled by torch.compile, one by one,
                        without graph breaks, and each gradient is summed as soon as backward has it
    -repeated           keys and values as often as query heads: tried where torch takes no others

Runs take turns: in each round each makes a step that is not counted, and some that are, between two synchronisations;
the slowest rank counts. `exposed_ms` is the time of a step in which a collective ran and no other kernel did, by
torch.profiler, on the rank where it is longest: it has the time in which ranks wait for each other. `peak_gib` is what
a run allocated beyond what others hold. `gaps` are relative errors (norms) of the loss and of some gradients from those
of `reference`: the unsharded model on each GPU, checkpointed, in the same precision; `last_gaps` are those after all
rounds, when every other run has run. A run with a gap above 5 % is no run. `predicted_ms` is what
`program.predict()` says by the plan's hardware.

torch's context parallelism knows no kernel of the CPU: a rehearsal says that it failed, and runs the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.long_context_runs import INSTEAD, OPTIONAL, RUNS, Run, Setting, program_of, reference, slice_of
from benchmarks.profile_step import profile
from benchmarks.train_step.job import clear, joined, leads, synchronize

TOLERANCE = 0.05  # of what a gradient in bfloat16 may differ by
LENGTHS, TINY = (32768, 131072), (64,)
ROUNDS = 3


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, help="tokens of the sequence: 32768 and 131072")
    parser.add_argument("--runs", nargs="+", choices=(*RUNS, *OPTIONAL), default=list(RUNS))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, help="timed in a round: 3, or of long sequences 2")
    parser.add_argument("--seconds", type=float, default=235, help="after which nothing new is begun")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--gpus", type=int, default=0, help="all of them by default; on the CPU, 4 processes")
    parser.add_argument("--tiny", action="store_true", help="a small model, which any machine can run")
    parser.add_argument("--out", type=Path, help="also write the lines to this file")
    parser.add_argument("--predict", metavar="NAME|FILE", help="predict our steps on it, and do nothing else")
    parser.add_argument("--table", type=Path, help="print the table of such a file, and do nothing else")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    asked = options(argv)
    if asked.table is not None:
        print("\n".join(table([json.loads(line) for line in asked.table.read_text().splitlines()])))
        return 0
    if asked.predict is not None:
        predict(asked)
        return 0
    if "RANK" not in os.environ:
        ranks = asked.gpus or (torch.cuda.device_count() if asked.device == "cuda" else 4)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        return subprocess.call([*command, "-m", "benchmarks.long_context", *(argv or sys.argv[1:])], env=env)
    return Measured(asked).all()


def predict(asked: argparse.Namespace) -> None:
    for tokens in asked.lengths or (TINY if asked.tiny else LENGTHS):
        for strategy in ("all_to_all", "all_gather", "ring"):
            config = slice_of(asked.layers, asked.tiny)
            program = program_of(config, torch.bfloat16, tokens, asked.gpus or 4, strategy)
            step_ms = round(program.predict(asked.predict).step_ms, 1)
            print(json.dumps({"tokens": tokens, "run": f"ours-{strategy}", "predicted_ms": step_ms}), flush=True)


class Measured:
    """What one process measures, and the first of them writes."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.end = asked, time.monotonic() + asked.seconds
        self.device = joined(asked.device)
        self.rows: list[dict[str, object]] = []
        if asked.out is not None and leads():
            asked.out.write_text("")

    def all(self) -> int:
        self.say(self.circumstances())
        for length in self.asked.lengths or (TINY if self.asked.tiny else LENGTHS):
            self.length(length)
        if leads():
            print("\n".join(table(self.rows)), flush=True)
        dist.destroy_process_group()
        return 0

    def say(self, row: dict[str, object]) -> None:
        self.rows.append(row)
        if leads():
            print(json.dumps(row), flush=True)
            if self.asked.out is not None:
                with self.asked.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")

    def circumstances(self) -> dict[str, object]:
        on_gpu = self.device.type == "cuda"
        return {
            "gpus": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
            "layers": self.asked.layers,
            "attention": "cuDNN" if on_gpu else "reference",
        }

    def over(self) -> bool:
        """Whether the time is up, by the first rank's clock."""
        said = torch.tensor([float(time.monotonic() > self.end)], device=self.device)
        dist.broadcast(said, 0)
        return bool(said.item())

    # ------------------------------------------------------------------ one length
    def length(self, tokens: int) -> None:
        if self.over():
            return
        torch.compiler.reset()
        torch._dynamo.config.recompile_limit = 64  # of one layer's code, of which each compiled run has entries
        setting = Setting.of(slice_of(self.asked.layers, self.asked.tiny), tokens, self.device)
        truth = self.truth(setting)
        runs: dict[str, Run] = {}
        rows: dict[str, dict[str, object]] = {}
        times: dict[str, list[float]] = {}
        asked = list(self.asked.runs)
        while asked:
            name = asked.pop(0)
            if self.over():
                self.say({"tokens": tokens, "run": name, "failed": f"not begun in {self.asked.seconds:.0f} s"})
                continue
            started = time.monotonic()
            run, row = self.begin(name, setting, truth)
            row = {"tokens": tokens, "run": name, "begun_s": round(time.monotonic() - started, 1), **row}
            if run is None:
                asked = [INSTEAD[name], *asked] if name in INSTEAD and self.device.type == "cuda" else asked
            else:
                runs[name], rows[name], times[name] = run, row, self.timed(run, setting.batch)
                row |= spent(tokens, times[name])
            self.say(row)
        for _ in range(self.asked.rounds - 1):
            for name, run in runs.items():
                if self.over():
                    break
                times[name] += self.timed(run, setting.batch)
        medians = {name: statistics.median(found) for name, found in times.items()}
        for name, run in runs.items():
            last = gaps(run.found(run.step(setting.batch)), truth)
            rows[name] |= {**spent(tokens, times[name]), "last_gaps": last}
        for name, run in runs.items():
            if not self.over():
                rows[name] |= self.profiled(run, setting.batch)
            self.say(rows[name])
            run.close()
        self.say({"tokens": tokens, "ratios": ratios(rows, medians)})
        runs.clear()
        del setting, truth
        clear(self.device)

    def truth(self, setting: Setting) -> dict[str, Tensor]:
        found = reference(setting)
        self.say({"tokens": setting.tokens, "run": "reference", "loss": round(float(found["loss"]), 5)})
        clear(self.device)
        return found

    def begin(self, name: str, setting: Setting, truth: Mapping[str, Tensor]) -> tuple[Run | None, dict[str, object]]:
        """A run that has made two steps, and how far it is from the truth; no run where it cannot be."""
        clear(self.device)
        held = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        failed = ""
        run: Run | None = None
        try:
            run = {**RUNS, **OPTIONAL}[name](setting)
            run.step(setting.batch)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = run.found(run.step(setting.batch))
        except Exception as problem:
            failed = f"{type(problem).__name__}: {problem}".splitlines()[0][:300]
            if leads():
                traceback.print_exc()
            found = {}
        if self.agreed(bool(failed)):
            if run is not None:
                run.close()
            return None, {"failed": failed or "on another rank"}
        row: dict[str, object] = {"gaps": gaps(found, truth)}
        if self.device.type == "cuda":
            synchronize(self.device)
            peak = torch.tensor(torch.cuda.max_memory_allocated() - held, device=self.device)
            dist.all_reduce(peak, op=dist.ReduceOp.MAX)
            row["peak_gib"] = round(peak.item() / 2**30, 2)
        assert run is not None
        return run, row | run.about

    def agreed(self, failed: bool) -> bool:
        """Whether any rank failed."""
        said = torch.tensor([float(failed)], device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())

    def timed(self, run: Run, batch: Mapping[str, Tensor]) -> list[float]:
        """The seconds of each step, on the slowest rank."""
        clear(self.device)
        run.step(batch)
        each: list[float] = []
        for _ in range(self.asked.steps or (3 if batch["input_ids"].shape[1] < LENGTHS[-1] else 2)):
            synchronize(self.device)
            dist.barrier()
            synchronize(self.device)
            start = time.perf_counter()
            run.step(batch)
            synchronize(self.device)
            each.append(time.perf_counter() - start)
        found = torch.tensor(each, dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found.tolist()

    def profiled(self, run: Run, batch: Mapping[str, Tensor]) -> dict[str, object]:
        found = profile(run.step, [batch], self.device)
        if not found:
            return {}
        kept = ("exposed_ms", "overlapped_ms", "busy_ms", "python_ms")
        most = torch.tensor([found[key] for key in kept], dtype=torch.float64, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        kinds = {key: found[key] for key in ("launches", "kernels_ms", "longest")}
        return dict(zip(kept, most.tolist(), strict=True)) | kinds


def spent(tokens: int, found: Sequence[float]) -> dict[str, object]:
    """Of the seconds of steps."""
    median = statistics.median(found)
    least, middle, most = (round(1e3 * each, 3) for each in (min(found), median, max(found)))
    tokens_per_s = round(tokens / median)
    return {"median_ms": middle, "min_ms": least, "max_ms": most, "steps": len(found), "tokens_per_s": tokens_per_s}


def gaps(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    return {key: float(f"{gap(found[key], truth[key]):.3g}") for key in truth}


def gap(found: Tensor, truth: Tensor) -> float:
    """Relative, by norms; where the found one is."""
    found, truth = (t.to(truth.device).double() for t in (found, truth))
    return float((found - truth).norm() / truth.norm())


def wrong(row: Mapping[str, object]) -> bool:
    return not all(value <= TOLERANCE for value in found_gaps(row))


def found_gaps(row: Mapping[str, object]) -> list[float]:
    """At first and after all rounds."""
    each = [row[key] for key in ("gaps", "last_gaps") if key in row]
    return [value for found in each if isinstance(found, dict) for value in found.values()]  # type: ignore[misc]


def ratios(rows: Mapping[str, dict[str, object]], medians: Mapping[str, float]) -> dict[str, float]:
    """Each peer's time over that of our fastest run; runs that are wrong have none."""
    right = {name: spent for name, spent in medians.items() if not wrong(rows[name])}
    ours = {name: spent for name, spent in right.items() if name.startswith("ours")}
    if not ours:
        return {}
    best = min(ours, key=lambda name: ours[name])
    return {f"{name} / {best}": round(spent / ours[best], 3) for name, spent in right.items() if name not in ours}


def table(rows: Sequence[Mapping[str, object]]) -> list[str]:
    lines = [
        "| tokens | run | ms (least, most) | tokens/s | exposed ms | GiB | largest gap |",
        "|---|---|---|---|---|---|---|",
    ]
    measured = {(row["tokens"], row["run"]): row for row in rows if "median_ms" in row or "failed" in row}
    for row in measured.values():  # the last line of each
        if "failed" in row:
            cells = [f"failed: {row['failed']}", "", "", "", ""]
        else:
            worst = max(found_gaps(row), key=lambda value: (value != value, value))
            about = f"{worst:.2g}{' WRONG' if wrong(row) else ''}"
            taken = f"{row['median_ms']} ({row['min_ms']}, {row['max_ms']})"
            cells = [taken, row["tokens_per_s"], row.get("exposed_ms", ""), row.get("peak_gib", ""), about]
        lines.append("| " + " | ".join(str(cell) for cell in (row["tokens"], row["run"], *cells)) + " |")
    said = {f"{row['tokens']} tokens: {row['attention']}" for row in measured.values() if "attention" in row}
    lines += [line for each in sorted(said) for line in ("", each)]
    for row in rows:
        if isinstance(found := row.get("ratios"), dict):
            lines += ["", f"{row['tokens']} tokens: " + ", ".join(f"{key} {value}" for key, value in found.items())]
    return lines


if __name__ == "__main__":
    sys.exit(main())
