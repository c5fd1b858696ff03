"""What the planner gives back: plans in the order of their predicted time, each with what it takes and why it loses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

from shardc.ir.files import write_text
from shardc.plan.schema import Plan
from shardc.planner.candidate import ORDER, Candidate
from shardc.planner.step_costs import TERMS, Estimate

GIB = 2**30


@dataclass(frozen=True)
class RankedPlan:
    """A plan with its prediction. `basis` says what was compiled for it, and what is extrapolated. `reason` is why it
    loses against the first one, "" of the first itself. `fits` is false of those that are listed to say so."""

    plan: Plan
    candidate: Candidate
    estimate: Estimate
    step_ms: float
    tokens_per_s: float
    mfu: float
    peak_bytes: int
    fits: bool
    basis: str
    reason: str = ""
    unit: Literal["tokens", "samples"] = "tokens"  # of `tokens_per_s`

    def __str__(self) -> str:
        return f"{self.candidate}: {self.step_ms:,.1f} ms, {self.peak_bytes / GIB:.1f} GiB"

    def yaml(self) -> str:
        """The plan as a file, with its prediction in comments."""
        said = f"{self.step_ms:,.1f} ms a step, {self.tokens_per_s:,.0f} {self.unit}/s, MFU {self.mfu:.1%}"
        head = [f"predicted: {said}, {self.peak_bytes / GIB:.1f} GiB at the peak", self.basis, self.reason]
        return "".join(f"# {line}\n" for line in head if line) + self.plan.dump()

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        c, e = self.candidate, self.estimate
        parts = (*TERMS, "sent", "recomputed")
        held = ("weights", "gradients", "state", "activations", "transient")
        return {
            "mesh": {name: getattr(c, name) for name in ORDER if getattr(c, name) > 1},
            **{name: getattr(c, name) for name in ("sequence", "rows", "microbatches", "schedule", "virtual")},
            **{name: getattr(c, name) for name in ("zero", "recompute", "reduce", "bucket")},
            **{name: getattr(self, name) for name in ("step_ms", "tokens_per_s", "unit", "mfu", "peak_bytes", "fits")},
            "ms": {name: 1e3 * getattr(e, name) for name in parts},
            "memory": {name: round(getattr(e.memory, name)) for name in held},
            "basis": self.basis,
            "reason": self.reason,
            "plan": self.plan.dump(),
        }


@dataclass(frozen=True)
class Ranking(Sequence[RankedPlan]):
    """Plans, the fastest that fits first. `others` are instructive candidates that lose: each differs from the first in
    one choice, or does not fit."""

    plans: tuple[RankedPlan, ...]
    others: tuple[RankedPlan, ...]
    considered: int
    compiled: int
    notes: tuple[str, ...] = ()

    @overload
    def __getitem__(self, index: int) -> RankedPlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[RankedPlan, ...]: ...
    def __getitem__(self, index: int | slice) -> RankedPlan | tuple[RankedPlan, ...]:
        return self.plans[index]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[RankedPlan]:
        return iter(self.plans)

    @property
    def best(self) -> RankedPlan:
        return self.plans[0]

    def save(self, folder: str | Path, name: str = "plan") -> list[Path]:
        """Write each plan as a YAML file: plan.1.yaml is the best."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)}.{i}.yaml" for i in range(1, len(self) + 1)]
        for path, ranked in zip(paths, self.plans, strict=True):
            write_text(path, ranked.yaml())
        return paths

    def rows(self) -> list[tuple[str, ...]]:
        """The table: a heading, and a row for each plan and each of the others."""
        rate = f"{self.best.unit}/s"
        heading = ("", "mesh", "zero", "recompute", "microbatches", "ms", rate, "MFU", "GiB", "why not")
        rows: list[tuple[str, ...]] = [heading]
        for number, ranked in enumerate((*self.plans, *self.others), 1):
            c = ranked.candidate
            mesh = " ".join(f"{axis}{getattr(c, axis)}" for axis in ORDER if getattr(c, axis) > 1) or "one rank"
            sequence = "+sp" if c.sequence else ""
            schedule = f" {c.schedule}" + (f" x{c.virtual}" if c.virtual > 1 else "") if c.schedule else ""
            rows.append(
                (
                    str(number) if number <= len(self) else "-",
                    mesh + sequence,
                    str(c.zero),
                    c.recompute,
                    f"{c.microbatches} of {c.rows}{schedule}",
                    f"{ranked.step_ms:,.1f}",
                    f"{ranked.tokens_per_s:,.0f}",
                    f"{ranked.mfu:.1%}",
                    f"{ranked.peak_bytes / GIB:.1f}",
                    ranked.reason,
                )
            )
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
        lines = [
            "  ".join(
                [
                    *(
                        cell.rjust(w) if i > 4 else cell.ljust(w)
                        for i, (cell, w) in enumerate(zip(row, widths, strict=False))
                    ),
                    row[-1],
                ]
            )
            for row in rows
        ]
        head = f"{self.considered:,} candidates; {self.compiled} small programs compiled"
        return "\n".join([head, *(line.rstrip() for line in lines), self.best.basis, *self.notes])
