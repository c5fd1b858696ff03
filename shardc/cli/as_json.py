"""What commands print, as plain data for `--json`: names are those of the API's fields, sizes are bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from shardc.api import Program
from shardc.cost.memory import PHASES
from shardc.explain.collective import Explanation
from shardc.explain.fusion import CallExplanation, Explained, Fusion, KernelExplanation
from shardc.explain.transfer import TransferExplanation
from shardc.ir.collectives import Collective
from shardc.ir.diagnostic import Diagnostic
from shardc.ir.graph import type_of
from shardc.ir.layers import layer_of
from shardc.partition.memory import ProgramMemory
from shardc.partition.transfer_report import ReportedTransfer
from shardc.runtime.oracle.report import Report
from shardc.schedule.instructions import instruction_text
from shardc.schedule.timeline import Timeline


def diagnostics(found: Iterable[Diagnostic]) -> list[dict[str, Any]]:
    return [{key: value for key, value in asdict(d).items() if value is not None} for d in found]


def program(program: Program) -> dict[str, Any]:
    """The summary: mesh, work, parameters, communication, and the stages of a pipeline."""
    stored, whole = program.parameter_bytes()
    ports = [
        (p, type_of(v))
        for p, v in zip(program.body.inputs, program.body.placeholders, strict=True)
        if p.role == "param"
    ]
    products = program.flops()
    staged = program.staged
    data: dict[str, Any] = {
        "mesh": {axis: program.mesh.size((axis,)) for axis in program.mesh.names},
        "ranks": program.mesh.world_size,
        "instructions": sum(1 for _ in program.body.calls()),
        "parameters": {
            "count": len(ports),
            "sharded": sum(1 for _, type in ports if type.axes),
            "bytes_per_rank": stored,
            "bytes": whole,
        },
        "flops_per_rank": {"total": products.total, **{PHASES[p]: products.of_phase(p) for p in PHASES}},
        "collectives": [collective(i, c) for i, c in enumerate(program.collectives())],
        "diagnostics": diagnostics(program.diagnostics),
    }
    if staged.axis:
        lists = staged.lists
        data["pipeline"] = {
            "axis": staged.axis,
            "stages": len(staged.stages),
            "schedule": lists.schedule,
            "microbatches": lists.microbatches,
        }
        data["transfers"] = [transfer(i, t) for i, t in enumerate(program.transfers(), len(data["collectives"]))]
    return data


def collective(number: int | None, c: Collective) -> dict[str, Any]:
    return _sent(number, c) | {
        "kind": c.kind,
        "op": c.op,
        "axes": list(c.axes),
        "layer": layer_of(c.fqn),
        "group_size": c.group_size,
        "payload_bytes": c.payload_bytes,
        "cause": c.cause,
    }


def transfer(number: int | None, t: ReportedTransfer) -> dict[str, Any]:
    return _sent(number, t) | {"name": t.name, "from_stage": t.origin, "to_stage": t.target}


def _sent(number: int | None, moved: Collective | ReportedTransfer) -> dict[str, Any]:
    """What collectives and transfers have in common; one that is explained has no number in the list."""
    numbered = {} if number is None else {"number": number}
    return numbered | {
        "value": moved.value,
        "phase": moved.phase,
        "bytes_per_rank": moved.bytes_per_rank,
        "times": moved.times,
        "source": moved.source,
    }


def explanation(explained: Explained) -> dict[str, Any]:
    """Of one value; `text` is what the command prints without --json."""
    data: dict[str, Any] = {"text": str(explained)}
    if isinstance(explained, Explanation):
        data |= {
            "collective": collective(None, explained.collective),
            "why": [{"axis": t.axis, "why": t.why, "needed": t.needed, "cause": t.cause} for t in explained.trails],
            "inherent": explained.inherent,
            "tried": explained.tried,
            "changes": [
                {
                    "text": change.text,
                    "bytes_sent": change.sent,
                    "parameter_bytes": change.parameter_bytes,
                    "work": change.work,
                    "gives_up": change.gives_up,
                }
                for change in explained.changes
            ],
        }
    elif isinstance(explained, TransferExplanation):
        data |= {
            "transfer": transfer(None, explained.transfer),
            "why": [{"axis": explained.axis, "why": explained.why, "needed": explained.needed}],
            "inherent": explained.inherent,
            "tried": explained.tried,
            "changes": [{"split": list(r.split), "bytes_sent": r.sent, "cost": r.cost} for r in explained.recuts],
        }
    elif isinstance(explained, KernelExplanation):
        data |= {"kernel": _kernel(explained)}
    else:
        data |= {"call": _call(explained)}
    return data


def kernels(fusions: Iterable[Fusion]) -> dict[str, Any]:
    """Every kernel, and every other call that moves something."""
    parts = list(fusions)
    calls = [call for part in parts for call in (*part.stayed.values(), *part.gone.values())]
    return {
        "kernels": [_kernel(kernel) for part in parts for kernel in part.kernels.values()],
        "calls": [_call(call) for call in calls if call.before or call.after],
    }


def _kernel(kernel: KernelExplanation) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "graph": kernel.graph,
        "template": kernel.template,
        "phase": kernel.about.phase,
        "calls": [call.name for call in kernel.calls],
        "bytes_moved": kernel.after,
        "bytes_before": kernel.before,
        "source": kernel.about.source,
    }


def _call(call: CallExplanation) -> dict[str, Any]:
    return {
        "name": call.name,
        "graph": call.graph,
        "op": call.op,
        "bytes_moved": call.after,
        "bytes_before": call.before,
        "why": call.why,
    }


def memory(report: ProgramMemory, top: int) -> dict[str, Any]:
    moment = report.peak_at
    fullest = report.fullest
    return {
        "peak_bytes": report.peak,
        "stored_bytes": report.stored,
        "host_bytes": report.host.most,
        "peak_at": None if moment is None else {"name": moment.name, "op": moment.op, "phase": moment.phase},
        "fullest_rank": fullest.ranks[0],
        "categories": {
            row.category: {"stored_bytes": row.stored, "bytes_at_the_peak": row.bytes}
            for row in report.of_rank(fullest.ranks[0])
        },
        "ranks": [
            {"ranks": list(c.ranks), "stages": list(c.stages), "peak_bytes": c.report.peak} for c in report.coordinates
        ],
        "largest": [{"name": v.name, "category": v.category, "bytes": v.bytes} for v in report.top(top)],
    }


def verification(report: Report) -> dict[str, Any]:
    wrong = report.first_mismatch
    return {
        "ok": report.ok,
        "ranks": report.ranks,
        "dtype": str(report.dtype).removeprefix("torch."),
        "tolerance": report.tolerance,
        "max_rel_error": _finite(report.max_rel_error),
        "eager_error": _finite(report.eager_error),
        "first_mismatch": None if wrong is None else diagnostics([wrong.diagnostic()])[0],
        "diagnostics": diagnostics(report.diagnostics),
        "rows": [
            {"role": r.role, "name": r.name, "error": _finite(r.error), "ok": report.within(r)} for r in report.rows
        ],
    }


def timeline(t: Timeline) -> dict[str, Any]:
    return {
        "makespan": t.makespan,
        "bubble": t.bubble,
        "peak_live": list(t.peak_live),
        "peak_bytes": list(t.peak_bytes),
        "events": [
            {"rank": e.rank, "instruction": instruction_text(e.instruction), "start": e.start, "end": e.end}
            for e in t.events
        ],
    }


def _finite(number: float | None) -> float | str | None:
    """JSON has no infinity and no NaN."""
    return number if number is None or math.isfinite(number) else str(number)
