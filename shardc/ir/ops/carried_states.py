"""States that go from chunk to chunk of a sequence, each of which is decayed and gets an addend: Mamba2's.

    before, last = carried_states(first, decay, addends, reverse)
    before[c + 1] = exp(decay[c]) * before[c] + addends[c],  before[0] = first, and last behind the last chunk

`first` is [*B, *R], `decay` [*B, C], `addends` and `before` [*B, C, *R]: chunk c reads the state before it. With
`reverse` they go from the last chunk to the first, as gradients of states do. All chunks are computed at once, as the
published code does: by the matrix of the sums of all runs of decays (Dao and Gu, Transformers are SSMs, 2024).

Of chunks that lie over ranks, a rank's are together such a chunk:

    chunk_totals    decay, addends             the sum of decays, and the addend, of each run of chunks that a rank has
    states_behind   first, ..., of all runs    what `carried_states` yields of own chunks

What all runs do is gathered in between, of which there is one a rank, or one for each block of a zigzag. `last` is
yielded by the first rank, and 0 by others, so that a pending sum has it. Both read the coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.ops.cumulative import own_runs
from shardc.ir.ops.local import AXES_READ
from shardc.ir.ops.scan import wide


def _through(first: Tensor, decay: Tensor, addends: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    dim = decay.ndim - 1
    if reverse:
        before, last = _through(first, decay.flip(dim), addends.flip(dim), False)
        return before.flip(dim), last
    chunks, dtype = decay.shape[dim], wide([first, decay, addends])
    steps = torch.cat([decay.new_zeros([*decay.shape[:dim], 1]), decay], dim).to(dtype)
    below = torch.ones(chunks + 1, chunks + 1, dtype=torch.bool, device=decay.device).tril(-1)
    sums = torch.where(below, steps.unsqueeze(-1), 0.0).cumsum(dim)
    factors = sums.masked_fill(below.mT, -torch.inf).exp()
    states = torch.cat([first.unsqueeze(dim), addends], dim).to(dtype)
    found = (factors @ states.reshape([*steps.shape, math.prod(states.shape[dim + 1 :])])).view(states.shape)
    return found.narrow(dim, 0, chunks), found.select(dim, chunks)


def _carried(first: Tensor, decay: Tensor, addends: Tensor, reverse: bool) -> list[Tensor]:
    return [x.to(addends.dtype).contiguous() for x in _through(first, decay, addends, reverse)]


def _fake_carried(first: Tensor, decay: Tensor, addends: Tensor, reverse: bool) -> list[Tensor]:
    return [addends.new_empty(addends.shape), addends.new_empty(first.shape)]


def _totals(
    decay: Tensor, addends: Tensor, source: str, axes: list[str], blocks: int, reverse: bool
) -> list[Tensor]:  # fmt: skip
    dim = decay.ndim - 1
    results = [x.zero_() for x in _fake_totals(decay, addends, source, axes, blocks, reverse)]
    for i, run in enumerate(own_runs(source, axes)[0]):
        if run is not None:
            x, s = (t.narrow(dim, run.local, run.extent).to(results[0].dtype) for t in (decay, addends))
            _, last = _through(torch.zeros_like(s.select(dim, 0)), x, s, reverse)
            for y, total in zip(results, (x.sum(dim), last), strict=True):
                y.select(dim, i).copy_(total)
    return results


def _fake_totals(
    decay: Tensor, addends: Tensor, source: str, axes: list[str], blocks: int, reverse: bool
) -> list[Tensor]:
    dim, dtype = decay.ndim - 1, wide([decay, addends])
    return [x.new_empty([*x.shape[:dim], blocks, *x.shape[dim + 1 :]], dtype=dtype) for x in (decay, addends)]


def _behind(
    first: Tensor, decay: Tensor, addends: Tensor, sums: Tensor, totals: Tensor, source: str, axes: list[str],
    reverse: bool,
) -> list[Tensor]:  # fmt: skip
    dim, dtype = decay.ndim - 1, wide([first, decay, addends])
    own, of_ranks = own_runs(source, axes)
    before = torch.zeros_like(addends, memory_format=torch.contiguous_format)
    runs = [(run, i) for i, run in enumerate(run for of_rank in of_ranks for run in of_rank) if run is not None]
    state = first.to(dtype)
    for run, i in sorted(runs, key=lambda pair: pair[0].start, reverse=reverse):
        if run in own:
            x, s = (x.narrow(dim, run.local, run.extent) for x in (decay, addends))
            before.narrow(dim, run.local, run.extent).copy_(_through(state, x, s, reverse)[0])
        factor = sums.select(dim, i).exp()
        state = factor.view([*factor.shape, *[1] * (first.ndim - factor.ndim)]) * state + totals.select(dim, i)
    last = state if own == of_ranks[0] else torch.zeros_like(state)
    return [before, last.to(addends.dtype).contiguous()]


CARRIED_STATES = define(
    "carried_states(Tensor first, Tensor decay, Tensor addends, bool reverse) -> Tensor[]", _carried, _fake_carried
)
CHUNK_TOTALS = define(
    "chunk_totals(Tensor decay, Tensor addends, str source, str[] axes, int blocks, bool reverse) -> Tensor[]",
    _totals,
    _fake_totals,
)
STATES_BEHIND = define(
    "states_behind(Tensor first, Tensor decay, Tensor addends, Tensor sums, Tensor totals, str source, str[] axes,"
    " bool reverse) -> Tensor[]",
    _behind,
    lambda first, decay, addends, sums, totals, source, axes, reverse: _fake_carried(first, decay, addends, reverse),
)
AXES_READ[CHUNK_TOTALS] = lambda decay, addends, source, axes, blocks, reverse: axes
AXES_READ[STATES_BEHIND] = lambda first, decay, addends, sums, totals, source, axes, reverse: axes


class _Carried(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, decay: Tensor, addends: Tensor, reverse: bool) -> tuple[Tensor, ...]:
        before, last = CARRIED_STATES(first, decay, addends, reverse)
        ctx.save_for_backward(decay, before)
        ctx.reverse = reverse
        return before, last

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        decay, before = ctx.saved_tensors
        behind, of_first = carried_states(grads[1], decay, grads[0], not ctx.reverse)
        of_decay = None
        if ctx.needs_input_grad[1]:
            terms = (before * behind).to(wide([decay, before]))
            if terms.ndim > decay.ndim:  # of no dims torch sums all
                terms = terms.sum(list(range(decay.ndim, terms.ndim)))
            of_decay = (terms * decay.exp()).to(decay.dtype)
        return of_first if ctx.needs_input_grad[0] else None, of_decay, behind, None


def carried_states(first: Tensor, decay: Tensor, addends: Tensor, reverse: bool = False) -> Sequence[Tensor]:
    """The states before each chunk, and behind the last one; differentiable, to any order."""
    found: Any = _Carried.apply(first, decay, addends, reverse)
    return found
