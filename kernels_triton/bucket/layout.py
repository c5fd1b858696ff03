"""Where the members of a bucket lie, as numbers that a kernel can be written from.

A member is `lead x size x tail` by itself, and in a row of the flat tensor `chunk x lead x tail`, in the place that
`shardc.ir.ops.buckets` gives it. Members that are not copied keep their places: `there` is False of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from shardc.ir.ops.buckets import starts

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what is moved, by its bytes
TILE = 8192  # bytes that a program moves
WARPS = 4  # four times 16 bytes a thread
MOST = 40  # members a launch: each is some lines of the kernel, and an argument


@dataclass(frozen=True)
class Member:
    """Sizes in elements: of the member, and of what each row has of it; `start` and `width` are of its place in a row,
    with what aligns the next. `there`: it is to be copied."""

    lead: int
    chunk: int
    size: int
    tail: int
    start: int
    width: int
    there: bool

    @property
    def columns(self) -> int:
        return self.lead * self.chunk * self.tail


@dataclass(frozen=True)
class Layout:
    """`packs`: from the members to a flat tensor of `rows` times `row` elements of `bytes` each; else from it."""

    packs: bool
    bytes: int
    rows: int
    row: int
    unit: int
    members: tuple[Member, ...]

    @property
    def block(self) -> int:
        return TILE // self.bytes

    def tiles(self, member: Member) -> int:
        """Programs that a row of a member takes; none if there is nothing to do."""
        if not member.there:
            return int(self.packs and member.columns < member.width)
        return -(-(member.width if self.packs else member.columns) // self.block)

    def parts(self) -> list[tuple[tuple[int, ...], Layout]]:
        """This, as launches: the members of each, of which there are not too many, and a layout of those alone."""
        todo = [at for at, member in enumerate(self.members) if self.tiles(member)]
        cuts = [tuple(todo[first : first + MOST]) for first in range(0, len(todo), MOST)]
        return [(own, replace(self, members=tuple(self.members[at] for at in own))) for own in cuts]


def packing(
    numels: Sequence[int],
    leads: Sequence[int],
    mids: Sequence[int],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> Layout | None:
    """That of `pack`. None of a dtype that no kernel moves."""
    sizes = [
        (lead, -(-mid // rows), mid, _tail(n, lead, mid)) for n, lead, mid in zip(numels, leads, mids, strict=True)
    ]
    return _laid(True, sizes, rows, unit, dtype, there)


def unpacking(
    shapes: Sequence[Sequence[int]],
    leads: Sequence[int],
    mids: Sequence[int],
    sizes: Sequence[int],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> Layout | None:
    """That of `unpack`. None of a dtype that no kernel moves."""
    of = zip(shapes, leads, mids, sizes, strict=True)
    return _laid(
        *(False, [(lead, mid, size, _tail(math.prod(shape), lead, size)) for shape, lead, mid, size in of]),
        *(rows, unit, dtype, there),
    )


def _tail(numel: int, lead: int, size: int) -> int:
    return numel // (lead * size) if numel else 0


def _laid(
    packs: bool,
    sizes: Sequence[tuple[int, int, int, int]],
    rows: int,
    unit: int,
    dtype: torch.dtype,
    there: Collection[int],
) -> Layout | None:
    if dtype.itemsize not in WORDS:
        return None
    places = starts([lead * chunk * tail for lead, chunk, _, tail in sizes], unit)
    members = tuple(
        Member(*own, first, last - first, at in there)
        for at, (own, (first, last)) in enumerate(zip(sizes, pairwise(places), strict=True))
    )
    return Layout(packs, dtype.itemsize, rows, places[-1], unit, members)
