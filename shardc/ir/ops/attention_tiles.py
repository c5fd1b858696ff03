"""What is computed of attention between runs of rows and runs of keys: tiles, and the sums over them.

Causal attention of a run of rows [a, b) and a run of keys [c, e) is a tile or two, of which only the last has a
diagonal; what lies in the future is in none, so it is not computed, and neither are rows and keys of padding:

    rows [8, 12)    keys [0, 4) full      keys [0, 12): one tile, aligned lower right      keys [12, 16) none

Of a window (`attention_window`), rows are taken a block at a time, and keys that no row of a block sees are in no tile.
A tile that the window cuts is computed with a mask of its own, the band; rows of a chunk meet its keys alone:

    window [-2, 0], rows [8, 12)       keys [6, 12): a band      keys [0, 4): none
    chunks of 8, causal, rows [6, 12)  rows [6, 8) and keys [0, 8), rows [8, 12) and keys [8, 12)

What tiles yield is put together by `attention_sums`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from shardc.ir.ops.attention_sums import Softmax, Sum, wide
from shardc.ir.ops.attention_window import Window, window_of
from shardc.ir.ops.local import Run

# Rows that are computed together where there is a window: between these as many as it has. Fewer rows compute fewer
# keys that a mask hides, more rows need fewer kernels.
FEWEST, MOST = 64, 1024


class Tile(NamedTuple):
    """Rows and keys that meet, as they are stored: row `row` and the next ones, key `key` and the next ones. On the
    `diagonal` the last row sees the last key. `offset` is how far the first row is behind the first key in the
    sequence; in a tile with a `window`, whose positions count from the first row, these say which keys a row sees."""

    row: int
    rows: int
    key: int
    keys: int
    diagonal: bool
    offset: int = 0
    window: Window | None = None


def tiles(rows: Sequence[Run], keys: Sequence[Run], causal: bool, window: Sequence[int] = ()) -> list[Tile]:
    """What is computed of attention between these rows and keys."""
    known = window_of(window)
    if known is not None:
        if causal:
            known = known._replace(last=min(known.last, 0))
        return [tile for run in rows for piece in _pieces(run, known) for tile in _windowed(piece, keys, known)]
    return _seen(rows, keys, causal)


def _seen(rows: Sequence[Run], keys: Sequence[Run], causal: bool) -> list[Tile]:
    """Where rows see all keys, or all up to their own."""
    found: list[list[Tile]] = []
    ends = {end for run in keys for end in (run.start, run.start + run.extent)} if causal else set[int]()
    for run in rows:
        last = run.start + run.extent
        cuts = [run.start, *sorted(end for end in ends if run.start < end < last), last]
        for first, end in pairwise(cuts):
            more = _tiles_of(Run(first, end - first, run.local + first - run.start), keys, causal)
            joined = _joined(found[-1], more) if found else None
            found = [*found[:-1], joined] if joined is not None else [*found, more]
    return [tile for of_run in found for tile in of_run]


def _joined(before: Sequence[Tile], more: Sequence[Tile]) -> list[Tile] | None:
    """One tile for that of rows and that of the next rows, where they see the same keys, or one key more a row."""
    if len(before) != 1 or len(more) != 1:
        return None
    (a,), (b,) = before, more
    more_keys = b.rows if b.diagonal else 0
    if (a.row + a.rows, a.key, a.keys + more_keys) != (b.row, b.key, b.keys) or (a.diagonal and not b.diagonal):
        return None
    if b.diagonal and not a.diagonal and a.rows > 1:
        return None
    return [Tile(a.row, a.rows + b.rows, a.key, b.keys, b.diagonal)]


def _tiles_of(rows: Run, keys: Sequence[Run], causal: bool) -> list[Tile]:
    """The tiles of rows inside of which no run of keys begins or ends."""
    found: list[Tile] = []
    for run in keys:
        seen = min(run.extent, rows.start + rows.extent - run.start) if causal else run.extent
        if seen <= 0 or not rows.extent:
            continue
        diagonal = causal and run.start + seen > rows.start + 1
        before = found[-1] if found else None
        if before is not None and before.key + before.keys == run.local and not before.diagonal:
            found[-1] = Tile(rows.local, rows.extent, before.key, before.keys + seen, diagonal)
        else:
            found.append(Tile(rows.local, rows.extent, run.local, seen, diagonal))
    return found


def _cut(run: Run, ends: Sequence[int]) -> list[Run]:
    inside = [run.start, *(end for end in ends if run.start < end < run.start + run.extent), run.start + run.extent]
    return [Run(a, b - a, run.local + a - run.start) for a, b in pairwise(inside)]


def _pieces(rows: Run, window: Window) -> list[Run]:
    """Rows of one chunk, or of several that are small."""
    return _cut(rows, window.cuts(rows.start, rows.start + rows.extent, FEWEST))


def _near(rows: Run, keys: Sequence[Run], window: Window) -> list[Run]:
    """The keys that some of the rows see, if windows had no holes."""
    low, high = window.keys(rows.start, rows.start + rows.extent)
    cut = ((run, max(run.start, low), min(run.start + run.extent, high)) for run in keys)
    return [Run(first, end - first, run.local + first - run.start) for run, first, end in cut if first < end]


def _windowed(rows: Run, keys: Sequence[Run], window: Window) -> list[Tile]:
    """The tiles of a piece: without a band where rows see all keys of their chunk, or all up to their own."""
    near, end = _near(rows, keys, window), rows.start + rows.extent
    if not near:
        return []
    window = window.in_chunk(rows.start, end)
    if not window.chunk and min(run.start for run in near) - end + 1 >= window.first:
        ahead = max(run.start + run.extent for run in near) - rows.start - 1
        if ahead <= window.last or window.last == 0:
            return _seen([rows], near, causal=ahead > window.last)
    size = min(max(window.last - window.first + 1, FEWEST), MOST)
    blocks = _cut(rows, range(rows.start, end, size))
    return [tile for block in blocks for tile in _banded(block, near, window)]


def _banded(rows: Run, keys: Sequence[Run], window: Window) -> list[Tile]:
    """Of rows that are computed together, a tile with each run of keys of which they see any."""
    found: list[Tile] = []
    last, inside = rows.start + rows.extent - 1, window.in_chunk(rows.start, rows.start + rows.extent)
    for run in _near(rows, keys, window):
        end = run.start + run.extent - 1
        hidden = run.start < last + window.first  # of the last row, by the window
        ahead = end > rows.start + window.last  # of the first row
        diagonal = ahead and not hidden and not inside.chunk and window.last == 0 and end == last
        cut = (hidden or ahead or bool(inside.chunk)) and not diagonal
        place = (rows.local, rows.extent, run.local, run.extent)
        found.append(Tile(*place, diagonal, rows.start - run.start, inside.of_rows(rows.start) if cut else None))
    return found


@lru_cache(maxsize=4096)
def pairs(tile: Tile, exactly: bool) -> float:
    """How many rows and keys of a tile see each other. If not `exactly`, a row and its own key are half a pair."""
    if tile.window is not None:
        return tile.window.pairs(tile.rows, tile.keys, tile.offset)
    return tile.rows * tile.keys - (tile.rows * (tile.rows - exactly) / 2 if tile.diagonal else 0)


# ---------------------------------------------------------------------- sums over tiles
def square(todo: Sequence[Tile]) -> list[Tile]:
    """The same tiles, with a diagonal only in squares, where there are twice as many keys as rows."""
    found: list[Tile] = []
    for tile in todo:
        more = tile.keys - tile.rows
        if tile.diagonal and more >= tile.rows:
            found.append(Tile(tile.row, tile.rows, tile.key, more, False))
            found.append(Tile(tile.row, tile.rows, tile.key + more, tile.rows, True))
        else:
            found.append(tile)
    return found


def _as_they_are(q: Tensor, k: Tensor, mask: Tensor | None, todo: Sequence[Tile]) -> Sequence[Tile]:
    return todo


class Kernels(NamedTuple):
    """How one tile is computed: as `sdpa` and `sdpa_bwd`, with a last argument that aligns causal lower right. `cut`
    says which tiles are computed instead of others."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    cut: Callable[[Tensor, Tensor, Tensor | None, Sequence[Tile]], Sequence[Tile]] = _as_they_are


def empty(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor in the layout that `sdpa` promises."""
    if len(shape) != 4:
        return like.new_empty(shape, dtype=dtype)
    b, h, s, d = shape
    return like.new_empty((b, s, h, d), dtype=dtype).transpose(1, 2)


def attend(
    kernels: Kernels, todo: Sequence[Tile], q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    so_far: tuple[Tensor, Tensor] | None, scale: float | None, gqa: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The softmax over the keys of the tiles, and of those that the results `so_far` are of: o, of the dtype, and lse.

    Rows that see no key yield 0, and -inf.
    """
    todo = kernels.cut(q, k, mask, todo)
    o = empty(q, *q.shape[:-1], v.shape[-1], dtype=dtype)
    lse = q.new_empty(q.shape[:-1], dtype=wide(q.dtype))
    found = Softmax(o, lse, *(so_far or (None, None)), [(tile.row, tile.rows) for tile in todo])
    for tile in todo:
        queries = q.narrow(-2, tile.row, tile.rows)
        part = (t.narrow(-2, tile.key, tile.keys) for t in (k, v))
        its = kernels.forward(queries, *part, _mask_of(mask, tile, q), tile.diagonal, scale, gqa, True)
        found.add(tile.row, *its)
    return found.finish()


def attend_backward(
    kernels: Kernels, todo: Sequence[Tile], g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor,
    lse: Tensor, results: Sequence[Tensor], so_far: Sequence[Tensor | None], dmask: Tensor | None,
    scale: float | None, gqa: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v of the tiles, and of what is `so_far` of them, in `results`. To `dmask`, where it is
    wanted, that of the mask is added."""
    todo = kernels.cut(q, k, mask, todo)
    rows, keys = [(tile.row, tile.rows) for tile in todo], [(tile.key, tile.keys) for tile in todo]
    sums = [Sum(*parts) for parts in zip(results, so_far, (rows, keys, keys), strict=True)]
    for tile in todo:
        grad, queries, result = (t.narrow(-2, tile.row, tile.rows) for t in (g, q, o))
        part = (t.narrow(-2, tile.key, tile.keys) for t in (k, v))
        its_lse, need_mask = lse.narrow(-1, tile.row, tile.rows).contiguous(), dmask is not None
        its_mask = _mask_of(mask, tile, q)
        *parts, mask_part = kernels.backward(
            grad, queries, *part, its_mask, result, its_lse, tile.diagonal, scale, gqa, need_mask, True
        )
        for total, its, start in zip(sums, parts, (tile.row, tile.key, tile.key), strict=True):
            total.add(start, its)
        if dmask is not None:
            into = _narrowed(dmask, tile)
            into.add_(mask_part.sum_to_size(into.shape))
    dq, dk, dv = (total.finish() for total in sums)
    return dq, dk, dv


def _narrowed(mask: Tensor, tile: Tile) -> Tensor:
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask.narrow(-2, tile.row, tile.rows)
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, tile.key, tile.keys)


def _mask_of(mask: Tensor | None, tile: Tile, q: Tensor) -> Tensor | None:
    """The mask of a tile, with its band where it has one."""
    part = None if mask is None else _narrowed(mask, tile)
    if tile.window is None:
        return part
    seen = tile.window.mask(tile.rows, tile.keys, tile.offset, q.device)
    if part is None:
        return seen
    return part & seen if part.dtype == torch.bool else part.masked_fill(~seen, float("-inf"))
