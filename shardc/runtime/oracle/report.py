"""What `verify` found: each output with its error, the first value that is wrong, and the text of it all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shardc.ir.diagnostic import Diagnostic

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
PLURALS = {
    "loss": "losses",
    "grad": "gradients",
    "param": "parameters",
    "state": "states",
    "buffer": "buffers",
    "output": "outputs",
    "input": "inputs changed",
}
EAGER_TOLERANCE = 1e-5  # libraries hard-code float32 in places, where our graph computes in float64 throughout
EAGER_OWN = 1e-2  # of a model that runs in its own float32 alone: it rounds, and small gradients show it
EAGER_HALF = 1e-1  # of a model that casts to half precision itself


@dataclass(frozen=True)
class Row:
    """One compared output. `eager_error` is the reference's own error against eager PyTorch, if that was run."""

    role: str
    name: str
    error: float
    shape: tuple[int, ...]
    eager_error: float | None = None
    explained: float = 0.0  # by rounding alone


@dataclass(frozen=True)
class Mismatch:
    """The first instruction whose value is not that of its namesake on one device, and the ranks that hold it wrong."""

    name: str
    op: str
    type: str
    error: float
    ranks: tuple[int, ...]
    source: str = ""
    source_text: str = ""
    fqn: str = ""
    cause: str = ""

    def diagnostic(self) -> Diagnostic:
        ranks = ", ".join(map(str, self.ranks))
        return Diagnostic(
            "SC505",
            f"%{self.name} is the first value that is not the single device's, by {self.error:.1e}, on ranks {ranks}",
            location=self.source or None,
            source_text=self.source_text or None,
            fqn=self.fqn or None,
            tensor=f"%{self.name} : {self.type}",
            op=self.op,
            cause=self.cause or None,
            hint="check the rule of this op, if shardc.rule registered it; otherwise report this as a fault of shardc",
        )


@dataclass(frozen=True)
class Report:
    """The result of `verify`. It is true when every row is within the tolerance."""

    rows: tuple[Row, ...]
    tolerance: float
    dtype: torch.dtype
    ranks: int
    first_mismatch: Mismatch | None = None
    absent: str = ""  # why eager PyTorch was not asked
    eager_tolerance: float = EAGER_TOLERANCE
    diagnostics: tuple[Diagnostic, ...] = ()  # of the step itself, which is as the plan says
    overflow: str = ""  # the first value that has no room in the dtype, where eager PyTorch's numbers are finite

    @property
    def ok(self) -> bool:
        return self.equal and all(self.within_eager(row) for row in self.rows)

    @property
    def equal(self) -> bool:
        """The distributed program is the single-device one, whatever eager PyTorch says."""
        return all(self.within(row) for row in self.rows)

    def within(self, row: Row) -> bool:
        return row.error <= max(self.tolerance, row.explained)  # a NaN is not

    def within_eager(self, row: Row) -> bool:
        """The reference is what eager PyTorch computes, if that ran."""
        error = row.eager_error
        return error is None or error <= max(self.eager_tolerance, self.tolerance, row.explained)

    @property
    def max_rel_error(self) -> float:
        """The worst error; infinite where one is not a number."""
        return max((number(row.error) for row in self.rows), default=0.0)

    @property
    def eager_error(self) -> float | None:
        """The reference's worst error against eager PyTorch; None where that did not run."""
        errors = [number(row.eager_error) for row in self.rows if row.eager_error is not None]
        return max(errors) if errors else None

    def __bool__(self) -> bool:
        return self.ok

    def __repr__(self) -> str:
        verdict, name = "ok" if self.ok else "NOT ok", str(self.dtype).removeprefix("torch.")
        return f"Report({verdict}: {len(self.rows)} rows, {self.ranks} ranks in {name}, error {self.max_rel_error:.1e})"

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        equal = self.equal
        verdict = "equal to the single device" if equal else "DIFFERENT from the single device"
        if equal and not self.ok:
            verdict = "equal to the traced graph, but that is NOT what eager PyTorch computes"
        error = f"error {self.max_rel_error:.1e}, tolerance {self.tolerance:.0e}"
        lines = [f"{self.ranks} ranks in {name}: {verdict}; {error}{self._beyond() if equal else ''}"]
        for role, plural in PLURALS.items():
            rows = sorted((row for row in self.rows if row.role == role), key=lambda row: -row.error)
            if not rows:
                continue
            label = role if len(rows) == 1 else plural
            lines.append(f"  {len(rows):>4} {label:<10} {rows[0].error:.1e} at worst ({rows[0].name})")
            if not self.ok:
                wrong = [row for row in rows if not self.within(row)]
                lines += [f"       {row.error:.1e}  {row.name} {list(row.shape)}" for row in wrong[:10]]
                if len(wrong) > 10:
                    lines.append(f"       and {len(wrong) - 10} more")
        if self.eager_error is not None:
            why = ", where rounding explains it" if self.ok and self.eager_error > self.eager_tolerance else ""
            lines.append(f"  the single device against eager PyTorch: {self.eager_error:.1e}{why}")
            wrong = [row for row in self.rows if not self.within_eager(row)]
            lines += [f"       {row.eager_error:.1e}  {row.role} {row.name} {list(row.shape)}" for row in wrong[:10]]
            if self.overflow:
                lines.append(
                    f"  %{self.overflow} has no room in {name}, in which all is computed here, also what the model"
                )
                lines.append("  computes in float32 by itself: verify in float64, or in bfloat16")
        elif self.absent:
            lines.append(f"  eager PyTorch was not asked: {self.absent}")
        if self.first_mismatch is not None:
            lines += ["", self.first_mismatch.diagnostic().render()]
        return "\n".join([*lines, *(diagnostic.render() for diagnostic in self.diagnostics)])

    def _beyond(self) -> str:
        """Of a report that is equal: how much of the error beyond the tolerance rounding explains."""
        beyond = [row for row in self.rows if row.error > self.tolerance]
        return f", or up to {max(row.explained for row in beyond):.1e} where rounding explains it" if beyond else ""


def number(error: float) -> float:
    return math.inf if math.isnan(error) else error


def worst_of(reports: Sequence[Report]) -> Report:
    """The report of several steps: of each output the worst row; the first mismatch, and why eager was not asked."""
    rows: dict[tuple[str, str], Row] = {}
    for row in (row for report in reports for row in report.rows):
        key = (row.role, row.name)
        worst = rows.setdefault(key, row)
        beyond = row.error - row.explained > worst.error - worst.explained or math.isnan(row.error)
        errors = [e for e in (worst.eager_error, row.eager_error) if e is not None]
        eager = max(errors, key=number) if errors else None
        rows[key] = replace(row if beyond else worst, eager_error=eager)
    last = reports[-1]
    return replace(last, rows=tuple(rows.values()), eager_tolerance=max(r.eager_tolerance for r in reports))
