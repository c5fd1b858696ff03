"""The kernels of a program in a table, and the calls that are none: what `explain` is asked about."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardc.api import Program
from shardc.cli.summary import add_rows, table_of
from shardc.explain.fusion import CallExplanation, Fusion, KernelExplanation, asked_of, fusions
from shardc.ir.collectives import human_bytes
from shardc.ir.fold import Line
from shardc.ir.layers import layer_of


def kernel_list(program: Program, fold: bool = False) -> list[RenderableType]:
    """Every kernel, then the other calls that move something, those of one op and one reason in a row.

    With `fold`, kernels of equal layers once."""
    graph_fusions = fusions(program, program.staged)
    if not any(fusion.kernels for fusion in graph_fusions):
        return [Text(asked_of(program).without_kernels), *([_others(graph_fusions)] if graph_fusions else [])]
    table = table_of("kernel", "runs", "calls", "phase", "moved", "before", "line", number=(2, 4, 5))
    for fusion in graph_fusions:
        add_rows(table, [_kernel_row(fusion.graph, kernel) for kernel in fusion.kernels.values()], fold)
    table.add_section()
    table.add_row(*_total(graph_fusions))
    return [table, _others(graph_fusions)]


def _kernel_row(graph: str, kernel: KernelExplanation) -> tuple[Line, Sequence[str]]:
    name = f"{graph}:{kernel.name}" if graph else f"%{kernel.name}"
    about, sizes = kernel.about, (human_bytes(kernel.after), human_bytes(kernel.before))
    cells = (name, kernel.template or "generated", str(len(kernel.calls)), about.phase, *sizes, about.source)
    return Line(f"%{kernel.name} {' '.join(cells[1:-1])}", layer_of(about.fqn)), cells


def _others(graph_fusions: Sequence[Fusion]) -> RenderableType:
    rows: dict[tuple[str, str], list[CallExplanation]] = {}
    for fusion in graph_fusions:
        for call in fusion.stayed.values():
            rows.setdefault((call.op, call.why), []).append(call)
        for call in fusion.gone.values():
            rows.setdefault((call.op, "what reads it makes it itself"), []).append(call)
    table = table_of("no kernel", "calls", "moved", "before", "why", number=(1, 2, 3))
    for (op, why), calls in rows.items():
        bytes_after, bytes_before = sum(call.after for call in calls), sum(call.before for call in calls)
        if bytes_after or bytes_before:
            table.add_row(op, str(len(calls)), human_bytes(bytes_after), human_bytes(bytes_before), why)
    return table


def _total(graph_fusions: Sequence[Fusion]) -> tuple[str, ...]:
    """Of everything that is counted, kernel or not: what the summary says, too."""
    kernels = [kernel for part in graph_fusions for kernel in part.kernels.values()]
    calls = [call for part in graph_fusions for call in (*part.stayed.values(), *part.gone.values())]
    bytes_after = sum(part.after for part in (*kernels, *calls))
    bytes_before = sum(part.before for part in (*kernels, *calls))
    return "with what is no kernel", "", "", "", human_bytes(bytes_after), human_bytes(bytes_before), ""
