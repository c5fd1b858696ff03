"""Context parallelism by hand, which `long_context.py` compares with: attention of a rank's tokens, as one op each.

    ring     keys and values travel round the ranks by `batch_isend_irecv`, begun before the step that hides them; in
             backward they travel again, and their gradients with them (Liu et al., 2023, arXiv:2310.01889)
    gather   each rank gathers all keys and values, and reduce-scatters their gradients (Llama 3, arXiv:2407.21783)

A rank of n holds chunks r and 2n - 1 - r of 2n, so that causal work is equal. A step whose keys are earlier ones meets
their first chunk with all rows, one whose keys are later ones meets both chunks with its last rows. Parts are merged by
their log-sum-exp in float32, in one compiled kernel. Keys, values and their gradients are sent in the model's dtype,
sums stay in float32. The chunks themselves are computed by cuDNN's or the flash kernel; on the CPU in plain torch.

Tensors are [B, H, S, D], keys and values with their own number of heads; `lse` is [B, H, S], float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc import torch_compat
from shardc.ir.ops import attention


# ---------------------------------------------------------------------- one chunk
def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        return attention.reference(q, k, v, None, causal, None, True)
    if kernel == "cudnn":
        o, lse = torch_compat.cudnn_attention(q, k, v, causal, None)
        return o, lse.squeeze(-1)
    return torch_compat.flash_attention(q, k, v, causal, None)


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    lse = lse.contiguous()
    if q.device.type == "cpu":
        return attention.reference_backward(g, q, k, v, None, o, lse, causal, None, True, False)[:3]
    if kernel == "cudnn":
        dq, dk, dv = torch_compat.cudnn_attention_backward(g, q, k, v, o, lse.unsqueeze(-1), causal, None)
    else:
        dq, dk, dv = torch_compat.flash_attention_backward(g, q, k, v, o, lse, causal, None)
    if dk.shape != k.shape:  # once for each query head
        dk, dv = (t.unflatten(1, (k.shape[1], -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def _merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """The softmax over both parts of the keys, in the place of the first."""
    o.copy_(o - torch.sigmoid(part_lse - lse).unsqueeze(-1) * (o - part))
    lse.copy_(lse - torch.nn.functional.logsigmoid(lse - part_lse))


def _add(total: Tensor, part: Tensor) -> None:
    total.add_(part)


@cache
def _compiled(call: Any, on: str) -> Any:
    return torch.compile(call, dynamic=False) if on == "cuda" else call


def merge(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    _compiled(_merge, o.device.type)(o, lse, part, part_lse)


def add(total: Tensor, part: Tensor) -> None:
    _compiled(_add, total.device.type)(total, part)


def _rows(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Empty, [B, H, S, D] in the memory of [B, S, H, D], which the model's views have."""
    b, h, s, d = like.shape
    return torch.empty(b, s, h, d, dtype=dtype or like.dtype, device=like.device).transpose(1, 2)


def _halves(t: Tensor) -> tuple[Tensor, Tensor]:
    first, last = t.chunk(2, dim=2)
    return first, last


# ---------------------------------------------------------------------- the ring
class _Passing:
    """A tensor on its way to the next rank, and one from the rank before."""

    def __init__(self, sent: Tensor) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self.sent, self.received = sent, torch.empty_like(sent)
        pair = [
            dist.P2POp(dist.isend, sent, (rank + 1) % size),
            dist.P2POp(dist.irecv, self.received, (rank - 1) % size),
        ]
        self.works = dist.batch_isend_irecv(pair)

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def _packed(k: Tensor, v: Tensor) -> Tensor:
    """[2, B, S, H, D]: keys and values in one message."""
    return torch.stack([k.transpose(1, 2), v.transpose(1, 2)])


def _unpacked(kv: Tensor) -> tuple[Tensor, Tensor]:
    k, v = kv.transpose(2, 3)
    return k, v


@torch.library.custom_op("context_peers::ring", mutates_args=())
def ring(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    kv = _packed(k, v)
    o, lse = _rows(q, torch.float32), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for step in range(size):
        passing = _Passing(kv) if step < size - 1 else None
        keys, values = _unpacked(kv)
        if step == 0:
            part, part_lse = _forward(q, keys, values, True, kernel)
            o.copy_(part)
            lse.copy_(part_lse)
        elif step <= rank:
            merge(o, lse, *_forward(q, _halves(keys)[0], _halves(values)[0], False, kernel))
        else:
            merge(_halves(o)[1], _halves(lse)[1], *_forward(_halves(q)[1], keys, values, False, kernel))
        kv = passing.wait() if passing is not None else kv
    return _rows(q).copy_(o), lse


@torch.library.custom_op("context_peers::ring_backward", mutates_args=())
def ring_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    g = _rows(g).copy_(g) if not g.transpose(1, 2).is_contiguous() else g
    kv = _packed(k, v)
    dq = _rows(q, torch.float32)
    travelling: _Passing | None = None
    for step in range(size):
        passing = _Passing(kv) if step < size - 1 else None
        keys, values = _unpacked(kv)
        if step == 0:
            part, *parts = _backward(g, q, keys, values, o, lse, True, kernel)
            dq.copy_(part)
            gradients = _packed(*parts)
        elif step <= rank:
            first = (_halves(t)[0] for t in (keys, values))
            part, *parts = _backward(g, q, *first, o, lse, False, kernel)
            add(dq, part)
        else:
            last = [_halves(t)[1] for t in (g, q)]
            part, *parts = _backward(*last, keys, values, _halves(o)[1], _halves(lse)[1], False, kernel)
            add(_halves(dq)[1], part)
        if step:
            assert travelling is not None
            gradients = travelling.wait()
            for total, its in zip(_unpacked(gradients), parts, strict=True):
                add(_halves(total)[0] if step <= rank else total, its)
        travelling = _Passing(gradients)
        kv = passing.wait() if passing is not None else kv
    assert travelling is not None
    dk, dv = _unpacked(travelling.wait())
    return _rows(q).copy_(dq), _rows(k).copy_(dk), _rows(v).copy_(dv)


# ---------------------------------------------------------------------- all of the keys
def _gathered(t: Tensor) -> Tensor:
    """The chunks of all ranks in their order, [B, H, n S, D]; of one sequence."""
    size = dist.get_world_size()
    own = t.transpose(1, 2).contiguous()
    found = own.new_empty(size * own.shape[0], *own.shape[1:])
    torch_compat.all_gather_single(found, own, dist.group.WORLD)
    first, last = found.unflatten(0, (size, -1)).chunk(2, dim=2)
    return torch.cat([*first, *last.flip(0)], dim=1).transpose(1, 2)


def _scattered(t: Tensor, like: Tensor) -> Tensor:
    """The sum over ranks of gradients of all keys, a rank's own chunks of it."""
    size = dist.get_world_size()
    chunks = t.transpose(1, 2).chunk(2 * size, dim=1)
    ordered = torch.stack([torch.cat([chunks[r], chunks[2 * size - 1 - r]], dim=1) for r in range(size)]).to(like.dtype)
    own = ordered.new_empty(ordered.shape[1:])
    ordered = ordered.flatten(0, 1)
    torch_compat.reduce_scatter_single(own, ordered, dist.ReduceOp.SUM, dist.group.WORLD)
    return own.transpose(1, 2)


def _chunks_before() -> tuple[int, int]:
    """How many chunks come before each of a rank's two."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank, 2 * size - 1 - rank


@torch.library.custom_op("context_peers::gather", mutates_args=())
def gather(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    keys, values = _gathered(k), _gathered(v)
    o, lse = _rows(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for its, into, sums, before in zip(_halves(q), _halves(o), _halves(lse), _chunks_before(), strict=True):
        at, length = before * its.shape[2], its.shape[2]
        part, part_lse = _forward(its, *(t.narrow(2, at, length) for t in (keys, values)), True, kernel)
        into.copy_(part)
        sums.copy_(part_lse)
        if at:
            merge(into, sums, *_forward(its, *(t.narrow(2, 0, at) for t in (keys, values)), False, kernel))
    return o, lse


@torch.library.custom_op("context_peers::gather_backward", mutates_args=())
def gather_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _gathered(k), _gathered(v)
    g = _rows(g).copy_(g) if not g.transpose(1, 2).is_contiguous() else g
    dq = _rows(q)
    dk, dv = (_rows(t, torch.float32).zero_() for t in (keys, values))
    for half, before in enumerate(_chunks_before()):
        grad, its, result, sums, into = (_halves(t)[half] for t in (g, q, o, lse, dq))
        length = its.shape[2]
        spans = [(before * length, length, True), *([(0, before * length, False)] if before else [])]
        for number, (at, extent, causal) in enumerate(spans):
            some = (t.narrow(2, at, extent) for t in (keys, values))
            part, *parts = _backward(grad, its, *some, result, sums, causal, kernel)
            add(into, part) if number else into.copy_(part)
            for total, part in zip((dk, dv), parts, strict=True):
                add(total.narrow(2, at, extent), part)
    return dq, _scattered(dk, k), _scattered(dv, v)


# ---------------------------------------------------------------------- as autograd and torch.compile know them
def _fake(q: Tensor, k: Tensor, v: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    return _rows(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    return _rows(q), _rows(k), _rows(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *operands, kernel = inputs
    ctx.save_for_backward(*operands, *output)
    ctx.kernel = kernel


for _op, _its_backward in ((ring, ring_backward), (gather, gather_backward)):

    def _gradients(ctx: Any, g: Tensor, _: Tensor, call: Any = _its_backward) -> tuple[Any, ...]:
        return (*call(g, *ctx.saved_tensors, ctx.kernel), None)

    _op.register_fake(_fake)
    _op.register_autograd(_gradients, setup_context=_keep)
    _its_backward.register_fake(_fake_backward)
