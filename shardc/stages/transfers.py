"""A rank's sends and receives beside its compute: posted where the list has them, waited for where they must be.

    Send x3#5 -> 3   Recv dx3#2 <- 3      one batch: posted together, in the order of their channels
    Forward 2 #6                          runs meanwhile
    Backward 2 #2                         reads dx3#2: here its receive is waited for

Why this cannot deadlock if the lists are proved. The proof (prove.py) puts all events of all ranks on one line of time,
each batch posted when its rank comes to it; there a rank waits at once for all that it has posted. Here it waits later
or not at all: for a receive at its first use, for a send when `IN_FLIGHT` batches are under way or the step ends.
Suppose that ranks are stuck, and take the one whose place on the line is earliest. It waits for a transfer that stands
at its place or before, so its peer has not posted that one, and is stuck earlier still: a contradiction.

Over NCCL a batch is one group call on a stream of its own, and batches of a rank run one after another there, in the
order of the list: that stream is the proof's machine, and compute waits for it where it reads, by an event; the host
waits for nothing. What is sent is held until it has gone, what is received is made in compute's memory before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardc.runtime.monitor import Monitor

IN_FLIGHT = 8  # batches whose sends are not waited for yet


class Clock(Protocol):
    """Notes when things begin and end."""

    def begin(self, place: int) -> None: ...
    def end(self, place: int) -> None: ...


class Tensor(NamedTuple):
    """What a receive allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Channel(NamedTuple):
    """One end of a transfer of the list: the peer, by its rank in the job, and a tag for each tensor of the value."""

    place: int
    peer: int
    tags: tuple[int, ...]


class Arrival:
    """Tensors that are being received."""

    def __init__(
        self, transfers: Transfers, place: int, works: Sequence[Any], tensors: tuple[torch.Tensor, ...]
    ) -> None:
        self._transfers, self._place, self._works, self._tensors = transfers, place, works, tensors

    def wait(self) -> tuple[torch.Tensor, ...]:
        """They are there for whatever compute does next."""
        self._transfers.wait(self._works, (self._place,))
        return self._tensors


class _Sent(NamedTuple):
    works: Sequence[Any]
    places: tuple[int, ...]
    tensors: list[torch.Tensor]  # that must live until they have gone


class Transfers:
    """What a rank has under way. `group` has the ranks of the pipeline's axis that it sends to and receives from."""

    def __init__(self, group: Any, device: torch.device, limit: timedelta) -> None:
        self._group, self._device, self._limit = group, device, limit
        self._on_gpu = device.type == "cuda"
        self._flight: deque[_Sent] = deque()
        self.monitor: Monitor | None = None
        self.clock: Clock | None = None

    def post(
        self,
        sends: Sequence[tuple[Channel, Sequence[torch.Tensor]]],
        receives: Sequence[tuple[Channel, Sequence[Tensor]]],
    ) -> list[Arrival]:
        """Begin a batch. What is sent may be let go of, but not written to until the step is over."""
        self._make_room()
        ops: list[dist.P2POp] = []
        leaving: list[torch.Tensor] = []
        coming: list[tuple[Channel, tuple[torch.Tensor, ...], slice]] = []
        for channel, tensors in sends:
            self._begin(channel.place)
            for tag, tensor in zip(channel.tags, tensors, strict=True):
                if tensor.numel():
                    leaving.append(tensor.contiguous())
                    ops.append(dist.P2POp(dist.isend, leaving[-1], channel.peer, group=self._group, tag=tag))
        sent = len(ops)
        for channel, types in receives:
            self._begin(channel.place)
            first = len(ops)
            made = tuple(torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in types)
            for tag, tensor in zip(channel.tags, made, strict=True):
                if tensor.numel():
                    ops.append(dist.P2POp(dist.irecv, tensor, channel.peer, group=self._group, tag=tag))
            coming.append((channel, made, slice(first, len(ops))))
        try:
            works: Sequence[Any] = dist.batch_isend_irecv(ops) if ops else []
        except Exception as failure:
            raise self._blamed(failure) from failure
        whole = len(works) != len(ops)  # one work for all of them
        if sends:
            places = tuple(channel.place for channel, _ in sends)
            self._flight.append(_Sent(works if whole else works[:sent], places, leaving))
        return [Arrival(self, one.place, works if whole else works[own], made) for one, made, own in coming]

    def drain(self) -> None:
        """Wait for all that was sent."""
        while self._flight:
            self._retire()

    def drop(self) -> None:
        """Forget what a failed step has left."""
        self._flight.clear()

    def wait(self, works: Sequence[Any], places: Sequence[int]) -> None:
        """On a GPU compute waits, not the caller."""
        if self.monitor is not None:
            self.monitor.at = places[0]
        try:
            for work in works:
                if self._on_gpu:
                    work.wait()
                else:
                    work.wait(self._limit)
        except Exception as failure:
            raise self._blamed(failure) from failure
        if self.clock is not None:
            for place in places:
                self.clock.end(place)

    def _make_room(self) -> None:
        while self._flight and (len(self._flight) >= IN_FLIGHT or self._gone(self._flight[0])):
            self._retire()

    def _gone(self, sent: _Sent) -> bool:
        """Whether waiting for it would cost nothing. gloo says so only when it is asked to wait."""
        return self._on_gpu and all(work.is_completed() for work in sent.works)

    def _retire(self) -> None:
        sent = self._flight.popleft()
        self.wait(sent.works, sent.places)

    def _begin(self, place: int) -> None:
        if self.monitor is not None:
            self.monitor.at = place
        if self.clock is not None:
            self.clock.begin(place)

    def _blamed(self, failure: Exception) -> Exception:
        return failure if self.monitor is None else self.monitor.blame(failure)
