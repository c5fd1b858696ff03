"""The memory that `ir.arena` planned, on a device: one a launched program and rank, freed with it.

Graphs that share it never run at once. Whatever reads it is done, on the stream that runs the program, before what is
written there next begins; a program that is run on another stream than before waits for that one.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from shardc.ir.arena import Plan
from shardc.ir.graph import Graph, type_of

SCRATCH = 4 << 20  # bytes that kernels are given for their sums, at the least


class Arena:
    def __init__(self, plans: Mapping[Graph, Plan], device: torch.device) -> None:
        self.plans, self.device = dict(plans), device
        self.buffer = torch.empty(max((p.bytes for p in plans.values()), default=0), dtype=torch.uint8, device=device)
        self._scratch = self.buffer[:0]
        self._stream: torch.cuda.Stream | None = None

    def places(self, graph: Graph) -> dict[fx.Node, Tensor]:
        """The tensors of a graph's values that have places."""
        found: dict[fx.Node, Tensor] = {}
        for slot in self.plans[graph].slots:
            type = type_of(slot.value)
            size = type.local_bytes(graph.mesh)
            own = self.buffer[slot.offset : slot.offset + size]
            found[slot.value] = own.view(type.dtype).view(type.local_shape(graph.mesh))
        return found

    def holds(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() == self.buffer.untyped_storage().data_ptr()

    def scratch(self, size: int) -> Tensor:
        """Memory that a call may use while it runs, as others do."""
        if size > self._scratch.numel():
            most = max(SCRATCH, 1 << (size - 1).bit_length())
            self._scratch = torch.empty(most, dtype=torch.uint8, device=self.device)
        return self._scratch

    def enter(self) -> None:
        """A run begins, on the current stream."""
        if self.device.type == "cuda":
            now, before = torch.cuda.current_stream(self.device), self._stream
            if before is not None and now != before and not torch.cuda.is_current_stream_capturing():
                now.wait_stream(before)
            self._stream = now
