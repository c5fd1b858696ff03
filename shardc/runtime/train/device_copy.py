"""A batch on its way to a GPU, on a stream of its own, while the step before it is computed.

copied = copier(batch)          begins to copy from pinned memory, and returns
copied.arrived()                the batch on the device; what is queued after it waits for the copy, the host does not
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from shardc.ir.trees import flatten
from shardc.torch_compat import unflatten


@dataclass(frozen=True)
class Copied:
    """A batch, and its copy on a device."""

    host: Any
    device: Any
    done: torch.cuda.Event

    def arrived(self) -> Any:
        """The copy, for what the current stream does from now on."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self.done)
        for leaf in flatten(self.device)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                leaf.record_stream(stream)
        return self.device


class Copier:
    """Copies batches to a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)

    def __call__(self, batch: Any) -> Copied:
        tree = dict(cast("Mapping[str, Any]", batch)) if isinstance(batch, Mapping) else batch
        leaves, structure = flatten(tree)
        with torch.cuda.stream(self.stream):
            copies = [self._copy(leaf) for leaf in leaves]
            done = torch.cuda.Event()
            done.record(self.stream)
        return Copied(batch, unflatten(copies, structure), done)

    def _copy(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu" or leaf.layout != torch.strided:
            return leaf
        pinned = leaf if leaf.is_pinned() or not leaf.numel() else leaf.pin_memory()
        return pinned.to(self.device, non_blocking=True)
