"""Runs a rank's transfers beside its compute: posted at their place in the list, waited for as late as possible.

    Send x3#5 -> 3   Recv dx3#2 <- 3      one batch: posted together, in the order of their channels
    Forward 2 #6                          runs during the transfers
    Backward 2 #2                         reads dx3#2, and so waits for its receive

Why this cannot deadlock if the lists are proved: the proof (prove.py) places all events of all ranks on one time line.
Each batch is posted when its rank reaches it, and the rank waits at once for everything that it posted. This runtime
waits later or not at all: for a receive at its first use, for a send when `SENDS_IN_FLIGHT` batches are in flight or
the step ends. Suppose that ranks are stuck, and take the one whose position on the time line is earliest. It waits
for a transfer at its position or before, so its peer has not posted that one and is stuck even earlier: a
contradiction.

What goes onward, to a coordinate behind the sender's, and what comes back have a process group each. So a receive that
waits for a gradient does not hold up an activation that is sent after it.

Over NCCL a batch is one group call in each direction, on a stream of the direction's own, where those of a rank run one
after another in the order of the list. A stream waits for less than the machine of the proof, which runs all of them in
this order: what is stuck there waits for something earlier on the time line, as above. Compute waits for a stream by an
event at the first read; the host never waits. Sent tensors stay allocated until the send is complete; receive buffers
are allocated in compute's stream beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardc.ir.ops.scaled import FP8
from shardc.runtime.execute.monitor import RunMonitor
from shardc.schedule.lists import SENDS_IN_FLIGHT


class Clock(Protocol):
    """Records the begin and end of instructions by program counter."""

    def begin(self, counter: int) -> None: ...
    def end(self, counter: int) -> None: ...


class TensorSpec(NamedTuple):
    """The shape and dtype of a tensor that a receive allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class ChannelEnd(NamedTuple):
    """One end of a transfer of the list: the peer, by its rank in the job, a tag for each tensor of the value, and
    whether it goes `onward`, to a coordinate behind the sender's."""

    counter: int
    peer: int
    tags: tuple[int, ...]
    onward: bool = True


class PendingReceive:
    """Tensors that are being received."""

    def __init__(
        self, transfers: Transfers, counter: int, works: Sequence[Any], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self._transfers, self._counter, self._works, self._tensors = transfers, counter, works, tensors

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, complete for all later compute."""
        self._transfers.wait(self._works, (self._counter,))
        return self._tensors


class _PendingSends(NamedTuple):
    works: Sequence[Any]
    counters: tuple[int, ...]
    tensors: list[torch.Tensor]  # kept alive until they are sent


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """A tensor of 8-bit floats as its bytes, which every backend moves; another as it is."""
    return x.view(torch.uint8) if x.dtype in FP8 else x


class Transfers:
    """A rank's transfers in flight. `groups` contain the ranks of the pipeline's axis that it exchanges values with, by
    whether a value goes onward."""

    def __init__(self, groups: Mapping[bool, Any], device: torch.device, limit: timedelta) -> None:
        self._groups, self._device, self._limit = groups, device, limit
        self._on_gpu = device.type == "cuda"
        self._pending_sends: deque[_PendingSends] = deque()
        self.monitor: RunMonitor | None = None
        self.clock: Clock | None = None

    def post(
        self,
        sends: Sequence[tuple[ChannelEnd, Sequence[torch.Tensor]]],
        receives: Sequence[tuple[ChannelEnd, Sequence[TensorSpec]]],
    ) -> list[PendingReceive]:
        """Begin a batch. The caller may free the sent tensors, but must not write to them until the step ends."""
        self._retire_old_sends()
        ops: dict[bool, list[dist.P2POp]] = {onward: [] for onward in self._groups}
        outgoing: list[torch.Tensor] = []
        incoming: list[tuple[ChannelEnd, tuple[torch.Tensor, ...], slice]] = []
        for channel, tensors in sends:
            self._begin(channel.counter)
            for tag, tensor in zip(channel.tags, tensors, strict=True):
                if tensor.numel():
                    outgoing.append(as_bytes(tensor.contiguous()))
                    ops[channel.onward].append(self._op(dist.isend, outgoing[-1], channel, tag))
        sent = {onward: len(those) for onward, those in ops.items()}
        for channel, types in receives:
            self._begin(channel.counter)
            those = ops[channel.onward]
            first = len(those)
            received = tuple(torch.empty(type.shape, dtype=type.dtype, device=self._device) for type in types)
            for tag, tensor in zip(channel.tags, received, strict=True):
                if tensor.numel():
                    those.append(self._op(dist.irecv, as_bytes(tensor), channel, tag))
            incoming.append((channel, received, slice(first, len(those))))
        try:
            works: dict[bool, Sequence[Any]] = {
                onward: dist.batch_isend_irecv(those) if those else [] for onward, those in ops.items()
            }
        except Exception as failure:
            raise self._blamed(failure) from failure

        def works_of(onward: bool, part: slice) -> Sequence[Any]:
            single = len(works[onward]) != len(ops[onward])  # the backend returned one work for the whole batch
            return works[onward] if single and part.start != part.stop else works[onward][part]

        if sends:
            counters = tuple(channel.counter for channel, _ in sends)
            sending = [work for onward, count in sent.items() for work in works_of(onward, slice(0, count))]
            self._pending_sends.append(_PendingSends(sending, counters, outgoing))
        return [
            PendingReceive(self, channel.counter, works_of(channel.onward, part), received)
            for channel, received, part in incoming
        ]

    def _op(self, act: Any, tensor: torch.Tensor, channel: ChannelEnd, tag: int) -> dist.P2POp:
        return dist.P2POp(act, tensor, channel.peer, group=self._groups[channel.onward], tag=tag)

    def drain(self) -> None:
        """Wait for all sends."""
        while self._pending_sends:
            self._retire()

    def drop(self) -> None:
        """Discard the pending sends of a failed step."""
        self._pending_sends.clear()

    def wait(self, works: Sequence[Any], counters: Sequence[int]) -> None:
        """Wait for works. On a GPU the compute stream waits, not the caller."""
        if self.monitor is not None:
            self.monitor.counter = counters[0]
        try:
            for work in works:
                if self._on_gpu:
                    work.wait()
                else:
                    work.wait(self._limit)
        except Exception as failure:
            raise self._blamed(failure) from failure
        if self.clock is not None:
            for counter in counters:
                self.clock.end(counter)

    def _retire_old_sends(self) -> None:
        while self._pending_sends and (
            len(self._pending_sends) >= SENDS_IN_FLIGHT or self._is_complete(self._pending_sends[0])
        ):
            self._retire()

    def _is_complete(self, sent: _PendingSends) -> bool:
        """Whether the sends are complete. gloo can tell only by waiting, so the answer is False there."""
        return self._on_gpu and all(work.is_completed() for work in sent.works)

    def _retire(self) -> None:
        sent = self._pending_sends.popleft()
        self.wait(sent.works, sent.counters)

    def _begin(self, counter: int) -> None:
        if self.monitor is not None:
            self.monitor.counter = counter
        if self.clock is not None:
            self.clock.begin(counter)

    def _blamed(self, failure: Exception) -> Exception:
        return failure if self.monitor is None else self.monitor.blame(failure)
