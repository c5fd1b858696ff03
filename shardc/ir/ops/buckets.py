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

from torch import Tensor
from torch.nn.functional import pad

from kernels_triton.base.buckets import starts
from kernels_triton.base.library import define
from shardc.torch_compat import copy_all

NOWHERE: Mapping[int, Tensor] = {}


def columns_packed(numels: Sequence[int], mids: Sequence[int], rows: int) -> list[int]:
    """Elements of each member in one row before the collective."""
    return [numel // mid * -(-mid // rows) for numel, mid in zip(numels, mids, strict=True)]


def buffer(like: Tensor, columns: Sequence[int], rows: int, unit: int) -> Tensor:
    """A flat tensor for members of so many columns, zero where it is padded."""
    width = starts(columns, unit)[-1]
    return (like.new_empty if sum(columns) == width else like.new_zeros)((rows * width,))


def cut(flat: Tensor, rows: int, columns: Sequence[int], unit: int) -> list[Tensor]:
    """The columns of each member, without what they are padded with."""
    widths = [-(-count // unit) * unit for count in columns]
    pieces = flat.view(rows, -1).split_with_sizes(widths, 1)
    return [
        piece if width == count else piece.narrow(1, 0, count)
        for piece, width, count in zip(pieces, widths, columns, strict=True)
    ]


def fill(
    flat: Tensor,
    xs: Sequence[Tensor | None],
    leads: Sequence[int],
    mids: Sequence[int],
    rows: int,
    unit: int,
    numels: Sequence[int],
) -> Tensor:
    """Copy members to their places in a flat tensor; those that are None are there already."""
    into: list[Tensor] = []
    sources: list[Tensor] = []
    places = cut(flat, rows, columns_packed(numels, mids, rows), unit)
    for x, place, lead, mid in zip(xs, places, leads, mids, strict=True):
        if x is None:
            continue
        chunk = -(-mid // rows)
        if chunk * rows != mid:
            x = pad(x.reshape(lead, mid, -1), [0, 0, 0, chunk * rows - mid])
        if lead == 1:
            sources.append(x.reshape(rows, -1))
            into.append(place)
        else:
            sources.append(x.reshape(lead, rows, chunk, -1).permute(1, 2, 0, 3))
            into.append(place.unflatten(1, (chunk, lead, -1)))
    copy_all(into, sources)
    return flat


def _pack(xs: Sequence[Tensor], leads: list[int], mids: list[int], rows: int, unit: int) -> Tensor:
    numels = [x.numel() for x in xs]
    flat = buffer(xs[0], columns_packed(numels, mids, rows), rows, unit)
    return fill(flat, xs, leads, mids, rows, unit, numels)


def shapes_of(shapes: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """A list of shapes, of which a schema can only hold the numbers one after another, and how many each has."""
    left = iter(shapes)
    return [[next(left) for _ in range(count)] for count in ranks]


def unpacked(
    flat: Tensor, leads: list[int], mids: list[int], rows: int, unit: int, sizes: list[int], outputs: Sequence[Tensor]
) -> None:
    """Copy members out of several rows, each to its own tensor. `sizes` are those of the dims put together."""
    columns = [y.numel() // size * mid for y, size, mid in zip(outputs, sizes, mids, strict=True)]
    into: list[Tensor] = []
    sources: list[Tensor] = []
    for y, piece, lead, mid, size in zip(outputs, cut(flat, rows, columns, unit), leads, mids, sizes, strict=True):
        if size != rows * mid:  # padding at the end
            joined = piece.unflatten(1, (mid, lead, -1)).flatten(0, 1)[:size].movedim(0, 1)
            into.append(y.view(lead, size, -1))
            sources.append(joined)
        elif lead == 1:
            into.append(y.view(rows, -1))
            sources.append(piece)
        else:
            into.append(y.view(lead, rows, mid, -1).permute(1, 2, 0, 3))
            sources.append(piece.unflatten(1, (mid, lead, -1)))
    copy_all(into, sources)


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
    result_shapes = shapes_of(shapes, ranks)
    if rows > 1:
        outputs = [
            over[i] if i in over and over[i].is_contiguous() else flat.new_empty(shape)
            for i, shape in enumerate(result_shapes)
        ]
        unpacked(flat, leads, mids, rows, unit, sizes, outputs)
    else:
        pieces = cut(flat, 1, [math.prod(shape) for shape in result_shapes], unit)
        outputs = [
            piece.view(shape) if lead == 1 else piece.view(mid, lead, -1).movedim(0, 1).reshape(shape)
            for piece, shape, lead, mid in zip(pieces, result_shapes, leads, mids, strict=True)
        ]
    return [over[i].copy_(y) if i in over and over[i] is not y else y for i, y in enumerate(outputs)]


PACK = define("pack(Tensor[] xs, int[] leads, int[] mids, int rows, int unit) -> Tensor", _pack, _pack)
UNPACK = define(
    "unpack(Tensor(a -> *) flat, int[] leads, int[] mids, int rows, int unit, int[] sizes, int[] shapes, int[] ranks)"
    " -> Tensor(a)[]",
    unpack,
    unpack,
)
