"""The Triton sources of a program's kernels, as they would run on an H200: what `--emit triton` prints."""

from __future__ import annotations

from collections.abc import Iterable

from kernels_triton.generated.launcher import source
from kernels_triton.ir.text import parse
from kernels_triton.match import source as hand_tuned
from kernels_triton.match.op import KERNELS, OPS
from shardc.ir.graph import Graph, info
from shardc.plan.fuse import Fusing


def emit_triton(graphs: Iterable[Graph], fusing: Fusing) -> str:
    """Each distinct kernel once, headed by the calls that run it: generated, or a template's launches and functions.
    Without kernels a comment that says why, by what the plan `fusing` for."""
    callers: dict[tuple[str, bool], list[str]] = {}
    for graph in graphs:
        for node in graph.calls():
            if node.target in KERNELS:
                key = (str(node.args[1]), node.target in OPS.values())
                callers.setdefault(key, []).append(info(node).name)
    if not callers:
        return f"# {fusing.without_kernels}\n"
    parts: list[str] = []
    shown: set[tuple[str, str]] = set()
    for (line, template), names in callers.items():
        text = hand_tuned.template_source(parse(line), shown) if template else source(parse(line))
        parts.append(f"# {', '.join(f'%{name}' for name in names)}\n{text}")
    return "\n\n".join(parts)
