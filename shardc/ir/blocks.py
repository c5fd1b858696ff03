"""An atom of unequal blocks, each of which an axis cuts by itself: the columns of a fused weight.

    f32[(32|8|8@tp 128), 4096]     32 heads of queries and 8 each of keys and values: a rank has a share of each
    f32[32*64|-128|32@tp, 4096]    32 heads of 64 columns, 128 columns that every rank has, and 32 columns
    f32[8|8~cp@cp, 64]             a sequence in zigzag: of 4 ranks, rank r has rows 2r, 2r+1 and rows 14-2r, 15-2r

Equal blocks need no such thing: they are two atoms, as in `(3 32@tp)`. A block is `count` pieces of `unit` elements,
and axes divide its pieces as they divide an atom's elements: padded, axis by axis, major first. A block that is not cut
is whole on every rank (`-`). One that an axis *reverses* (`~cp`) is cut by that axis in the other order: the last rank
has its first pieces, and padding lies with the first ranks. One with *room* (`15/16`) is cut as if it had that many
pieces, the last of which are missing: the rows of a sequence of 16 but the last lie with the ranks that have those of
the sequence. A rank's shard has its share of each block, in the order of the blocks.

The size of such an atom is an int, the sum over its blocks, that knows them. So it differs from other ints, and two of
them are equal where the blocks are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardc.ir.mesh import AXIS_NAME, Mesh

Axes = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """`count` pieces of `unit` elements. `cut`: axes divide the pieces; else every rank has all of them. `reverse`: the
    axis whose ranks have them in the other order, or no axis. `room`: how many pieces axes divide, if more than it has.
    """

    count: int
    unit: int = 1
    cut: bool = True
    reverse: str = ""
    room: int = 0

    @property
    def size(self) -> int:
        return self.count * self.unit

    @property
    def divided(self) -> int:
        """How many pieces axes divide."""
        return self.room or self.count

    def local(self, axes: Sequence[str], mesh: Mesh) -> Block:
        """What one rank stores of it."""
        return replace(self, count=local_size(self.divided, axes, mesh), room=0) if self.cut and axes else self

    def uneven(self, ranks: int) -> bool:
        """Does one of so many ranks hold padding?"""
        return self.cut and (self.divided != self.count or self.count % ranks != 0)

    def reverses(self, axis: str) -> bool:
        """Do the ranks of an axis, or of a sub-axis of it, have the pieces in the other order?"""
        return bool(self.reverse) and self.reverse in (axis, axis.partition(":")[0])

    def __str__(self) -> str:
        unit = f"*{self.unit}" if self.unit > 1 else ""
        room, turned = f"/{self.room}" if self.room else "", f"~{self.reverse}" if self.reverse else ""
        return f"{'' if self.cut else '-'}{self.count}{room}{unit}{turned}"


class Blocks(int):
    """The size of an atom that is made of blocks."""

    parts: tuple[Block, ...]

    def __new__(cls, parts: Iterable[Block]) -> Blocks:
        blocks = tuple(parts)
        size = super().__new__(cls, sum(block.size for block in blocks))
        size.parts = blocks
        return size

    @property
    def copied(self) -> bool:
        """Is some block whole on every rank?"""
        return not all(block.cut for block in self.parts)

    @property
    def zigzag(self) -> str:
        """The axis that reverses some block, or no axis."""
        return next((block.reverse for block in self.parts if block.reverse), "")

    @property
    def shards(self) -> int:
        """How many ranks each find a share in each block that is cut."""
        return min((block.count for block in self.parts if block.cut), default=1)

    def local(self, axes: Sequence[str], mesh: Mesh) -> Blocks:
        """The blocks of what one rank stores."""
        return Blocks(block.local(axes, mesh) for block in self.parts)

    def between(self, start: int, end: int) -> tuple[Block, ...] | None:
        """The blocks that elements [start, end) are made of; None where these bounds lie inside of a block."""
        bounds = [0]
        for block in self.parts:
            bounds.append(bounds[-1] + block.size)
        if start not in bounds or end not in bounds:
            return None
        return self.parts[bounds.index(start) : bounds.index(end)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blocks) and self.parts == other.parts

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.parts)

    def __getnewargs__(self) -> tuple[tuple[Block, ...]]:  # type: ignore[override]
        return (self.parts,)

    def __str__(self) -> str:
        return "|".join(map(str, self.parts))

    __repr__ = __str__

    @classmethod
    def parse(cls, text: str) -> Blocks:
        """Read what `str` prints. Raises ValueError on anything else."""
        parts: list[Block] = []
        for word in text.split("|"):
            match = _BLOCK.fullmatch(word)
            if match is None or (match[1] and (match[3] or match[5])):
                raise ValueError(f"not a block: {word!r}")
            count, room = int(match[2]), int(match[3] or 0)
            if room and room <= count:
                raise ValueError(f"no room for more: {word!r}")
            parts.append(Block(count, int(match[4] or 1), not match[1], match[5] or "", room))
        return cls(parts)


_BLOCK = re.compile(rf"(-?)([1-9]\d*)(?:/([1-9]\d*))?(?:\*([1-9]\d*))?(?:~({AXIS_NAME.pattern}))?")


def zigzag(size: int, axis: str, ranks: int) -> Blocks | None:
    """A dim of `size` in two blocks: rank r has chunks r and 2 ranks - 1 - r. None if it is too short for so many.

    Chunks are as long as the longest of equal ones would be, so that a rank stores no more than without blocks. Those
    of the second block are shorter where the size does not divide, so that no rank has padding before its last row.
    """
    first = ranks * -(-size // (2 * ranks))
    return Blocks((Block(first), Block(size - first, reverse=axis))) if size >= 2 * ranks else None


def blocks_of(size: int) -> tuple[Block, ...]:
    """An atom as the blocks that it is made of: one, if it is none of blocks."""
    return size.parts if isinstance(size, Blocks) else (Block(size),)


def truncated(size: int, length: int) -> int | None:
    """An atom of the first `length` elements of one of `size`, each of which lies where it does there.

    None where a block would have none of them.
    """
    parts: list[Block] = []
    remaining = length
    for block in blocks_of(size):
        if not block.cut or block.unit > 1 or remaining <= 0:
            return None
        count = min(block.count, remaining)
        parts.append(replace(block, count=count, room=block.divided if count < block.divided else 0))
        remaining -= count
    assert remaining <= 0, f"{length} of {size} elements"
    return Blocks(parts) if isinstance(size, Blocks) or length < size else size


def aligned(a: int, b: int) -> bool:
    """Do the elements that two atoms both have lie with the same ranks, and in the same places?"""
    ours, theirs = blocks_of(a), blocks_of(b)
    return [(x.divided, x.unit, x.cut, x.reverse) for x in ours] == [
        (x.divided, x.unit, x.cut, x.reverse) for x in theirs
    ]


def local_size(size: int, axes: Sequence[str], mesh: Mesh) -> int:
    """Elements of an atom of `size` that one rank stores: ceil-divided by each axis in turn, or block by block."""
    if isinstance(size, Blocks):
        return int(size.local(axes, mesh))
    for axis in axes:
        size = -(-size // mesh.size(axis))
    return size
