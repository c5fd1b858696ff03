"""Copies to the host and back: what they mean on a CPU, and on a GPU in which order streams and buffers are used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from shardc.ir.ops import host_copies
from shardc.ir.ops.host_copies import BEGIN_FETCH, BEGIN_OFFLOAD, BEGIN_OFFLOAD_INTO, END_FETCH, END_OFFLOAD

X = [
    torch.randn(3, 4),
    torch.randn(3, 4).t(),
    torch.randn(2, 3, 4).permute(2, 0, 1),
    torch.arange(6),
    torch.rand(5) > 0.5,
    torch.tensor(1.5),
    torch.randn(0, 3),
]


@pytest.mark.parametrize("x", X, ids=lambda x: f"{x.dtype} {tuple(x.shape)}")
def test_a_copy_there_and_back_is_the_same(x: Tensor) -> None:
    out = BEGIN_OFFLOAD(x)
    host = END_OFFLOAD(out, x)
    back = BEGIN_FETCH(host)
    here = END_FETCH(back, host)
    assert torch.equal(here, x)
    assert here.stride() == x.stride()
    assert here.dtype == x.dtype
    storages = {t.untyped_storage().data_ptr() for t in (x, host, here)}
    assert len(storages) == 3 or not x.numel()
    assert host.data_ptr() == out.data_ptr()
    assert here.data_ptr() == back.data_ptr()
    for op, args in ((BEGIN_OFFLOAD, (x,)), (END_OFFLOAD, (out, x)), (BEGIN_FETCH, (host,)), (END_FETCH, (back, host))):
        meta = op(*(t.to("meta") for t in args))
        assert (meta.shape, meta.stride(), meta.dtype) == (x.shape, x.stride(), x.dtype)


def test_state_is_written_where_it_lies() -> None:
    held, new = torch.zeros(4), torch.arange(4.0)
    assert BEGIN_OFFLOAD_INTO(new, out=held) is held
    assert END_OFFLOAD(held, new) is held
    assert torch.equal(held, new)


def test_an_end_of_another_copy_is_refused() -> None:
    for end in (END_OFFLOAD, END_FETCH):
        with pytest.raises(RuntimeError, match="is none of"):
            end(torch.zeros(3), torch.zeros(4))
        with pytest.raises(RuntimeError, match="is none of"):
            end(torch.zeros(3), torch.zeros(3, dtype=torch.int64))


class Device:
    """Stands for torch.cuda: says what each stream is told, and copies at once."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute = Stream(self, "compute")
        self.made = iter(("out", "back"))

    def stream_of(self, _: Any) -> Stream:
        return Stream(self, next(self.made))

    def event(self) -> Event:
        return Event()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.log.append(f"copy on {stream.name}")
        yield


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream


class Stream:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.device.log.append(f"{self.name} waits for a copy on {event.stream.name}")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(host_copies, "_copies", {})
    monkeypatch.setattr(torch.cuda, "Stream", fake.stream_of)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: fake.compute)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: empty_like(x))
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch, "device", lambda *_: cpu)  # which stands for the GPU
    return fake


def test_copies_wait_for_compute_and_compute_for_them(device: Device) -> None:
    x = torch.arange(4.0)
    out = host_copies._offload_on_cuda(x)
    assert device.log == ["out waits for compute", "copy on out"]
    assert host_copies._offloaded_on_cuda(out, x) is out
    assert device.log[2:] == ["compute waits for a copy on out"]
    back = host_copies._fetch_on_cuda(out)
    assert device.log[3:] == ["back waits for compute", "copy on back"]
    here = host_copies._fetched_on_cuda(back, out)
    assert device.log[5:] == ["compute waits for a copy on back"]
    assert torch.equal(here, x)


def test_a_buffer_is_used_again_once_it_was_fetched(device: Device) -> None:
    a, b = torch.arange(4.0), torch.ones(4)
    first, second = (host_copies._offload_on_cuda(x) for x in (a, b))
    assert first.data_ptr() != second.data_ptr()
    for out, x in ((first, a), (second, b)):
        host_copies._offloaded_on_cuda(out, x)
    host_copies._fetched_on_cuda(host_copies._fetch_on_cuda(first), first)
    third = host_copies._offload_on_cuda(b + 1)
    assert third.data_ptr() == first.data_ptr(), "the buffer that came back"
    fourth = host_copies._offload_on_cuda(a)
    assert fourth.data_ptr() not in (third.data_ptr(), second.data_ptr()), "this one has not been fetched"
    assert torch.equal(second, b)


def test_state_is_never_lent_to_others(device: Device) -> None:
    state = torch.arange(4.0)
    for _ in range(2):
        here = host_copies._fetched_on_cuda(host_copies._fetch_on_cuda(state), state)
        assert host_copies._offload_into_on_cuda(here + 1, out=state) is state
        host_copies._offloaded_on_cuda(state, here)
    assert torch.equal(state, torch.arange(4.0) + 2)
    assert host_copies._offload_on_cuda(torch.ones(4)).data_ptr() != state.data_ptr()


def test_what_is_fetched_again_keeps_its_buffer(device: Device) -> None:
    x = torch.arange(4.0)
    out = host_copies._offload_on_cuda(x)
    host_copies._offloaded_on_cuda(out, x)
    host_copies._fetched_on_cuda(host_copies._fetch_on_cuda(out), out, keep=True)
    other = host_copies._offload_on_cuda(x + 1)
    assert other.data_ptr() != out.data_ptr()
    assert torch.equal(host_copies._fetched_on_cuda(host_copies._fetch_on_cuda(out), out), x)
    assert host_copies._offload_on_cuda(x).data_ptr() == out.data_ptr()
