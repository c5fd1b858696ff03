"""What is posted when, and when it is waited for, on a transport that only takes notes."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardc.ir.diagnostic import ShardcError, error
from shardc.runtime.execute import transfers
from shardc.runtime.execute.transfers import ChannelEnd, TensorSpec, Transfers
from shardc.schedule.lists import SENDS_IN_FLIGHT


class Transport:
    """`torch.distributed`, as far as transfers use it. `coalesced`: one work for a batch, as NCCL gives."""

    isend, irecv = "send", "receive"

    def __init__(self, coalesced: bool = False) -> None:
        self.coalesced = coalesced
        self.posted: list[list[SimpleNamespace]] = []
        self.waited: list[str] = []

    def P2POp(self, op: str, tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> SimpleNamespace:
        assert tensor.is_contiguous()
        return SimpleNamespace(op=op, tensor=tensor, peer=peer, tag=tag, group=group)

    def batch_isend_irecv(self, ops: list[SimpleNamespace]) -> list[SimpleNamespace]:
        self.posted.append(ops)
        batch = len(self.posted) - 1
        names = [f"batch {batch}"] if self.coalesced else [f"{op.op} {batch}.{op.tag}" for op in ops]
        return [SimpleNamespace(wait=lambda _, name=name: self.waited.append(name)) for name in names]


def made(monkeypatch: pytest.MonkeyPatch, coalesced: bool = False) -> tuple[Transfers, Transport]:
    transport = Transport(coalesced)
    monkeypatch.setattr(transfers, "dist", transport)
    return Transfers({True: "onward", False: "back"}, torch.device("cpu"), timedelta(seconds=1)), transport


def test_a_receive_is_waited_for_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch)
    across = torch.arange(6.0).view(2, 3).t()
    sends = [(ChannelEnd(0, 1, (0, 1)), [across, torch.empty(0, 3)])]
    first, second = under_way.post(
        sends,
        [
            (ChannelEnd(1, 1, (0,)), [TensorSpec((3, 2), torch.bfloat16)]),
            (ChannelEnd(2, 2, (5,)), [TensorSpec((), torch.int64)]),
        ],
    )
    (ops,) = transport.posted
    assert [(op.op, op.peer, op.tag) for op in ops] == [("send", 1, 0), ("receive", 1, 0), ("receive", 2, 5)]
    assert torch.equal(ops[0].tensor, across)
    assert not transport.waited
    (tensor,) = second.wait()
    assert (tensor.shape, tensor.dtype) == ((), torch.int64)
    assert transport.waited == ["receive 0.5"]
    (tensor,) = first.wait()
    assert (tensor.shape, tensor.dtype) == ((3, 2), torch.bfloat16)
    assert transport.waited == ["receive 0.5", "receive 0.0"]
    under_way.drain()
    assert transport.waited[2:] == ["send 0.0"]


def test_so_many_sends_are_under_way_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch)
    for number in range(SENDS_IN_FLIGHT + 3):
        under_way.post([(ChannelEnd(number, 1, (number,)), [torch.ones(2)])], [])
    assert transport.waited == ["send 0.0", "send 1.1", "send 2.2"]
    under_way.drain()
    assert len(transport.waited) == SENDS_IN_FLIGHT + 3


def test_a_batch_of_one_work(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch, coalesced=True)
    (arrival,) = under_way.post(
        [(ChannelEnd(0, 1, (0,)), [torch.ones(2)])], [(ChannelEnd(1, 1, (0,)), [TensorSpec((2,), torch.float32)])]
    )
    arrival.wait()
    under_way.drain()
    assert transport.waited == ["batch 0", "batch 0"]


def test_an_empty_batch_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch)
    (arrival,) = under_way.post([], [(ChannelEnd(0, 1, (0,)), [TensorSpec((0, 4), torch.float32)])])
    assert arrival.wait()[0].shape == (0, 4)
    assert not transport.posted


def test_whose_fault_it_is_is_found_where_the_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch)
    monitor = SimpleNamespace(counter=-1, blame=lambda failure: error("SC502", f"{failure}, at {monitor.counter}"))
    under_way.monitor = monitor  # type: ignore[assignment]

    def fails(_: object) -> None:
        raise RuntimeError("closed")

    monkeypatch.setattr(transport, "batch_isend_irecv", lambda ops: [SimpleNamespace(wait=fails) for _ in ops])
    (arrival,) = under_way.post([], [(ChannelEnd(7, 1, (0,)), [TensorSpec((2,), torch.float32)])])
    monitor.counter = 9
    with pytest.raises(ShardcError, match="closed, at 7"):
        arrival.wait()


@pytest.mark.parametrize("coalesced", [False, True])
def test_directions_have_a_group_each(monkeypatch: pytest.MonkeyPatch, coalesced: bool) -> None:
    """A gradient that is waited for holds up no activation: they are other works of other groups."""
    under_way, transport = made(monkeypatch, coalesced)
    one = [TensorSpec((2,), torch.float32)]
    activation, gradient = under_way.post(
        [(ChannelEnd(0, 2, (0,), True), [torch.ones(2)]), (ChannelEnd(1, 0, (0,), False), [torch.zeros(2)])],
        [(ChannelEnd(2, 0, (0,), True), one), (ChannelEnd(3, 2, (1,), False), one)],
    )
    groups = [[(op.op, op.peer, op.group) for op in ops] for ops in transport.posted]
    assert groups == [
        [("send", 2, "onward"), ("receive", 0, "onward")],
        [("send", 0, "back"), ("receive", 2, "back")],
    ]
    activation.wait()
    assert transport.waited == (["batch 0"] if coalesced else ["receive 0.0"])
    gradient.wait()
    assert transport.waited[1:] == (["batch 1"] if coalesced else ["receive 1.1"])
    under_way.drain()
    assert transport.waited[2:] == (["batch 0", "batch 1"] if coalesced else ["send 0.0", "send 1.0"])


def test_a_send_alone_waits_for_its_own_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    under_way, transport = made(monkeypatch, coalesced=True)
    one = [TensorSpec((2,), torch.float32)]
    (gradient,) = under_way.post(
        [(ChannelEnd(0, 1, (0,), True), [torch.ones(2)])], [(ChannelEnd(1, 1, (0,), False), one)]
    )
    under_way.drain()
    assert transport.waited == ["batch 0"]
    gradient.wait()
    assert transport.waited == ["batch 0", "batch 1"]
