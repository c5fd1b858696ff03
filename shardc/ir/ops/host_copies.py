"""Copies between an accelerator and its host, begun and waited for as calls of their own.

    %x.out  = begin_offload(%x)            the copy to the host begins
    %x.host = end_offload(%x.out, %x)      has ended: what lies on the host; %x may be freed
    %x.back = begin_fetch(%x.host)         the copy to the accelerator begins
    %x.here = end_fetch(%x.back, %x.host)  has ended: what lies on the accelerator; the host's memory is free again

An `end` is what its `begin` has allocated, and reads what the copy reads, so that both are held until then. What one
graph of a pipeline's stage fetches and another fetches later is kept on the host: `end_fetch(..., keep=True)`.
`begin_offload_into` copies over what lies on the host already, such as the state that an update replaces.
On CUDA each direction has a stream. A copy begins when the compute stream has come to its `begin`, and the compute
stream waits at its `end`; Python waits for neither. The host's memory is pinned, and used again in the next step.
Elsewhere a copy is a copy to other memory, of the same device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from kernels_triton.base.library import define, implement


def _copy(x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(x)


def _copy_into(x: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_(x)


def _same(x: Tensor, source: Tensor) -> Tensor:
    if x.shape != source.shape or x.dtype != source.dtype:
        raise RuntimeError(f"a copy of {tuple(source.shape)} {source.dtype} is none of {tuple(x.shape)} {x.dtype}")
    return x


def _view(x: Tensor, source: Tensor) -> Tensor:
    return _same(x, source).view_as(x)


def _fetched(x: Tensor, source: Tensor, keep: bool = False) -> Tensor:
    return _same(x, source)


def _view_of_fetched(x: Tensor, source: Tensor, keep: bool = False) -> Tensor:
    return _view(x, source)


def _fetch(x: Tensor) -> Tensor:
    return _fetch_on_cuda(x) if x.is_pinned() else _copy(x)


BEGIN_OFFLOAD = define("begin_offload(Tensor x) -> Tensor", _copy, torch.empty_like)
BEGIN_OFFLOAD_INTO = define("begin_offload_into(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", _copy_into, _copy_into)
END_OFFLOAD = define("end_offload(Tensor(a) out, Tensor x) -> Tensor(a)", _same, _view)
BEGIN_FETCH = define("begin_fetch(Tensor x) -> Tensor", _fetch, torch.empty_like)
END_FETCH = define("end_fetch(Tensor(a) back, Tensor x, bool keep=False) -> Tensor(a)", _fetched, _view_of_fetched)
LEAST = 2**20  # bytes: what a copy moves in the 20 microseconds that it takes to begin and to be waited for
BEGINS = (BEGIN_OFFLOAD, BEGIN_FETCH)
ENDS = (END_OFFLOAD, END_FETCH)
HOST_COPIES = (*BEGINS, *ENDS)
OFFLOADS = (BEGIN_OFFLOAD, END_OFFLOAD)  # whose results lie on the host
FETCHES = (BEGIN_FETCH, END_FETCH)  # which read what lies there


def on_host(value: fx.Node) -> bool:
    """Does a value lie on the host? An input does that is read to be brought from there alone."""
    if value.op != "placeholder":
        return value.target in OFFLOADS
    users = [user for user in value.users if user.op != "output"]
    return bool(users) and all(user.target in FETCHES for user in users)


# ------------------------------------------------------------------ CUDA
class _Copies:
    """The copies of one device: a stream for each direction, and pinned memory that no copy has now.

    A buffer is free again once the copy from it has been waited for. The next copy to it begins behind that wait, since
    the stream of copies to the host waits for the compute stream first. Buffers keep their addresses, as replays of
    CUDA graphs need it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.free: dict[tuple[Any, ...], list[Tensor]] = {}
        self.lent: dict[int, Tensor] = {}  # by address
        self.copied: dict[int, torch.cuda.Event] = {}  # by the address that is copied to

    def pinned_like(self, x: Tensor) -> Tensor:
        spare = self.free.get(_form(x))
        buffer = spare.pop() if spare else torch.empty_like(x, device="cpu", pin_memory=True)
        self.lent[buffer.data_ptr()] = buffer
        return buffer

    def give_back(self, x: Tensor) -> None:
        """Of a tensor that lies in no buffer, nothing."""
        buffer = self.lent.pop(x.data_ptr(), None)
        if buffer is not None:
            self.free.setdefault(_form(buffer), []).append(buffer)

    def begin(self, into: Tensor, x: Tensor, stream: torch.cuda.Stream) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            into.copy_(x, non_blocking=True)
        self.copied[into.data_ptr()] = event = torch.cuda.Event()
        event.record(stream)
        return into

    def wait(self, into: Tensor) -> None:
        torch.cuda.current_stream(self.device).wait_event(self.copied.pop(into.data_ptr()))


_copies: dict[torch.device, _Copies] = {}


def _of(device: torch.device) -> _Copies:
    copies = _copies.get(device)
    if copies is None:
        copies = _copies[device] = _Copies(device)
    return copies


def _form(x: Tensor) -> tuple[Any, ...]:
    return x.shape, x.stride(), x.dtype


def _offload_on_cuda(x: Tensor) -> Tensor:
    copies = _of(x.device)
    return copies.begin(copies.pinned_like(x), x, copies.out)


def _offload_into_on_cuda(x: Tensor, *, out: Tensor) -> Tensor:
    copies = _of(x.device)
    return copies.begin(out, x, copies.out)


def _offloaded_on_cuda(out: Tensor, x: Tensor) -> Tensor:
    _of(x.device).wait(out)
    return _same(out, x)


def _fetch_on_cuda(x: Tensor) -> Tensor:
    copies = _of(torch.device("cuda", torch.cuda.current_device()))
    return copies.begin(torch.empty_like(x, device=copies.device, pin_memory=False), x, copies.back)


def _fetched_on_cuda(back: Tensor, x: Tensor, keep: bool = False) -> Tensor:
    copies = _of(back.device)
    copies.wait(back)
    if not keep:
        copies.give_back(x)
    return _same(back, x)


implement("begin_offload", _offload_on_cuda, "CUDA")
implement("begin_offload_into", _offload_into_on_cuda, "CUDA")
implement("end_offload", _offloaded_on_cuda, "CUDA")
implement("begin_fetch", _fetch_on_cuda, "CUDA")
implement("end_fetch", _fetched_on_cuda, "CUDA")
