"""Our own recorded steps (`benchmarks/measurements/own_steps.jsonl`) and their programs: fused, in buckets, float32
masters, AdamW in the step, as `benchmarks.train_step` ran them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import shardc
from benchmarks.gpt import SHAPES
from shardc.cost.prediction import Prediction
from shardc.ir.hardware import Hardware

MEASURED = Path(__file__).parent / "measurements" / "own_steps.jsonl"
PRECISION = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}
Row = Mapping[str, Any]


def rows() -> list[Row]:
    """Medians, the earlier day first; of the later also Python's time for a step, of each rank."""
    return [json.loads(line) for line in MEASURED.read_text().splitlines()]


def name(row: Row) -> str:
    mesh = "" if row["gpus"] == 1 else f" dp={row['gpus']}"
    return f"ours {row['config']}{mesh}{' zero-3' if row['run'] == 'zero3' else ''}"


def bound_by_the_gpu(row: Row) -> bool:
    """Whether Python was known to be done with a step before half of it had run."""
    return max(row.get("python_ms", [float("inf")])) < row["step_ms"] / 2


def compiled(row: Row) -> shardc.Program:
    """The program of a row, on the meta device."""
    shape, gpus = SHAPES[row["config"]], row["gpus"]
    with torch.device("meta"):
        model = shape.model(torch.float32)
        ids = torch.zeros(shape.batch * gpus, shape.seq, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plan: dict[str, Any] = {"fuse": True, "precision": PRECISION}
    if row["run"] != "one":
        plan |= {"inputs": dict.fromkeys(batch, "dp, -"), "bucket": True}
    if row["run"] == "zero3":
        plan["storage"] = {"zero": 3, "axes": ["dp"]}
    return shardc.compile(model, batch, mesh=f"dp={gpus}", plan=plan, optimizer=torch.optim.AdamW(model.parameters()))


def predictions(machine: Hardware, only: str = "") -> Iterator[tuple[str, list[Row], Prediction]]:
    """Of each program its name, the rows that measured it, and its prediction."""
    by_name: dict[str, list[Row]] = {}
    for row in rows():
        by_name.setdefault(name(row), []).append(row)
    for program, measured in by_name.items():
        if only in program:
            yield program, measured, compiled(measured[0]).predict(machine)
