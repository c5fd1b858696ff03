"""What a step of one rank costs the CPU: milliseconds of process time over torch's fake process group, tiny tensors.

The model is `benchmarks.gpt` of a given number of layers. Nothing is sent. Attention and the kernels of `fuse` only
allocate their results, as before a launch on a GPU: a CPU would run their references.

ATen's own time, the same on both sides of a comparison, is kept small. Models in bfloat16 are smaller than the others
(`sizes`): most CPUs have no bfloat16 products, and oneDNN's emulation of one takes many times as long as the call that
leads to it. Subnormal numbers count as zero: a place that a kernel would have written holds what was there before, and
products of that take several times as long as others.

    python -m benchmarks.python_step [--layers 8] [--steps 20] [--only WORD] [--profile] [--baseline CHECKOUT]

With a baseline, a checkout of another commit, this script runs that one's shardc too, in a process of its own. Rounds
of the two alternate. `ratio` is of the least times; `rounds` are the least, the median and the largest of the rounds'
own ratios, each of medians. The checkout needs no benchmark of its own; pipelines are not compared with the first ones,
whose steps are run by `python_step_before`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc
from benchmarks.gpt import GPT, GPT_PLAN
from kernels_triton.base import library
from kernels_triton.base.inplace import INTO, Operand, Place
from kernels_triton.ir.text import parse
from shardc.ir.graph import type_of
from shardc.ir.group_axes import axes_used
from shardc.runtime.execute.executor import Executor
from shardc.runtime.execute.instructions import rank_context
from shardc.runtime.execute.microbatches import feeds
from shardc.runtime.execute.peer_groups import PeerGroups, groups_of, ranks_of_position
from shardc.runtime.execute.process_groups import ProcessGroupCommunicator
from shardc.runtime.oracle.simulate import sharded

CPU = torch.device("cpu")
ROUNDS = 5  # of each side
DP = {"inputs": {"input_ids": "dp, -", "labels": "dp, -"}}
ZERO_3 = {**DP, "storage": {"zero": 3, "axes": ["dp"]}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("dp=1", {}),
    "dp": ("dp=2", DP),
    "dp accumulate": ("dp=2", {**DP, "accumulate": 4}),
    "dp bucket": ("dp=2", {**DP, "bucket": True}),
    "zero-3": ("dp=2", ZERO_3),
    "zero-3 bf16 bucket": ("dp=2", {**ZERO_3, "precision": "bf16", "bucket": True}),
    "tp": ("dp=1, tp=2", {"params": GPT_PLAN}),
    "pipeline": ("pp=2, dp=2", {**DP, "pipeline": {"axis": "pp", "microbatches": 4, "schedule": "1f1b"}}),
}


def without_launch(
    operands: Sequence[Operand], line: str, places: Mapping[int, Place], device: torch.device, scratch: Any = None
) -> Callable[..., Any]:
    """A kernel's prepared call without the launch: operands are read, results allocated, or where they are placed."""
    slots = [x for x in operands if isinstance(x, int)]
    outputs = [(number, output.shape, output.dtype) for number, output in enumerate(parse(line).outputs)]

    def call(env: list[Any]) -> list[torch.Tensor]:
        for slot in slots:
            env[slot].data_ptr()
        results: list[torch.Tensor] = []
        for number, shape, dtype in outputs:
            place = places.get(number)
            if place is None:
                results.append(torch.zeros(shape, dtype=dtype, device=device))
            else:
                results.append(place if isinstance(place, torch.Tensor) else place(env))
                if not dtype.is_floating_point:  # an index of rows
                    results[-1].zero_()
        return results

    return call


def without_attention() -> None:
    """Attention's reference allocates its results and computes nothing."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = q.transpose(1, 2)
        return rows.new_zeros((*rows.shape[:3], v.shape[-1])).transpose(1, 2), q.new_zeros(q.shape[:3]).float()

    def backward(g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> Any:
        gradients = (t.new_zeros([t.shape[i] for i in (0, 2, 1, 3)]).transpose(1, 2) for t in (q, k, v))
        return (*gradients, q.new_zeros(0))

    for name, kernel in (("sdpa", forward), ("sdpa_bwd", backward)):
        if hasattr(library, "implement"):
            library.implement(name, kernel, "CPU")
        else:  # an older checkout, whose executors go through the dispatcher
            library.LIBRARY.impl(name, kernel, "CPU")


def sizes(plan: Mapping[str, Any]) -> tuple[int, int, int]:
    """The width of a case's model, the sequences of its batch, and the tokens of each."""
    return (16, 4, 2) if "precision" in plan else (32, 8, 16)


def step_of(mesh: str, plan: Mapping[str, Any], layers: int) -> Callable[[], Any]:
    """A step of rank 0, over the process group `fake`, which it makes."""
    torch.manual_seed(0)
    width, sequences, tokens = sizes(plan)
    model = GPT(64, width, 2, layers, tokens)
    batch = {name: torch.randint(64, (sequences, tokens)) for name in ("input_ids", "labels")}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = shardc.compile(model, batch, mesh=mesh, plan=dict(plan), optimizer=optimizer)
    staged = program.staged
    body, world = staged.body, staged.mesh.world_size
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    count, limit = len(staged.lists.ranks), timedelta(seconds=9)
    copies = [[staged.rank_of(c, i) for i in range(body.mesh.world_size)] for c in range(count)]
    comm = ProcessGroupCommunicator(body.mesh, 0, axes_used(body), limit, copies, 0, groups_of(staged))
    peers = PeerGroups(ranks_of_position(staged, 0), comm.group, CPU, limit)
    executor = Executor(staged, 0, rank_context(body.mesh, 0, comm), 0, peers)
    types, whole = {name: type_of(node) for name, node in body.input_nodes().items()}, program.inputs()

    def local(name: str, value: torch.Tensor) -> torch.Tensor:
        return sharded(value.detach(), types[name], body.mesh)[0].clone()

    fed = [{name: local(name, x) for name, x in feed.items()} for feed in feeds(body, whole)]
    held = {name: local(name, x) for name, x in whole.items() if name not in fed[0]}
    return lambda: executor.run(held, fed, Counter())


class Counter:
    """A monitor that nobody asks."""

    counter = 0

    def blame(self, failure: BaseException) -> Exception:
        raise failure

    def report_own_failure(self, why: str) -> None: ...


class Side:
    """A process that runs steps of one checkout's shardc: `checkout`, or without one this script's own."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve())}
        self.is_early = (checkout / "shardc" / "runtime" / "executor.py").exists()
        script = Path(__file__).with_name("python_step_before.py") if self.is_early else Path(__file__)
        command = [sys.executable, "-P", str(script), "--answer"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=checkout
        )

    def ask(self, *words: object) -> Any:
        """The answer to a request: `case MESH PLAN LAYERS`, or `steps COUNT`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process that ran {words} ended with {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def answer() -> None:
    """Serve requests of `Side` until there are no more."""
    run: Callable[[], Any] = lambda: None  # noqa: E731
    for line in sys.stdin:
        match json.loads(line):
            case ["case", str(mesh), dict(plan), int(layers)]:
                if dist.is_initialized():
                    dist.destroy_process_group()
                run = prepared(mesh, plan, layers)  # pyright: ignore[reportUnknownArgumentType]
                print(json.dumps(shardc.__file__), flush=True)
            case ["steps", int(count)]:
                print(json.dumps([timed(run) for _ in range(count)]), flush=True)
            case other:
                raise ValueError(f"unknown request {other}")


def compared(options: argparse.Namespace) -> None:
    """Print a row per case: least milliseconds of the baseline's steps, of this checkout's, and their ratio."""
    sides = Side(options.baseline), Side(Path(__file__).parents[1])
    for name, fuse, label in chosen(options.only):
        mesh, plan = planned(name, fuse)
        if sides[0].is_early and "pipeline" in plan:
            continue
        for side in sides:
            side.ask("case", mesh, plan, options.layers)
        count = max(1, options.steps // ROUNDS)
        rounds: list[list[list[float]]] = [[side.ask("steps", count) for side in sides] for _ in range(ROUNDS)]
        baseline, least = (min(map(min, times)) for times in zip(*rounds, strict=True))
        ratios = sorted(statistics.median(mine) / statistics.median(theirs) for theirs, mine in rounds)
        row = {"case": label, "layers": options.layers, "baseline": baseline, "least": least, "ratio": least / baseline}
        row = {k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}
        spread = [round(x, 2) for x in (ratios[0], statistics.median(ratios), ratios[-1])]
        print(json.dumps({**row, "rounds": spread}), flush=True)
    for side in sides:
        side.close()


def chosen(word: str) -> list[tuple[str, bool, str]]:
    """The name of each case whose label has the word, whether it fuses, and its label."""
    cases = [(name, fuse, f"{name} fuse" if fuse else name) for name in CASES for fuse in (False, True)]
    return [case for case in cases if word in case[2]]


def planned(name: str, fuse: bool) -> tuple[str, dict[str, Any]]:
    """A case's mesh and plan."""
    mesh, plan = CASES[name]
    return mesh, {**plan, "fuse": fuse}


def prepared(mesh: str, plan: Mapping[str, Any], layers: int) -> Callable[[], Any]:
    """A step, after three of them."""
    run = step_of(mesh, plan, layers)
    for _ in range(3):
        run()
    return run


def timed(run: Callable[[], Any]) -> float:
    """Milliseconds of process time."""
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", default="")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.baseline is not None:
        compared(options)
        return
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    without_attention()
    for op, into in INTO.items():
        INTO[op] = into if into.prepare is None else replace(into, prepare=without_launch)
    if options.answer:
        answer()
        return
    for name, fuse, label in chosen(options.only):
        run = prepared(*planned(name, fuse), options.layers)
        spent = [timed(run) for _ in range(options.steps)]
        row = {"case": label, "layers": options.layers, "median": statistics.median(spent), "least": min(spent)}
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if options.profile:
            with cProfile.Profile() as profile:
                for _ in range(5):
                    run()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
