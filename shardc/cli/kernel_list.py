"""The kernels of a program in a table, and the calls that are none: what `explain` is asked about."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from shardc.api import Program
from shardc.cli.summary import Entry, add_by_layer, table_of
from shardc.explain.fusion import CallExplanation, Fusion, KernelExplanation, asked_of, fusions
from shardc.ir.collectives import human_bytes
from shardc.ir.layers import layer_of


def kernel_list(program: Program, by_layer: bool = False) -> list[RenderableType]:
    """Every kernel, then the other calls that move something, those of one op and one reason in a row.

    `by_layer` is narrow, and has kernels of equal layers once."""
    graph_fusions = fusions(program, program.staged)
    if not any(fusion.kernels for fusion in graph_fusions):
        return [Text(asked_of(program).without_kernels), *([_others(graph_fusions)] if graph_fusions else [])]
    if by_layer:
        table = table_of("kernel", "calls", "moved", "before", number=(1, 2, 3))
        for fusion in graph_fusions:
            if fusion.graph:
                table.add_section()
                table.add_row(f"{fusion.graph}:")
            add_by_layer(table, [_entry(kernel) for kernel in fusion.kernels.values()], 0)
    else:
        table = table_of("kernel", "runs", "calls", "phase", "moved", "before", "line", number=(2, 4, 5))
        for fusion in graph_fusions:
            for kernel in fusion.kernels.values():
                name = f"{fusion.graph}:{kernel.name}" if fusion.graph else f"%{kernel.name}"
                runs, calls = kernel.template or "generated", str(len(kernel.calls))
                sizes = human_bytes(kernel.after), human_bytes(kernel.before)
                table.add_row(name, runs, calls, kernel.about.phase, *sizes, kernel.about.source)
    table.add_section()
    label, moved, before = _total(graph_fusions)
    table.add_row(label, "", moved, before) if by_layer else table.add_row(label, "", "", "", moved, before, "")
    return [table, _others(graph_fusions)]


def _entry(kernel: KernelExplanation) -> Entry:
    template = f" ({kernel.template})" if kernel.template else ""
    cells = (template, str(len(kernel.calls)), human_bytes(kernel.after), human_bytes(kernel.before))
    return Entry(kernel.about.phase, layer_of(kernel.about.fqn), kernel.name, cells, " ".join(cells))


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


def _total(graph_fusions: Sequence[Fusion]) -> tuple[str, str, str]:
    """Of everything that is counted, kernel or not: what the summary says, too."""
    kernels = [kernel for part in graph_fusions for kernel in part.kernels.values()]
    calls = [call for part in graph_fusions for call in (*part.stayed.values(), *part.gone.values())]
    bytes_after = sum(part.after for part in (*kernels, *calls))
    bytes_before = sum(part.before for part in (*kernels, *calls))
    return "with what is no kernel", human_bytes(bytes_after), human_bytes(bytes_before)
