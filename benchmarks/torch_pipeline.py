"""How long torch's pipeline runtime takes for a schedule of several stages a rank, from the seconds of its work.

It sends and receives in one queue a rank, in the order of its list (NCCL runs batched point-to-point calls on the
stream of one communicator), and puts a receive into the list where the sender's turn to send comes: so a rank that has
to receive what is not there yet sends nothing meanwhile. Our replay lets transfers overtake each other.

Source: `_add_send_recv` and `_PipelineScheduleRuntime` of torch.distributed.pipelining.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Work(NamedTuple):
    """The forward or backward of a stage for a microbatch."""

    backward: bool
    stage: int
    microbatch: int


class Transfer(NamedTuple):
    """What a stage sends for a microbatch to the next one, or backward to the one before."""

    backward: bool
    to: int
    microbatch: int


@dataclass
class _Rank:
    left: deque[Work]
    done: set[Work] = field(default_factory=set[Work])
    receives: set[Transfer] = field(default_factory=set[Transfer])
    listed: deque[Work | Transfer] = field(default_factory=deque[Work | Transfer])
    now: float = 0.0  # when its work so far has ended
    queue: deque[Transfer] = field(default_factory=deque[Transfer])
    posted: dict[Transfer, float] = field(default_factory=dict[Transfer, float])
    sent: float = 0.0  # when its transfers so far have ended
    arrived: dict[Transfer, float] = field(default_factory=dict[Transfer, float])


def step_seconds(orders: Sequence[Sequence[Work]], seconds: Callable[[Work], float], transfer: float) -> float:
    """`orders` are the works of each rank, of which the first stages are on ranks 0, 1, 2 ... in turn; `transfer` is
    how long one takes."""
    ranks = [_Rank(deque(order)) for order in orders]
    stages = 1 + max(work.stage for order in orders for work in order)
    _list(ranks, stages)
    moved = True
    while moved:
        moved = any(_run(rank, stages, len(ranks), seconds) for rank in ranks)
        moved |= any(_transfer(ranks, number, transfer) for number in range(len(ranks)))
    assert not any(rank.listed or rank.queue for rank in ranks), "ranks wait for each other for ever"
    return max(max(rank.now, rank.sent) for rank in ranks)


def _needed(work: Work, stages: int) -> Work | None:
    """What has to be done before, on the stage that sends to this one."""
    of = work.stage + (1 if work.backward else -1)
    return work._replace(stage=of) if 0 <= of < stages else None


def _list(ranks: list[_Rank], stages: int) -> None:
    """Puts transfers among the works."""
    while any(rank.left for rank in ranks):
        before = sum(len(rank.left) for rank in ranks)
        for rank in ranks:
            if not rank.left:
                continue
            work, needed = rank.left[0], _needed(rank.left[0], stages)
            if needed is not None and Transfer(*work) not in rank.receives and needed not in rank.done:
                continue
            rank.done.add(rank.left.popleft())
            rank.listed.append(work)
            to = work.stage + (-1 if work.backward else 1)
            if 0 <= to < stages and (peer := ranks[to % len(ranks)]) is not rank:
                sent = Transfer(work.backward, to, work.microbatch)
                rank.listed.append(sent)
                peer.listed.append(sent)
                peer.receives.add(sent)
        assert sum(len(rank.left) for rank in ranks) < before, "the schedule waits for itself"


def _run(rank: _Rank, stages: int, count: int, seconds: Callable[[Work], float]) -> bool:
    """Goes on in a rank's list until what it needs has not arrived."""
    moved = False
    while rank.listed:
        item = rank.listed[0]
        if isinstance(item, Transfer):
            rank.posted[item] = rank.now
            rank.queue.append(item)
        else:
            needed = _needed(item, stages)
            if needed is not None and (needed.stage - item.stage) % count:
                if (arrived := rank.arrived.get(Transfer(*item))) is None:
                    return moved
                rank.now = max(rank.now, arrived)
            rank.now += seconds(item)
        rank.listed.popleft()
        moved = True
    return moved


def _transfer(ranks: list[_Rank], number: int, seconds: float) -> bool:
    """Does a rank's next transfer, if it is the other's next, too."""
    rank, moved = ranks[number], False
    while rank.queue:
        item = rank.queue[0]
        sender = item.to + (1 if item.backward else -1)
        ends = [ranks[item.to % len(ranks)], ranks[sender % len(ranks)]]
        if any(not end.queue or end.queue[0] != item for end in ends):
            return moved
        ended = max(max(end.posted[item], end.sent) for end in ends) + seconds
        for end in ends:
            end.queue.popleft()
            end.sent = ended
        ends[0].arrived[item] = ended
        moved = True
    return moved
