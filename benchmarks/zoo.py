"""Which model types of the installed `transformers` compile and verify, unmodified, and what they communicate.

    python -m benchmarks.zoo --out zoo.jsonl                  all of them; goes on where an earlier run was ended
    python -m benchmarks.zoo --out zoo.jsonl --jobs 64        64 processes at once, of one thread each
    python -m benchmarks.zoo --out zoo.jsonl --shard 2/8      the second eighth
    python -m benchmarks.zoo --only bert --only causal/llama  these, whatever the file says
    python -m benchmarks.zoo --summary zoo.jsonl              counts, and what became of each that did not verify
    python -m benchmarks.zoo --table zoo.jsonl                the page docs/reference/models.md, of a whole run

Every model is small (`zoo_models.py`) and has a process of its own, which is ended after `--limit` seconds. It is
trained one step eagerly, then compiled over dp=2, tp=2 and, where it has experts, over dp=2, ep=2, with the library's
own plan if it brings one. A line of JSON says for each mesh:

    status   verified | alone | differs | refused | crashed | timeout | not trained | not built
             alone: the ranks agree with one device, and eager PyTorch was not there to be asked
    code     of the diagnostic that refused it
    seconds  of compiling and of verifying; `collectives` of a step by kind, and `warnings` by code
    ideal    how many collectives its form needs (`zoo_ideal.py`)
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn

import shardc
from benchmarks.zoo_batches import loss_of
from benchmarks.zoo_ideal import ideal_collectives
from benchmarks.zoo_models import Entry, NotReadyError, entries
from benchmarks.zoo_sizes import EXPERTS, ROWS
from benchmarks.zoo_table import EXPERT, TENSOR, page, summary_table
from shardc import Plan
from shardc.ir.collectives import collectives
from shardc.ir.diagnostic import ShardcError

Line = dict[str, Any]
VERSIONS = {"transformers": transformers.__version__, "torch": torch.__version__}
LIMIT = 300.0
# Without a plan of the library's: weights of [out, in] whose rows are heads or an MLP's inner width.
COLUMNS = re.compile(
    r"(^|\.)(q|k|v|query|key|value|(q|k|v|gate|up|query|key|value)_proj|(q|k|v)_lin|fc1|lin1|wi|wi_[01]|w1|w3|linear1"
    r"|intermediate\.dense|dense_h_to_4h|ffn_1)\.weight$"
)


def placements(model: nn.Module, mesh: str) -> dict[str, Any]:
    """The library's own plan for a mesh, or one by the names of weights."""
    kind = "ep" if mesh == EXPERT else "tp"
    if getattr(model, f"{kind}_plan", None):
        plan = Plan.from_hf(model, **({"axis": None, "experts": "ep"} if kind == "ep" else {}))
        return dict(plan.params)
    if kind == "ep":
        return dict.fromkeys(experts_of(model), "ep")
    wide = {
        name: "tp, -"
        for name, p in model.named_parameters()
        if p.ndim == 2 and p.shape[0] % 2 == 0 and COLUMNS.search(name)
    }
    embedding = getattr(model, "get_input_embeddings", lambda: None)
    try:
        table = getattr(embedding(), "weight", None)
    except (NotImplementedError, AttributeError):
        table = None
    if table is not None and table.shape[0] % 2 == 0:
        wide |= {name: "tp, -" for name, p in model.named_parameters() if p is table}
    return wide


def experts_of(model: nn.Module) -> list[str]:
    """Weights and biases that are stacked by expert."""
    return [n for n, p in model.named_parameters() if ".experts." in n and p.ndim >= 2 and p.shape[0] == EXPERTS]


def train_and_compile(entry: Entry) -> Iterable[Line]:
    """A line for each mesh, in this process."""
    line: Line = {"name": entry.name, "class": entry.model_class, "mesh": TENSOR} | VERSIONS
    try:
        model, batch, has_loss, _ = entry.ready()
    except NotReadyError as error:
        yield line | {"status": error.stage, **said(error.cause)}
        return
    line["parameters"] = sum(p.numel() for p in model.parameters())
    for mesh in (TENSOR, EXPERT) if experts_of(model) else (TENSOR,):
        yield line | {"mesh": mesh} | compiled(model, batch, mesh, has_loss=has_loss)


def compiled(model: nn.Module, batch: dict[str, Tensor], mesh: str, *, has_loss: bool) -> Line:
    started = time.perf_counter()
    try:
        program = compiled_program(model, batch, mesh, loss=None if has_loss else loss_of)
        line: Line = {"compile_s": round(time.perf_counter() - started, 2)}
        line |= verified(program)
    except ShardcError as refused:
        first = refused.diagnostics[0]
        return {
            "status": "refused",
            "code": first.code,
            "error": first.message[:200],
            "where": str(first.location or ""),
        }
    except Exception as error:  # a defect of ours
        return {"status": "crashed", **said(error)}
    return line | {"ideal": ideal_collectives(model, batch, program.body, has_loss=has_loss)}


def verified(program: shardc.Program) -> Line:
    """What became of `program.verify()`, and what a step communicates."""
    started = time.perf_counter()
    report = program.verify()
    return {
        "status": "differs" if not report.ok else "alone" if report.eager_error is None else "verified",
        "verify_s": round(time.perf_counter() - started, 2),
        "calls": sum(1 for _ in program.body.calls()),
        "collectives": dict(Counter(f"{c.kind} {'.'.join(c.axes)}" for c in collectives(program.body))),
        "warnings": dict(Counter(d.code for d in program.diagnostics)),
        "eager_error": report.eager_error,
        **({} if report.ok else {"error": str(report)[:400]}),
    }


def compiled_program(
    model: nn.Module, batch: dict[str, Tensor], mesh: str, *, loss: Callable[[Any, Any], Tensor] | None
) -> shardc.Program:
    inputs = {name: rows_over_dp(value) for name, value in batch.items() if is_by_rows(name, value)}
    plan = {"mesh": mesh, "inputs": inputs, "params": placements(model, mesh), "bucket": False}
    return shardc.compile(model, batch, plan=cast(Any, plan), loss=loss, cache=False)


def is_by_rows(name: str, value: Tensor) -> bool:
    return value.shape[0] == ROWS or (name == "position_ids" and value.shape[1] == ROWS)


def rows_over_dp(value: Tensor) -> str:
    """Rows are those of dim 0, or of dim 1 where the first are axes of positions."""
    return "dp" if value.shape[0] == ROWS else "-, dp"


def said(error: Exception) -> Line:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = (
        ""
        if trace is None
        else f"{trace.tb_frame.f_code.co_filename.rpartition('site-packages/')[2]}:{trace.tb_lineno}"
    )
    return {"error": f"{type(error).__name__}: {error}"[:300], "where": where}


def in_process(entry: Entry, limit: float, module: str = "benchmarks.zoo") -> list[Line]:
    """The lines of one model, from a process that is ended after `limit` seconds."""
    command = [sys.executable, "-m", module, "--here", entry.name]
    root = Path(__file__).parent.parent
    line: Line = {"name": entry.name, "class": entry.model_class, "mesh": TENSOR}
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=root, env=os.environ | threads, capture_output=True, text=True, timeout=limit, check=False
        )
        text, rest = (
            done.stdout,
            [] if done.returncode == 0 else [line | {"status": "crashed", "error": done.stderr[-300:]}],
        )
    except subprocess.TimeoutExpired as slow:
        out = slow.stdout or b""  # bytes, even where text was asked for
        text, rest = out.decode(), [line | {"status": "timeout", "limit_s": limit}]
    lines = [json.loads(row) for row in text.splitlines() if row.startswith('{"name"')]
    if rest and lines:
        rest[0]["mesh"] = EXPERT  # the first mesh was done
    return lines + rest


def chosen(every: list[Entry], only: list[str], shard: str) -> list[Entry]:
    """Those of a shard `i/n`, or those whose name or type is given. Raises ValueError for one that is not there."""
    if only:
        names = {name: [e for e in every if name in (e.name, e.type)] for name in only}
        if missing := [name for name, found in names.items() if not found]:
            raise ValueError(f"no model type {', '.join(missing)}: `--list` shows those there are")
        return [entry for found in names.values() for entry in found]
    index, _, count = shard.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise ValueError(f"--shard is i/n, counted from 1, not {shard!r}")
    return every[int(index) - 1 :: int(count)]


def summary(lines: Iterable[Line]) -> str:
    """How many built, trained, compiled and verified, by kind and mesh; then every other line, by cause."""
    last = {(line["name"], line["mesh"]): line for line in lines}
    rows = summary_table(last)
    causes: dict[str, list[str]] = {}
    for (name, mesh), line in sorted(last.items()):
        if line["status"] != "verified":
            cause = " ".join(
                filter(None, [line["status"], line.get("code", ""), line.get("error", "").partition("\n")[0][:110]])
            )
            causes.setdefault(cause, []).append(name if mesh == TENSOR else f"{name} ({mesh})")
    return "\n".join([*rows, "", *(f"- {cause}: {', '.join(names)}" for cause, names in sorted(causes.items()))])


def read(path: Path) -> list[Line]:
    return [json.loads(row) for row in path.read_text().splitlines() if row.strip()] if path.exists() else []


def add_run_options(parser: argparse.ArgumentParser, out: Path, limit: float) -> None:
    """Which models, how many at once, and where their lines go."""
    parser.add_argument("--out", type=Path, default=out, help="lines are added; what it has is not run again")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help="causal/llama, or llama; repeatable"
    )
    parser.add_argument("--shard", default="1/1", metavar="I/N")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at once")
    parser.add_argument("--limit", type=float, default=limit, metavar="SECONDS", help="of each model")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="sum up a file, and run nothing")
    parser.add_argument("--here", metavar="NAME", help=argparse.SUPPRESS)


def run_all(wanted: list[Entry], options: argparse.Namespace, lines: Callable[[Entry], list[Line]]) -> None:
    """The lines of all models go to the file and to the terminal, as they come."""
    done = set() if options.only else {line["name"] for line in read(options.out)}
    with ThreadPoolExecutor(options.jobs) as pool, options.out.open("a") as file:
        running = [pool.submit(lines, entry) for entry in wanted if entry.name not in done]
        for ended in as_completed(running):
            for line in ended.result():
                print(json.dumps(line), flush=True)
                file.write(json.dumps(line) + "\n")
            file.flush()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_run_options(parser, Path("zoo.jsonl"), LIMIT)
    parser.add_argument("--table", type=Path, metavar="FILE", help="the documentation's page of a file's lines")
    parser.add_argument("--list", action="store_true", help="names, and run nothing")
    options = parser.parse_args(arguments)
    if options.table:
        print(page(read(options.table)), end="")
        return
    if options.summary:
        print(summary(read(options.summary)))
        return
    every = entries()
    if options.list:
        print("\n".join(entry.name for entry in every))
        return
    if options.here:
        for line in train_and_compile(chosen(every, [options.here], "")[0]):
            print(json.dumps(line), flush=True)
        return
    try:
        wanted = chosen(every, options.only, options.shard)
    except ValueError as wrong:
        parser.error(str(wrong))
    run_all(wanted, options, lambda entry: in_process(entry, options.limit))
    print(summary(read(options.out)))


if __name__ == "__main__":
    main()
