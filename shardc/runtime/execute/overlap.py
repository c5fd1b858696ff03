"""A collective that is begun, and waited for later: a process group runs it on a stream of its own (gloo: in a thread).

On a GPU the compute stream waits for it, not Python. When a rank begins and waits is `ir.overlap_schedule`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from shardc.ir.ops.collectives import Exchange, Steps
from shardc.ir.ops.context import current
from shardc.runtime.execute.process_groups import PendingResult


class AsyncCommunicator(Protocol):
    """A communicator that can begin an exchange and wait for it later."""

    def begin(self, exchange: Exchange) -> PendingResult: ...


def begin(steps: Callable[..., Steps], *args: Any) -> PendingResult:
    """Run a collective up to its exchange. The returned function waits and completes it."""
    generator = steps(*args)
    arrival = cast(AsyncCommunicator, current().comm).begin(next(generator))

    def wait() -> torch.Tensor:
        try:
            generator.send(arrival())
        except StopIteration as done:
            result: torch.Tensor = done.value
            return result
        raise AssertionError("a collective meets its group once")

    return wait
