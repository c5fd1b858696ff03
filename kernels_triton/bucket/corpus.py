"""Buckets of programs, for the compile gate: a block's parameters, gathered and scattered, and members that are odd."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from kernels_triton.bucket.kernel import move
from kernels_triton.bucket.layout import WORDS, Layout, packing, unpacking
from shardc.ir.ops.buckets import unit_of

Members = Sequence[tuple[tuple[int, ...], int]]  # shapes, and the dim that each is cut along

GPT2: Members = (
    *(((768,), 0), ((768,), 0), ((768, 2304), 0), ((3, 12, 64), 1), ((12, 64, 768), 0), ((768,), 0)),
    *(((768,), 0), ((768,), 0), ((768, 3072), 0), ((3072,), 0), ((3072, 768), 0), ((768,), 0)),
)
LLAMA: Members = (
    *(((4096,), 0), ((32, 128, 4096), 0), ((8, 128, 4096), 0), ((8, 128, 4096), 0), ((4096, 4096), 0)),
    *(((4096,), 0), ((2, 14336, 4096), 1), ((4096, 14336), 0)),
)
# A vocabulary and heads that four ranks do not divide.
UNEVEN: Members = (((50257, 768), 0), ((766, 2304), 0), ((3, 25, 64), 1))


def pack(members: Members, rows: int, dtype: torch.dtype) -> Layout:
    return _known(packing([math.prod(shape) for shape, _ in members], *_cut(members), rows, *_of(members, dtype)))


def unpack(members: Members, rows: int, dtype: torch.dtype) -> Layout:
    """What was gathered of so many ranks; of one, what was scattered to it."""
    leads, mids = _cut(members)
    chunks = [-(-mid // rows) for mid in mids]
    return _known(unpacking([shape for shape, _ in members], leads, chunks, mids, rows, *_of(members, dtype)))


def _cut(members: Members) -> tuple[list[int], list[int]]:
    return [math.prod(shape[:pos]) for shape, pos in members], [shape[pos] for shape, pos in members]


def _of(members: Members, dtype: torch.dtype) -> tuple[int, torch.dtype, range]:
    return unit_of(dtype), dtype, range(len(members))


def _known(layout: Layout | None) -> Layout:
    assert layout is not None
    return layout


# CI compiles the first two.
LAYOUTS: Mapping[str, Callable[[], Layout]] = {
    "gpt2 gathered": partial(unpack, GPT2, 2, torch.bfloat16),
    "gpt2 to scatter": partial(pack, GPT2, 2, torch.float32),
    "gpt2 to gather": partial(pack, GPT2, 1, torch.bfloat16),
    "gpt2 scattered": partial(unpack, GPT2, 1, torch.float32),
    "llama gathered": partial(unpack, LLAMA, 8, torch.bfloat16),
    "llama to scatter": partial(pack, LLAMA, 8, torch.bfloat16),
    "uneven gathered": partial(unpack, UNEVEN, 4, torch.bfloat16),
    "uneven to scatter": partial(pack, UNEVEN, 4, torch.float32),
}


def launched(layout: Layout) -> None:
    """Move a bucket on `meta` tensors."""
    flat = torch.empty(layout.rows * layout.row, dtype=WORDS[layout.bytes], device="meta")
    move(layout, flat, [flat.new_empty(one.lead * one.size * one.tail) for one in layout.members])
