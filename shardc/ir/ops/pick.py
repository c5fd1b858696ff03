"""A few rows of a dim, picked by their number, and their gradients back in their places.

    pick_rows     x[:, 13:15]          of 16 rows over 4 ranks: rank 3 yields rows 13 and 14, the others zeros
    place_rows    their gradients in 16 rows, zeros elsewhere: rank 3 has these, nobody is asked

Ranks' results of the first add up to the rows. A call with `rows` and `axes` is one rank's: so the dim lies, as
`Blocks` print, a zigzag too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from kernels_triton.base.library import define
from shardc.ir.blocks import Blocks
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, runs


def _held(start: int, length: int, rows: str, axes: list[str]) -> Iterator[tuple[int, int, int]]:
    """Of the rows [start, start + length) those of a rank: which of them, where it has them, and how many."""
    if not axes:
        yield 0, start, length
        return
    context = current()
    for run in runs(Blocks.parse(rows), context.mesh.resolve(axes), context.mesh, context.coordinate):
        first, end = max(start, run.start), min(start + length, run.start + run.extent)
        if first < end:
            yield first - start, run.local + first - run.start, end - first


def _pick_rows(x: Tensor, dim: int, start: int, length: int, rows: str = "", axes: list[str] | None = None) -> Tensor:
    picked = x.new_zeros([*x.shape[:dim], length, *x.shape[dim + 1 :]])
    for row, place, count in _held(start, length, rows, axes or []):
        picked.narrow(dim, row, count).copy_(x.narrow(dim, place, count))
    return picked


def _place_rows(g: Tensor, dim: int, start: int, size: int, rows: str = "", axes: list[str] | None = None) -> Tensor:
    placed = g.new_zeros([*g.shape[:dim], size, *g.shape[dim + 1 :]])
    for row, place, count in _held(start, g.shape[dim], rows, axes or []):
        placed.narrow(dim, place, count).copy_(g.narrow(dim, row, count))
    return placed


PICK_ROWS = define(
    'pick_rows(Tensor x, int dim, int start, int length, str rows="", str[]? axes=None) -> Tensor',
    _pick_rows,
    lambda x, dim, start, length, rows="", axes=None: x.new_empty([*x.shape[:dim], length, *x.shape[dim + 1 :]]),
)
PLACE_ROWS = define(
    'place_rows(Tensor g, int dim, int start, int size, str rows="", str[]? axes=None) -> Tensor',
    _place_rows,
    lambda g, dim, start, size, rows="", axes=None: g.new_empty([*g.shape[:dim], size, *g.shape[dim + 1 :]]),
)
AXES_READ[PICK_ROWS] = AXES_READ[PLACE_ROWS] = lambda *args: args[5] if len(args) > 5 and args[5] else []
