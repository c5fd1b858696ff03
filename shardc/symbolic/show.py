"""Formulas as text: a line for each kind of collective, by phase and axes, and what one of them carries.

fwd  tp      2*L + 1  all_reduce (sum) of 128*B*S/dp     256*B*S*(tp - 1)/(dp*tp) B each
"""

from __future__ import annotations

from typing import Any

from shardc.symbolic.formulas import Formulas, Transfer

SHOWN = 6  # forms of the peak
NAMES = {"fwd": "forward", "bwd": "backward", "opt": "optimizer"}


def shown(formulas: Formulas) -> str:
    """All formulas, and where they hold."""
    rows = [("phase", "axis", "count", "collective", "of bytes", "sent by a rank, each")]
    rows += [_row(formulas, t) for t in formulas.transfers]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", "FLOPs of a rank"]
    lines += [f"  {NAMES[phase]}: {form}" for phase, form in formulas.flops.items()]
    if formulas.memory:
        lines += ["", "bytes of a rank at the peak, the most of"]
        lines += [f"  {form}" for form in formulas.peaks[:SHOWN]]
        more = len(formulas.memory) - SHOWN
        lines += [f"  and {more} more, at other calls"] if more > 0 else []
    lines += ["", "where", *(f"  {line}" for line in str(formulas.domain).splitlines())]
    return "\n".join([*lines, *(f"note: {note}" for note in formulas.notes)])


def _row(formulas: Formulas, t: Transfer) -> tuple[str, ...]:
    count = str(formulas.count(t))
    kind = f"{t.kind} ({t.op})" if t.op else t.kind
    return t.phase, ".".join(t.axes), count, kind, str(t.payload), compact(formulas.sent(t))


def compact(form: Any) -> str:
    import sympy

    return str(form if form.has(sympy.ceiling) else sympy.factor(form))
