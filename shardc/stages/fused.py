"""A pipelined step whose parts have padded products, buckets and kernels: each part by itself, after the cut.

A part is a graph of its own, so nothing is fused across stages, nor between forward, backward, gathers and the step's
end; and no bucket joins two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from shardc.ir.graph import Graph
from shardc.passes.align import align
from shardc.passes.bucket import bucket
from shardc.passes.fuse import Fuse
from shardc.stages.cut import StageBodies
from shardc.stages.program import GRAPHS, Pipelined


def finished(program: Pipelined, aligned: bool, size: int, kernels: Fuse) -> Pipelined:
    """The same lists over graphs with padded products, buckets of up to `size` bytes (0: none), and kernels."""
    if aligned:
        program = _each(program, align)
    if size:
        program = bucketed(program, size)
    return fused(program, kernels) if kernels.enabled else program


def bucketed(program: Pipelined, size: int) -> Pipelined:
    """The same lists over graphs with buckets of up to `size` bytes."""
    return _each(program, partial(bucket, size=size))


def fused(program: Pipelined, kernels: Fuse | None = None) -> Pipelined:
    """The same lists over graphs with kernels."""
    return _each(program, (kernels or Fuse()).run)


def _each(program: Pipelined, change: Callable[[Graph], Graph]) -> Pipelined:
    stages = tuple(
        StageBodies(
            **{name: change(one[name]) for name in GRAPHS},
            gathers={name: change(graph) for name, graph in one.gathers.items()},
            reduce=None if one.reduce is None else change(one.reduce),
        )
        for one in program.stages
    )
    ends = tuple(replace(one, norm=change(one.norm), update=change(one.update)) for one in program.finishes)
    return replace(program, stages=stages, finishes=ends)
