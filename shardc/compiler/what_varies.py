"""What of a program is fixed, and what may change from step to step: the head of its text, and a line of its summary.

    # batch: ids i64[8, 6], labels i64[8, 6]; other sizes have a program each
    # fixed: dtypes, numbers of dims, scale=2.0, the model's modes and numbers; free: values, seed

A trainer compiles the program of other sizes when they first come (`shardc.runtime.train.shapes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardc.ir.graph import type_of
from shardc.ir.program import Program
from shardc.ir.types import TensorType
from shardc.plan.schema import Plan

SHOWN = 4  # tensors of a batch, and Python values


def batch_line(program: Program) -> str:
    """The batch that a program is for, and what becomes of others."""
    reference = program.reference
    pairs = zip(reference.inputs, reference.placeholders, strict=True)
    parts = {port.name: type_of(node) for port, node in pairs if port.role == "input"}
    rows = next((type.shape[0] for type in parts.values() if type.ndim), 0)
    texts = [f"{name} {_whole(type, rows, reference.microbatches)}" for name, type in parts.items()]
    into = f" in {reference.microbatches} microbatches" if reference.microbatches > 1 else ""
    return f"batch: {_listed(texts)}{into}; {_others(program)}"


def header(program: Program) -> list[str]:
    """The head of a program's text, as comments."""
    sample: Mapping[str, Any] = program.plan.get("batch", {})
    values = [f"{leaf[1]}={leaf[3]}" for leaf in sample.get("leaves", ()) if len(leaf) > 3 and leaf[2] == "value"]
    fixed = ["dtypes", "numbers of dims", *([_listed(values)] if values else []), "the model's modes and numbers"]
    free = ["values"]
    if "optimizer" in program.plan:
        fixed.append("hyperparameters")
        free.append("learning rates")
    return [f"# {batch_line(program)}", f"# fixed: {', '.join(fixed)}; free: {', '.join([*free, 'seed'])}"]


def _others(program: Program) -> str:
    pads = not program.reference.is_forward_only and Plan.parse(program.plan.get("text", "")).pad
    return "smaller ones are padded, larger have a program each" if pads else "other sizes have a program each"


def _whole(type: TensorType, rows: int, microbatches: int) -> TensorType:
    """The type of what all microbatches are split from."""
    split = microbatches > 1 and type.ndim and type.shape[0] == rows
    return TensorType.plain(type.dtype, (rows * microbatches, *type.shape[1:])) if split else type.replicated()


def _listed(texts: list[str]) -> str:
    return ", ".join([*texts[:SHOWN], *([f"{len(texts) - SHOWN} more"] if texts[SHOWN:] else [])])
