"""What the checks of a job cost: ranks compare what they run and share at launch and before some steps.

    python benchmarks/job_checks.py                          seconds of a launch, and milliseconds of a check in a step
    python benchmarks/job_checks.py --pairs 5 --against ../before
                                                             seconds of a launch by two trees, in turn

Two ranks over gloo, data parallel, so that all of the state is replicated and compared: a GPT of 32 layers, SGD with
momentum. Ranks meet after they compiled, and the clock of a launch starts then: none waits for the compiling of the
other. It stops when both have launched. A line has the slower rank's seconds (of the clock and of its CPU), and, of
this tree, the milliseconds of a step with every step checked and with none, in turn; `share` is what a check every
100th step, as by default, adds to a step.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANKS, VOCABULARY, HEADS, SEQ, BATCH = 2, 512, 4, 32, 4
PLAN = json.dumps({"inputs": {"*": "dp, -"}})
EVERY = 100  # steps from one check to the next, by default
FIRST = 3  # steps that are checked whatever `check_every` says


def run_rank(options: argparse.Namespace) -> dict[str, Any]:
    """Compile, meet, launch, meet, and take steps: in a process of its own that has a rank's environment."""
    import torch
    from torch.distributed import TCPStore

    import shardc
    from benchmarks.gpt import GPT

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = TCPStore("127.0.0.1", options.port, RANKS, rank == 0, timedelta(seconds=900))

    def meet(where: str) -> None:
        store.add(where, 1)
        while store.add(where, 0) < RANKS:
            time.sleep(0.001)

    model = GPT(VOCABULARY, options.width, HEADS, options.layers, SEQ)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    batch = {"input_ids": tokens, "labels": tokens}
    build = shardc.compile  # imported here, before the clock runs
    start = time.perf_counter()
    plan = json.loads(options.plan)
    program = build(model, batch, mesh=f"dp={RANKS}", optimizer=optimizer, plan=plan)
    compiled = time.perf_counter() - start
    meet("compiled")
    start, cpu = time.perf_counter(), time.process_time()
    trainer = program.launch()
    cpu = time.process_time() - cpu
    meet("launched")
    row: dict[str, Any] = {"compile": compiled, "launch": time.perf_counter() - start, "cpu": cpu}
    if options.steps and "check_every" in inspect.signature(shardc.runtime.train.trainer.launch).parameters:
        trainer.close()
        row |= steps(program, batch, options.steps, meet)
    else:
        trainer.close()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < RANKS:  # it holds the store
        time.sleep(0.001)
    return row


def steps(program: Any, batch: Any, pairs: int, meet: Any) -> dict[str, float]:
    """Median milliseconds of a step that is checked and of one that is not, taken in turn."""
    spent: dict[str, list[float]] = {"checked": [], "plain": []}
    trainer = program.launch(check_every=1)
    for _ in range(FIRST):
        trainer.step(batch)
    for turn in range(2 * pairs):
        name = "checked" if turn % 2 else "plain"
        trainer._check_every = int(name == "checked")
        meet(f"step {turn}")
        start = time.perf_counter()
        trainer.step(batch)
        spent[name].append((time.perf_counter() - start) * 1e3)
    trainer.close()
    median = {name: statistics.median(some) for name, some in spent.items()}
    return {"checked_ms": median["checked"], "plain_ms": median["plain"]}


def launched(options: argparse.Namespace, tree: Path) -> dict[str, float]:
    """The slower rank's figures, by the shardc of a checkout."""
    with socket.socket() as job, socket.socket() as ours:
        for free in (job, ours):
            free.bind(("127.0.0.1", 0))
        ports = [free.getsockname()[1] for free in (job, ours)]
    env = {**os.environ, "PYTHONPATH": str(tree.resolve()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0])}
    env |= {"WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, "--rank", "--port", str(ports[1]), "--layers", str(options.layers)]
    command += ["--width", str(options.width), "--steps", str(options.steps if tree == ROOT else 0)]
    command += ["--plan", options.plan]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(RANKS)
    ]
    rows: list[dict[str, float]] = []
    for rank in ranks:
        printed, _ = rank.communicate()
        assert rank.returncode == 0, f"a rank of {tree} failed"
        rows.append(json.loads(printed.strip().splitlines()[-1]))
    return {name: round(max(row[name] for row in rows), 3) for name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps; 0: launch alone")
    parser.add_argument("--plan", default=PLAN, help="JSON; by default plain data parallelism")
    parser.add_argument("--against", type=Path, help="another checkout, in turn with this one")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        print(json.dumps(run_rank(options)))
        return
    more: dict[str, list[float]] = {}
    for _ in range(options.pairs):
        ours = launched(options, ROOT)
        if "checked_ms" in ours:
            check = ours["checked_ms"] - ours["plain_ms"]
            ours |= {"check_ms": round(check, 2), "share": round(check / EVERY / ours["plain_ms"], 5)}
        print(json.dumps({"tree": "this", **ours}), flush=True)
        if options.against is not None:
            theirs = launched(options, options.against)
            print(json.dumps({"tree": str(options.against), **theirs}), flush=True)
            for name in ("launch", "cpu"):
                more.setdefault(name, []).append(round(ours[name] - theirs[name], 3))
    if more:
        spread = {name: [min(some), statistics.median(some), max(some)] for name, some in more.items()}
        print(json.dumps({"seconds that a launch takes more, least, median, most": spread}), flush=True)


if __name__ == "__main__":
    main()
