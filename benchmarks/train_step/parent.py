"""Starts jobs, keeps their lines, and starts again without the contestant that killed one."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.train_step import summary
from benchmarks.train_step.rows import CONTESTANTS, ROWS, Row, rehearsal

HERE = Path(__file__).parents[2]
Lines = list[dict[str, Any]]


def chosen(asked: argparse.Namespace) -> list[Row]:
    unknown = [name for name in asked.rows if name not in ROWS] + [n for n in asked.contestants if n not in CONTESTANTS]
    if unknown:
        raise SystemExit(
            f"unknown: {', '.join(unknown)}; rows: {', '.join(ROWS)}; contestants: {', '.join(CONTESTANTS)}"
        )
    every = rehearsal() if asked.tiny else [row for row in ROWS.values() if row.of_shares == asked.shares]
    rows = [ROWS[name] for name in asked.rows] or every
    return [row for row in rows if asked.gpus in (None, row.gpus)]


def measure(asked: argparse.Namespace) -> int:
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text("")
    lines: Lines = []
    end = time.monotonic() + asked.seconds
    rows = chosen(asked)
    for gpus in sorted({row.gpus for row in rows}):
        ranks = min(gpus, 2) if asked.tiny else gpus
        _jobs(asked, [row for row in rows if row.gpus == gpus], ranks, end, lines)
    print("\n".join(summary.table(lines)), flush=True)
    return 1 if any("failed" in line for line in lines) else 0


def _jobs(asked: argparse.Namespace, rows: list[Row], ranks: int, end: float, lines: Lines) -> None:
    """Jobs one after another, until every contestant has a line."""
    left = {
        (row.name, name) for row in rows for name in row.contestants if name in (asked.contestants or row.contestants)
    }
    while left:
        wanted = [f"{row}/{name}" for row, name in sorted(left)]
        before = len(lines)
        code, begun = _job(asked, rows, ranks, wanted, end, lines)
        found = lines[before:]
        left -= {(line["row"], line["contestant"]) for line in found if "contestant" in line}
        if code == 0:
            return
        why = "the time was up" if time.monotonic() > end else f"the job died ({code})"
        if begun in left:
            _keep(asked, lines, {"row": begun[0], "contestant": begun[1], "failed": why})
            left.discard(begun)
        elif not found:  # it died with no contestant at work
            _keep(asked, lines, {"rows": [row.name for row in rows], "failed": why})
            return
        if time.monotonic() > end:
            return


def _keep(asked: argparse.Namespace, lines: Lines, line: dict[str, Any]) -> None:
    lines.append(line)
    text = json.dumps(line)
    print(text, flush=True)
    if asked.out is not None:
        with asked.out.open("a") as file:
            file.write(text + "\n")


def _end(job: subprocess.Popen[str]) -> None:
    """The launcher ends its ranks when it is asked to, with SIGKILL after 30 s; they are in sessions of their own."""
    job.send_signal(signal.SIGTERM)
    try:
        job.wait(45)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def _job(
    asked: argparse.Namespace, rows: list[Row], ranks: int, wanted: list[str], end: float, lines: Lines
) -> tuple[int, tuple[str, str]]:
    """Its exit code, and the contestant that began last; its lines are kept as they come."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "benchmarks.train_step.child", "--rows", *[row.name for row in rows], "--device", asked.device]
    command += ["--rounds", str(asked.rounds), "--steps", str(asked.steps), "--seconds", str(end - time.monotonic())]
    command += [*(["--tiny"] if asked.tiny else []), *(["--optimizer"] if asked.optimizer else [])]
    command += ["--wanted", *wanted]
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    job = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=HERE)
    read: Queue[str | None] = Queue()

    def reader() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            read.put(line)
        read.put(None)

    threading.Thread(target=reader, daemon=True).start()
    begun = ("", "")
    while True:
        try:
            text = read.get(timeout=max(min(asked.stall, end + 30 - time.monotonic()), 1))
        except Empty:
            _end(job)
            return -signal.SIGKILL, begun
        if text is None:
            return job.wait(), begun
        if not text.startswith("{"):
            print(text, end="", flush=True)
            continue
        line = json.loads(text)
        if line.get("begins"):
            begun = (line["row"], line["contestant"])
        else:
            _keep(asked, lines, line)
