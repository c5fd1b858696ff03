"""The memory that `ir.arena` planned, allocated on a device: one for each launched program and rank, freed with it.

Graphs that share an arena never run at the same time. On the stream that runs the program, all reads of a slot finish
before the next write to it begins. A program that runs on a different stream than before waits for the previous one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from shardc.ir.arena import Plan
from shardc.ir.graph import Graph, type_of

SCRATCH = 4 << 20  # minimum bytes of scratch memory, which kernels use for partial sums


class Arena:
    """`overwrites`: of what the arena does not hold, results may lie where dead operands lay (`over_operands`), so that
    a rank holds at most what the memory report says. Without it, that is what a rank holds."""

    def __init__(self, plans: Mapping[Graph, Plan], device: torch.device, overwrites: bool = False) -> None:
        self.plans, self.device, self.overwrites = dict(plans), device, overwrites
        self.buffer = torch.empty(max((p.bytes for p in plans.values()), default=0), dtype=torch.uint8, device=device)
        self._scratch = self.buffer[:0]
        self._stream: torch.cuda.Stream | None = None

    def tensors(self, graph: Graph) -> dict[fx.Node, Tensor]:
        """The tensors of a graph's values that have slots in the arena."""
        tensors: dict[fx.Node, Tensor] = {}
        for slot in self.plans[graph].slots:
            type = type_of(slot.value)
            size = type.local_bytes(graph.mesh)
            memory = self.buffer[slot.offset : slot.offset + size]
            tensors[slot.value] = memory.view(type.dtype).view(type.local_shape(graph.mesh))
        return tensors

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()

    def scratch(self, size: int) -> Tensor:
        """Scratch memory that a call may use while it runs. All calls share it."""
        if size > self._scratch.numel():
            capacity = max(SCRATCH, 1 << (size - 1).bit_length())
            self._scratch = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        return self._scratch

    def enter(self) -> None:
        """Begin a run on the current stream."""
        if self.device.type == "cuda":
            stream, previous = torch.cuda.current_stream(self.device), self._stream
            if previous is not None and stream != previous and not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(previous)
            self._stream = stream
