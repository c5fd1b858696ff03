"""Buckets for the compile gate: a block's parameters, gathered and scattered, and members of odd sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from kernels_triton.base.buckets import unit_of
from kernels_triton.bucket.kernel import copy_members
from kernels_triton.bucket.layout import WORDS, BucketLayout, pack_layout, unpack_layout

Members = Sequence[tuple[tuple[int, ...], int]]  # shapes, with the dim along which each is cut

GPT2: Members = (
    *(((768,), 0), ((768,), 0), ((768, 2304), 0), ((3, 12, 64), 1), ((12, 64, 768), 0), ((768,), 0)),
    *(((768,), 0), ((768,), 0), ((768, 3072), 0), ((3072,), 0), ((3072, 768), 0), ((768,), 0)),
)
LLAMA: Members = (
    *(((4096,), 0), ((32, 128, 4096), 0), ((8, 128, 4096), 0), ((8, 128, 4096), 0), ((4096, 4096), 0)),
    *(((4096,), 0), ((2, 14336, 4096), 1), ((4096, 14336), 0)),
)
# A vocabulary and heads that four ranks do not divide evenly.
UNEVEN: Members = (((50257, 768), 0), ((766, 2304), 0), ((3, 25, 64), 1))


def pack(members: Members, rows: int, dtype: torch.dtype) -> BucketLayout:
    return _required(
        pack_layout(
            [math.prod(shape) for shape, _ in members],
            *_leads_and_mids(members),
            rows,
            *_layout_arguments(members, dtype),
        )
    )


def unpack(members: Members, rows: int, dtype: torch.dtype) -> BucketLayout:
    """The layout of a gathered bucket from `rows` ranks; with one row, of a scattered bucket."""
    leads, mids = _leads_and_mids(members)
    chunks = [-(-mid // rows) for mid in mids]
    return _required(
        unpack_layout([shape for shape, _ in members], leads, chunks, mids, rows, *_layout_arguments(members, dtype))
    )


def _leads_and_mids(members: Members) -> tuple[list[int], list[int]]:
    return [math.prod(shape[:pos]) for shape, pos in members], [shape[pos] for shape, pos in members]


def _layout_arguments(members: Members, dtype: torch.dtype) -> tuple[int, torch.dtype, range]:
    return unit_of(dtype), dtype, range(len(members))


def _required(layout: BucketLayout | None) -> BucketLayout:
    assert layout is not None
    return layout


# CI compiles the first two.
LAYOUTS: Mapping[str, Callable[[], BucketLayout]] = {
    "gpt2 gathered": partial(unpack, GPT2, 2, torch.bfloat16),
    "gpt2 to scatter": partial(pack, GPT2, 2, torch.float32),
    "gpt2 to gather": partial(pack, GPT2, 1, torch.bfloat16),
    "gpt2 scattered": partial(unpack, GPT2, 1, torch.float32),
    "llama gathered": partial(unpack, LLAMA, 8, torch.bfloat16),
    "llama to scatter": partial(pack, LLAMA, 8, torch.bfloat16),
    "uneven gathered": partial(unpack, UNEVEN, 4, torch.bfloat16),
    "uneven to scatter": partial(pack, UNEVEN, 4, torch.float32),
}


def copy_on_meta(layout: BucketLayout) -> None:
    """Copies a bucket on `meta` tensors."""
    flat = torch.empty(layout.rows * layout.row, dtype=WORDS[layout.bytes], device="meta")
    copy_members(layout, flat, [flat.new_empty(member.lead * member.size * member.tail) for member in layout.members])
