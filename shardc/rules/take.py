"""Rows that a tensor names (`shardc.ir.ops.take`): ranks that have them yield them and others zeros, which add up."""

from __future__ import annotations

from collections.abc import Sequence

from shardc.ir.ops.take import ADD_ROWS, TAKE_ROWS
from shardc.rules.notation import Dims, Notation
from shardc.rules.pick import local_pick, local_place, unfit
from shardc.rules.registry import example, rule


def _named(index: Dims, of: Dims, dim: int) -> str:
    """The index, of whose dims those of size 1 are for all."""
    return " ".join("r" if d == dim else "1" if n == 1 else of[d] for d, n in enumerate(index.shape))


@rule(
    TAKE_ROWS,
    localize=local_pick,
    unfit=unfit,
    padding="unread",
    examples=[
        example((4, 6, 3), 1, (4, 2, 1), ints={"index": 6}),
        example((4, 6, 3), 1, (1, 5, 1), ints={"index": 6}),
        example((6, 4), 0, (1, 4), ints={"index": 6}),
        example((3, 4, 8), 2, (3, 4, 3), ints={"index": 8}),
    ],
)
def take_rows(x: Dims, dim: int, index: Dims, rows: str, axes: Sequence[str] | None) -> Notation:
    text = _named(index, x, dim)
    return Notation(f"{x.replace(dim, 's')}, {text} -> {x.replace(dim, 'r')}", sum="s", whole="r", linear=(0,))


@rule(
    ADD_ROWS,
    localize=local_place,
    unfit=unfit,
    examples=[
        example((4, 2, 3), 1, (4, 2, 1), 6, ints={"index": 6}),
        example((4, 5, 3), 1, (1, 5, 1), 6, ints={"index": 6}),
        example((1, 4), 0, (1, 4), 6, ints={"index": 6}),
    ],
)
def add_rows(g: Dims, dim: int, index: Dims, size: int, rows: str, axes: Sequence[str] | None) -> Notation:
    text = _named(index, g, dim)
    return Notation(f"{g.replace(dim, 'r')}, {text} -> {g.replace(dim, 's')}", whole="r", linear=(0,))
