"""The Triton sources of a program's kernels, as they would run on an H200: what `--emit triton` prints."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_triton.fused.launcher import source
from kernels_triton.fused.op import FUSED
from kernels_triton.fused.text import parse
from shardc.ir.graph import Graph, info


def emit_triton(graphs: Iterable[Graph]) -> str:
    """Each distinct kernel once, headed by the calls that run it."""
    callers: dict[str, list[str]] = {}
    for graph in graphs:
        for node in graph.calls():
            if node.target is FUSED:
                callers.setdefault(str(node.args[1]), []).append(info(node).name)
    if not callers:
        return "# no call is fused: write fuse: true in the plan\n"
    parts = [f"# {', '.join(f'%{name}' for name in names)}\n{source(parse(line))}" for line, names in callers.items()]
    return "\n\n".join(parts)
