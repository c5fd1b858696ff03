"""The kernels of a program in a table, and the calls that are none: what `explain` is asked about."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardc.api import Program
from shardc.cli.summary import table_of
from shardc.explain.fusion import CallExplanation, Fusion, asked_of, fusions
from shardc.ir.collectives import human_bytes


def kernel_list(program: Program) -> list[RenderableType]:
    """Every kernel, then the other calls that move something, those of one op and one reason in a row."""
    found = fusions(program, program.staged)
    if not any(one.kernels for one in found):
        return [Text(asked_of(program).without_kernels), *([_others(found)] if found else [])]
    table = table_of("kernel", "runs", "calls", "phase", "moved", "before", "line", number=(2, 4, 5))
    for one in found:
        for kernel in one.kernels.values():
            name = f"{one.graph}:{kernel.name}" if one.graph else f"%{kernel.name}"
            runs, calls = kernel.template or "generated", str(len(kernel.calls))
            sizes = human_bytes(kernel.after), human_bytes(kernel.before)
            table.add_row(name, runs, calls, kernel.about.phase, *sizes, kernel.about.source)
    table.add_section()
    table.add_row(*_total(found))
    return [table, _others(found)]


def _others(found: Sequence[Fusion]) -> RenderableType:
    rows: dict[tuple[str, str], list[CallExplanation]] = {}
    for one in found:
        for call in one.stayed.values():
            rows.setdefault((call.op, call.why), []).append(call)
        for call in one.gone.values():
            rows.setdefault((call.op, "what reads it makes it itself"), []).append(call)
    table = table_of("no kernel", "calls", "moved", "before", "why", number=(1, 2, 3))
    for (op, why), calls in rows.items():
        after, before = sum(one.after for one in calls), sum(one.before for one in calls)
        if after or before:
            table.add_row(op, str(len(calls)), human_bytes(after), human_bytes(before), why)
    return table


def _total(found: Sequence[Fusion]) -> tuple[str, ...]:
    """Of everything that is counted, kernel or not: what the summary says, too."""
    kernels = [kernel for one in found for kernel in one.kernels.values()]
    calls = [call for one in found for call in (*one.stayed.values(), *one.gone.values())]
    after = sum(one.after for one in (*kernels, *calls))
    before = sum(one.before for one in (*kernels, *calls))
    return "with what is no kernel", "", "", "", human_bytes(after), human_bytes(before), ""
