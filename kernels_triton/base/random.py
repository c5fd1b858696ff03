"""Random numbers that do not depend on the layout: Philox4x32-10 on (seed, op, global element index).

`random_uniform(seed, op_id, shape, strides, offset)` is the tensor whose element (i0, i1, ...) is number
`i = offset + i0*strides[0] + i1*strides[1] + ...`. In a traced graph the strides are those of the whole contiguous
tensor and the offset is 0. A shard keeps the *global* strides and shifts the offset to its first element, and so draws
exactly the numbers that the whole tensor has there:

    whole [8, 16]:               shape [8, 16], strides [16, 1], offset 0
    columns 8..15 of the same:   shape [8, 8],  strides [16, 1], offset 8

Number i comes of word `i & 3` of the four words that Philox makes of the counter (low and high word of `i >> 2`, with
`op_id` between them) and the key `seed`: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11. With op_id
0 and i below 2^34 it is bit for bit number `i & 3` of Triton's `tl.rand4x(seed, i >> 2)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from functools import cache

import torch
from torch import Tensor

from kernels_triton.base.library import define

_LOW32 = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SCALE = 4.6566127342e-10  # just below 2^-31
_CHUNK = 1 << 15  # int64 words: the few live buffers of a chunk stay in the L2 cache


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The block function on 32-bit words held in int64 tensors. Counters are overwritten.

    int64 products wrap modulo 2^64, so the low and the high half of a 32x32-bit product are both exact.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0.mul_(_MULTIPLY[0]), c2.mul_(_MULTIPLY[1])
        high0 = (p0 >> 32).bitwise_and_(_LOW32)
        high1 = (p1 >> 32).bitwise_and_(_LOW32)
        c0, c1, c2, c3 = (
            high1.bitwise_xor_(c1).bitwise_xor_(k0),
            p1.bitwise_and_(_LOW32),
            high0.bitwise_xor_(c3).bitwise_xor_(k1),
            p0.bitwise_and_(_LOW32),
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW32, (k1 + _WEYL[1]) & _LOW32
    return c0, c1, c2, c3


def _uniform(word: Tensor) -> Tensor:
    """A 32-bit word to [0, 1) as Triton does it: read as signed, folded to 31 bits, scaled just below 1."""
    signed = torch.where(word >= 1 << 31, word - (1 << 32), word)
    return torch.where(signed < 0, -signed - 1, signed).float() * _SCALE


@cache
def least_word(p: float) -> int:
    """The smallest 31-bit word that makes a number of at least p, in float32; 2^31 if none does."""

    def single(x: float) -> float:
        return c_float(x).value

    low, high = 0, 1 << 31
    while low < high:
        middle = (low + high) // 2
        if single(single(float(middle)) * single(_SCALE)) >= single(p):
            high = middle
        else:
            low = middle + 1
    return low


def _numbers(seed: Tensor, op_id: int, counters: Tensor) -> Tensor:
    """All four numbers of each counter, [n, 4]."""
    out = torch.empty((counters.numel(), 4), dtype=torch.float32, device=seed.device)
    key = (seed & _LOW32, (seed >> 32) & _LOW32)
    for start in range(0, counters.numel(), _CHUNK):
        part = counters[start : start + _CHUNK]
        low, high = part & _LOW32, (part >> 32) & _LOW32
        words = philox((low, torch.full_like(part, op_id), high, torch.zeros_like(part)), key)
        for at, word in enumerate(words):
            out[start : start + _CHUNK, at] = _uniform(word)
    return out


def _runs(shape: Sequence[int], strides: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """(size, stride) of the dims before the longest run of neighbours at the end, and how long that is."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            size *= merged.pop()[0]
        merged.append((size, stride))
    run = merged.pop()[0] if merged and merged[-1][1] == 1 else 1
    return merged, run


def _random_uniform(seed: Tensor, op_id: int, shape: Sequence[int], strides: Sequence[int], offset: Tensor) -> Tensor:
    """A run's counters are computed once, whatever its first index; where the offset lies on a GPU, nobody waits."""
    outer, run = _runs(shape, strides)
    first = offset.reshape(()).to(torch.int64)
    for size, stride in outer:
        first = first.unsqueeze(-1) + torch.arange(size, device=seed.device) * stride
    first = first.reshape(-1, 1)
    # Of a run that begins at a multiple of 4, less 1, the last but two numbers belong to one counter more.
    counters = (first >> 2) + torch.arange((run + 6) // 4, device=seed.device)
    numbers = _numbers(seed, op_id, counters.reshape(-1)).view(first.numel(), -1)
    return numbers.gather(1, (first & 3) + torch.arange(run, device=seed.device)).view(list(shape))


def _random_uniform_fake(
    seed: Tensor, op_id: int, shape: Sequence[int], strides: Sequence[int], offset: Tensor
) -> Tensor:
    return seed.new_empty(shape, dtype=torch.float32)


RANDOM_UNIFORM = define(
    "random_uniform(Tensor seed, int op_id, int[] shape, int[] strides, Tensor offset) -> Tensor",
    _random_uniform,
    _random_uniform_fake,
)
