"""The places of a bucket's members, as numbers from which a kernel is generated.

A member is `lead x size x tail`. In a row of the flat tensor it is `chunk x lead x tail`, at the offset that
`shardc.ir.ops.buckets` gives it. Members that are not copied keep their places; their `copied` is False.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from kernels_triton.base.buckets import starts

WORDS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # the integer dtype that moves elements of so many bytes
TILE = 8192  # bytes that one program moves
WARPS = 4  # four times 16 bytes a thread
MOST_MEMBERS = 40  # members of one launch: each adds lines to the kernel, and an argument


@dataclass(frozen=True)
class BucketMember:
    """Sizes in elements, of the member and of its part in each row. `start` and `width` are its place in a row,
    including the alignment of the next member."""

    lead: int
    chunk: int
    size: int
    tail: int
    start: int
    width: int
    copied: bool

    @property
    def columns(self) -> int:
        return self.lead * self.chunk * self.tail


@dataclass(frozen=True)
class BucketLayout:
    """`packs`: from the members to a flat tensor of `rows` times `row` elements of `bytes` each; otherwise from the
    flat tensor."""

    packs: bool
    bytes: int
    rows: int
    row: int
    unit: int
    members: tuple[BucketMember, ...]

    @property
    def block(self) -> int:
        return TILE // self.bytes

    def tiles(self, member: BucketMember) -> int:
        """The programs for a row of a member; 0 if there is nothing to copy."""
        if not member.copied:
            return int(self.packs and member.columns < member.width)
        return -(-(member.width if self.packs else member.columns) // self.block)

    def launch_layouts(self) -> list[tuple[tuple[int, ...], BucketLayout]]:
        """The layout cut into launches: for each launch its members, and a layout of these alone."""
        todo = [number for number, member in enumerate(self.members) if self.tiles(member)]
        cuts = [tuple(todo[first : first + MOST_MEMBERS]) for first in range(0, len(todo), MOST_MEMBERS)]
        return [(members, replace(self, members=tuple(self.members[number] for number in members))) for members in cuts]


def pack_layout(
    numels: Sequence[int],
    leads: Sequence[int],
    mids: Sequence[int],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> BucketLayout | None:
    """The layout of `pack`. None for a dtype that no kernel moves."""
    sizes = [
        (lead, -(-mid // rows), mid, _tail(n, lead, mid)) for n, lead, mid in zip(numels, leads, mids, strict=True)
    ]
    return _layout(True, sizes, rows, unit, dtype, there)


def unpack_layout(
    shapes: Sequence[Sequence[int]],
    leads: Sequence[int],
    mids: Sequence[int],
    sizes: Sequence[int],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> BucketLayout | None:
    """The layout of `unpack`. None for a dtype that no kernel moves."""
    members = zip(shapes, leads, mids, sizes, strict=True)
    return _layout(
        *(False, [(lead, mid, size, _tail(math.prod(shape), lead, size)) for shape, lead, mid, size in members]),
        *(rows, unit, dtype, there),
    )


def _tail(numel: int, lead: int, size: int) -> int:
    return numel // (lead * size) if numel else 0


def _layout(
    packs: bool,
    sizes: Sequence[tuple[int, int, int, int]],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> BucketLayout | None:
    if dtype.itemsize not in WORDS:
        return None
    places = starts([lead * chunk * tail for lead, chunk, _, tail in sizes], unit)
    members = tuple(
        BucketMember(*member_sizes, first, last - first, number in there)
        for number, (member_sizes, (first, last)) in enumerate(zip(sizes, pairwise(places), strict=True))
    )
    return BucketLayout(packs, dtype.itemsize, rows, places[-1], unit, members)
