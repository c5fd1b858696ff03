"""Our own recorded steps (`benchmarks/measurements/own_steps.jsonl`) and their programs: fused, in buckets, float32
masters, AdamW in the step. `benchmarks.measure_own_steps` measures them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import shardc
from benchmarks.gpt import SHAPES, Shape
from shardc.cost.prediction import Prediction
from shardc.ir.hardware import Hardware
from shardc.plan.hardware import hardware

MEASURED = Path(__file__).parent / "measurements" / "own_steps.jsonl"
PRECISION = {"compute": "bf16", "master": "fp32", "reduce": "fp32"}
Row = Mapping[str, Any]


def rows() -> list[Row]:
    """Medians, the earlier day first; of the later also Python's time for a step, of each rank."""
    return [json.loads(line) for line in MEASURED.read_text().splitlines()]


def name(row: Row) -> str:
    mesh = "" if row["gpus"] == 1 else f" dp={row['gpus']}"
    where = f" on {row['hardware']}" if "hardware" in row else ""
    return f"ours {row['config']}{mesh}{' zero-3' if row['run'] == 'zero3' else ''}{where}"


def machine_of(row: Row, otherwise: str) -> Hardware:
    """What a row was measured on, with what a call took Python there."""
    machine = hardware(row.get("hardware", otherwise))
    return machine.changed({"call_seconds": row["call_seconds"]}) if "call_seconds" in row else machine


def bound_by_the_gpu(row: Row) -> bool:
    """Whether Python was known to be done with a step before half of it had run."""
    return max(row.get("python_ms", [float("inf")])) < row["step_ms"] / 2


def compiled(row: Row, shape: Shape | None = None) -> shardc.Program:
    """The program of a row, on the meta device; of another shape if one is given."""
    shape, gpus = shape or SHAPES[row["config"]], row["gpus"]
    with torch.device("meta"):
        model = shape.model(torch.float32)
        ids = torch.zeros(shape.batch * gpus, shape.seq, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    plan: dict[str, Any] = {"fuse": True, "precision": PRECISION}
    if row["run"] != "one":
        plan |= {"inputs": dict.fromkeys(batch, "dp, -"), "bucket": True}
    if not row.get("overlap"):  # measured before compute moved behind collectives
        plan["overlap"] = False
    if row["run"] == "zero3":
        plan["storage"] = {"zero": 3, "axes": ["dp"]}
    return shardc.compile(model, batch, mesh=f"dp={gpus}", plan=plan, optimizer=torch.optim.AdamW(model.parameters()))


def predictions(machine: str, only: str = "") -> Iterator[tuple[str, list[Row], Prediction]]:
    """Of each program its name, the rows that measured it, and its prediction; `machine` is that of rows that name
    none."""
    by_name: dict[str, list[Row]] = {}
    for row in rows():
        by_name.setdefault(name(row), []).append(row)
    for program, measured in by_name.items():
        if only in program:
            yield program, measured, compiled(measured[0]).predict(machine_of(measured[0], machine))
