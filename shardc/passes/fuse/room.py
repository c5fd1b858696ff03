r"""How much more a rank may hold at each moment of a body, before its peak is any higher.

    bytes                    the peak, at the loss
      |       ______        ............................
      |   ___/      \__      room: here a kernel may hold what it reads, or makes, for longer
      |__/             \__
      +-------------------- time, counted in barriers

Kernels are weighed against it one by one, and take of it what they hold.

Statistics that calls round to 16 bits are float32 for kernels: of norms between convolutions these are 512 bytes more,
of 8 MB at the peak, and what is fused for them moves a quarter less. So the peak may be higher by a 1024th, which is
less than an allocator rounds; kernels that hold more than that are not made.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardc.cost.memory import MemoryReport
from shardc.ir.graph import Graph, info
from shardc.ir.microbatch import in_microbatch
from shardc.passes.fuse.scene import Scene

MARGIN = 64  # of the peak, one part of so many is left
SPARE = 1024  # and by one of so many it may rise


def allowed(peak: int) -> int:
    """The highest peak with kernels, of a body whose calls have this one."""
    return peak + peak // SPARE


class Room:
    """By the number of barriers that are past: bytes."""

    def __init__(self, bytes: Sequence[int]) -> None:
        self.bytes = list(bytes)

    @classmethod
    def none(cls) -> Room:
        return cls(())

    @classmethod
    def of(cls, graph: Graph, report: MemoryReport, scene: Scene) -> Room:
        """Of a body as it was before anything was changed for kernels; barriers are known by name."""
        barriers = {info(scene.calls[i]).name: at for at, i in enumerate(scene.barriers)}
        inside = in_microbatch(graph)
        calls = sorted(graph.calls(), key=lambda node: node not in inside)
        most = max(report.timeline, default=0)
        left = most - most // MARGIN
        free = [left] * (len(barriers) + 1)
        here = 0
        for call, held in zip(calls, report.timeline, strict=True):
            here = barriers.get(info(call).name, here)
            free[here] = min(free[here], left - held)
            if info(call).name in barriers:
                here += 1
        return cls(free)

    def has(self, bytes: int, first: int, last: int) -> bool:
        return bool(self.bytes) and bytes <= min(self.bytes[first : last + 1])

    def take(self, bytes: int, first: int, last: int) -> None:
        for at in range(first, min(last + 1, len(self.bytes))):
            self.bytes[at] -= bytes
