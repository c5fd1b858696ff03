"""A pipelined step whose parts have kernels: each part by itself, after the cut.

A part is a graph of its own, so nothing is fused across stages, nor between forward, backward and the step's end.
"""

from __future__ import annotations

from dataclasses import replace

from shardc.passes.fuse import fuse
from shardc.stages.program import GRAPHS, Pipelined


def fused(program: Pipelined, exclude: tuple[str, ...] = ()) -> Pipelined:
    """The same lists over graphs with kernels."""
    stages = tuple(
        replace(one, **{name: fuse(part, exclude) for name in GRAPHS if (part := getattr(one, name)) is not None})
        for one in program.stages
    )
    ends = tuple(
        replace(one, norm=fuse(one.norm, exclude), update=fuse(one.update, exclude)) for one in program.finishes
    )
    return replace(program, stages=stages, finishes=ends)
