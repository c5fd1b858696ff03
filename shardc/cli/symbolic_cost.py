"""`shardc cost --symbolic`: what a step costs a rank, as formulas of the plan's symbols."""

from __future__ import annotations

from shardc.cli.commands import Asked, compiled
from shardc.cli.console import diagnose, out, progress, write_json
from shardc.symbolic.formulas import Formulas


def symbolic_cost(asked: Asked, *, as_json: bool) -> None:
    program, _ = compiled(asked, meta=True)
    with progress("compiling at other sizes"):
        formulas = program.symbolic()
    if as_json:
        write_json(plain(formulas))
        return
    diagnose(program.diagnostics)
    out().print(str(formulas), markup=False, highlight=False, soft_wrap=True)


def plain(formulas: Formulas) -> dict[str, object]:
    """The formulas as text that sympy reads."""
    transfers = [
        {
            "phase": t.phase,
            "axes": list(t.axes),
            "kind": t.kind,
            "op": t.op,
            "count": str(formulas.count(t)),
            "payload_bytes": str(t.payload),
            "bytes_per_rank": str(formulas.sent(t)),
        }
        for t in formulas.transfers
    ]
    peak = formulas.peak
    return {
        "collectives": transfers,
        "flops": {phase: str(form) for phase, form in formulas.flops.items()},
        "peak_bytes": None if peak is None else str(peak),
        "domain": str(formulas.domain).splitlines(),
        "notes": list(formulas.notes),
    }
