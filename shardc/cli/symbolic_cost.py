"""`shardc cost --symbolic`: what a step costs a rank, as formulas of the plan's symbols."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.cli.commands import Asked, compiled
from shardc.cli.console import diagnose, out, progress, write_json
from shardc.ir.diagnostic import error
from shardc.symbolic.formulas import Formulas
from shardc.symbolic.stages import StageFormulas


def symbolic_cost(asked: Asked, hardware: str | None, beside: Sequence[str], *, as_json: bool) -> None:
    """`beside` are the options that were given, `--symbolic` among them."""
    others = [option for option in beside if option != "--symbolic"] + ["--hardware"] * (hardware is not None)
    if others:
        message = f"{' and '.join(others)} cannot go with --symbolic"
        raise error("SC105", message, hint="ask for them in a command of their own")
    program, _ = compiled(asked, meta=True)
    with progress("compiling at other sizes"):
        formulas = program.symbolic() if program.pipelined is None else program.stage_formulas()
    if as_json:
        write_json(plain(formulas))
        return
    diagnose(program.diagnostics)
    out().print(str(formulas), markup=False, highlight=False, soft_wrap=True)


def plain(formulas: Formulas | StageFormulas) -> dict[str, object]:
    """The formulas as text that sympy reads."""
    if isinstance(formulas, StageFormulas):
        return _of_stages(formulas)
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


def _of_stages(formulas: StageFormulas) -> dict[str, object]:
    return {
        "sent": [
            {"origin": a, "target": b, "phase": phase, "bytes": str(f)} for (a, b, phase), f in formulas.sent.items()
        ],
        "collectives": [
            {"coordinate": c, "phase": phase, "axes": list(axes), "kind": kind, "bytes_per_rank": str(form)}
            for (c, phase, axes, kind), form in formulas.bytes.items()
        ],
        "flops": [{"coordinate": c, "phase": phase, "flops": str(form)} for (c, phase), form in formulas.flops.items()],
        "stored_bytes": {c: str(form) for c, form in formulas.stored.items()},
        "peak_bytes": {c: str(form) for c, form in formulas.peak.items()},
        "domain": str(formulas.domain).splitlines(),
        "notes": list(formulas.notes),
    }
