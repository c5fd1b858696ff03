r"""How many more bytes a rank may hold at each moment of a body before its peak rises.

    bytes                    the peak, at the loss
      |       ______        ............................
      |   ___/      \__      budget: here a kernel may extend the lifetime of its operands or results
      |__/             \__
      +-------------------- time, counted in barriers

Merges are checked against the budget one by one, and each reserves what it holds.

Statistics that calls round to 16 bits are float32 in kernels. For norms between convolutions these are 512 more bytes,
of 8 MB at the peak, and the kernels that need them move a quarter fewer bytes. So the peak may rise by a 1024th, which
is less than an allocator's rounding. Kernels that hold more than that are not made.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.cost.memory import MemoryReport
from shardc.ir.graph import Graph, info
from shardc.ir.microbatch import calls_as_run
from shardc.passes.fusion.clustering.fusion_graph import FusionGraph

HEADROOM_DIVISOR = 64  # a 64th of the peak is never given away
RISE_DIVISOR = 1024  # the peak may rise by a 1024th


def allowed_peak(peak: int) -> int:
    """The highest peak with kernels, of a body whose calls alone have the peak `peak`: both in the program's order,
    without what is in flight beside it."""
    return peak + peak // RISE_DIVISOR


class MemoryBudget:
    """Free bytes, by the number of barriers that have run."""

    def __init__(self, free: Sequence[int]) -> None:
        self.free = list(free)

    @classmethod
    def empty(cls) -> MemoryBudget:
        return cls(())

    @classmethod
    def of(cls, graph: Graph, report: MemoryReport, fusion_graph: FusionGraph) -> MemoryBudget:
        """The budget of a body as it was before any rewrite for kernels; barriers are matched by name."""
        barriers = {info(fusion_graph.calls[i]).name: epoch for epoch, i in enumerate(fusion_graph.barriers)}
        calls = calls_as_run(graph)
        peak = max(report.timeline, default=0)
        limit = peak - peak // HEADROOM_DIVISOR
        free = [limit] * (len(barriers) + 1)
        epoch = 0
        for call, held in zip(calls, report.timeline, strict=True):
            name = info(call).name
            if name in barriers:
                epoch = barriers[name]
            if limit - held < free[epoch]:
                free[epoch] = limit - held
            if name in barriers:
                epoch += 1
        return cls(free)

    def allows(self, bytes: int, first: int, last: int) -> bool:
        return bool(self.free) and bytes <= min(self.free[first : last + 1])

    def reserve(self, bytes: int, first: int, last: int) -> None:
        for epoch in range(first, min(last + 1, len(self.free))):
            self.free[epoch] -= bytes
