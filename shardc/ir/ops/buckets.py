"""Several tensors as one flat one, for one collective in the place of several: `pack` before it, `unpack` after it.

    %flat = pack([%a, %b])                 a.flatten(), b.flatten(), each padded to a multiple of `unit` elements
    %sum = all_reduce(%flat)
    %a.sum, %b.sum = unpack(%sum)          views

What is gathered or scattered along a dim of each tensor has that dim in front: a tensor of `lead x mid x tail` travels
as `mid x lead x tail`. In `rows` is how many ranks share it: before a reduce_scatter all that a rank will receive
makes one row, zero padded, and after an all_gather each rank's part of all tensors is one row. One row is unpacked as
views wherever `lead` is 1; several are copied, since no strides put the pieces of a tensor together.

Here is how plain torch copies: on a CPU, in the simulator, and where nothing else does. A rank's code has one kernel on
a GPU for each pack, and for each unpack that copies (`kernels_triton.bucket`), of any `lead`, and of chunks that do not
divide too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.base.buckets import starts
from kernels_triton.base.library import define
from shardc.torch_compat import copy_all

NOWHERE: Mapping[int, Tensor] = {}


def columns_packed(numels: Sequence[int], mids: Sequence[int], rows: int) -> list[int]:
    """Elements of each member in one row before the collective."""
    return [numel // mid * -(-mid // rows) for numel, mid in zip(numels, mids, strict=True)]


@dataclass(frozen=True)
class MemberView:
    """A member in the flat tensor: a view [lead, rows, chunk, tail] at an offset. `mid` is what the rows share out, of
    which the last may lack some."""

    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    start: int
    mid: int

    @cached_property
    def is_padded(self) -> bool:
        return self.sizes[1] * self.sizes[2] != self.mid


@lru_cache(maxsize=4096)
def member_views(
    numels: tuple[int, ...], leads: tuple[int, ...], mids: tuple[int, ...], rows: int, unit: int
) -> tuple[tuple[MemberView, ...], int, bool]:
    """The views of all members, elements of a row, and whether members fill it."""
    columns = columns_packed(numels, mids, rows)
    *offsets, width = starts(columns, unit)
    views: list[MemberView] = []
    for count, start, lead, mid in zip(columns, offsets, leads, mids, strict=True):
        chunk = -(-mid // rows)
        tail = count // max(1, chunk * lead)
        views.append(MemberView((lead, rows, chunk, tail), (tail, width, lead * tail, 1), start, mid))
    return tuple(views), width, sum(columns) == width


def fill(flat: Tensor, xs: Sequence[Tensor | None], views: Sequence[MemberView]) -> Tensor:
    """Copy members to their places in a flat tensor; those that are None are there already."""
    into: list[Tensor] = []
    sources: list[Tensor] = []
    offset = flat.storage_offset()
    for x, view in zip(xs, views, strict=True):
        if x is None:
            continue
        if view.is_padded:
            lead, rows, chunk, tail = view.sizes
            x = pad(torch.reshape(x, (lead, view.mid, tail)), [0, 0, 0, rows * chunk - view.mid])
        sources.append(torch.reshape(x, view.sizes))
        into.append(flat.as_strided(view.sizes, view.strides, offset + view.start))
    copy_all(into, sources)
    return flat


def _pack(xs: Sequence[Tensor], leads: list[int], mids: list[int], rows: int, unit: int) -> Tensor:
    numels = tuple([x.numel() for x in xs])
    views, width, is_full = member_views(numels, tuple(leads), tuple(mids), rows, unit)
    allocate = xs[0].new_empty if is_full else xs[0].new_zeros  # padding is zero
    return fill(allocate((rows * width,)), xs, views)


def shapes_of(shapes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """A list of shapes, of which a schema can only hold the numbers one after another, and how many each has."""
    left = iter(shapes)
    return [[next(left) for _ in range(count)] for count in ranks]


@lru_cache(maxsize=4096)
def _results(
    leads: tuple[int, ...],
    mids: tuple[int, ...],
    rows: int,
    unit: int,
    sizes: tuple[int, ...],
    shapes: tuple[int, ...],
    ranks: tuple[int, ...],
) -> list[tuple[list[int], MemberView]]:
    """The shape of each member that is unpacked, and where it is in the flat tensor."""
    result_shapes = shapes_of(shapes, ranks)
    numels = tuple(math.prod(shape) for shape in result_shapes)
    if rows > 1:  # `sizes` are those of the dims put together, whose last row may be padded
        numels = tuple(n // size * mid * rows for n, size, mid in zip(numels, sizes, mids, strict=True))
        mids = tuple(mid * rows for mid in mids)
    views, _, _ = member_views(numels, leads, mids, rows, unit)
    cut = sizes if rows > 1 else mids
    return [(shape, replace(view, mid=mid)) for shape, view, mid in zip(result_shapes, views, cut, strict=True)]


def unpack(
    flat: Tensor,
    leads: list[int],
    mids: list[int],
    rows: int,
    unit: int,
    sizes: list[int],
    shapes: list[int],
    ranks: list[int],
    over: Mapping[int, Tensor] = NOWHERE,
) -> list[Tensor]:
    """The members of a flat tensor; those of `over` in the memory given for them."""
    results = _results(tuple(leads), tuple(mids), rows, unit, tuple(sizes), tuple(shapes), tuple(ranks))
    flat = flat.contiguous()
    offset, outputs = flat.storage_offset(), list[Tensor]()
    for index, (shape, view) in enumerate(results):
        member = flat.as_strided(view.sizes, view.strides, offset + view.start)
        if view.is_padded:
            lead, _, _, tail = view.sizes
            member = torch.reshape(member, (lead, -1, tail))[:, : view.mid]
        if index in over:
            outputs.append(over[index].copy_(torch.reshape(member, shape)))
        elif rows == 1:
            outputs.append(torch.reshape(member, shape))
        elif member.is_contiguous():
            outputs.append(member.clone().view(shape))
        else:  # copied by `reshape`, unless strides can say such a shape
            outputs.append(torch.reshape(member, shape).contiguous())
    return outputs


PACK = define("pack(Tensor[] xs, int[] leads, int[] mids, int rows, int unit) -> Tensor", _pack, _pack)
UNPACK = define(
    "unpack(Tensor(a -> *) flat, int[] leads, int[] mids, int rows, int unit, int[] sizes, int[] shapes, int[] ranks)"
    " -> Tensor(a)[]",
    unpack,
    unpack,
)
