"""Attention of a rank's rows of a sequence: `sdpa_rows` and `sdpa_rows_bwd`, and the ring along which keys travel.

What rows a rank has, `local.runs` says: one run, or several where the sequence lies in blocks. Causal attention of a
run of rows [a, b) and a run of keys [c, e) is a tile or two, of which only the last has a diagonal; what lies in the
future is in none, so it is not computed, and neither are rows and keys of padding:

    rows [8, 12)    keys [0, 4) full      keys [0, 12): one tile, aligned lower right      keys [12, 16) none

`step` says whose keys they are: all of them (-1), or, in a ring of n ranks, those of the rank `step` places before. A
call of a ring takes what the steps before it have found, and adds its own:

    forward     o, lse     the softmax over the keys so far; o is wide until the last step
    backward    dq         so far, wide until the last step
                dk, dv     of these keys, from the ranks that had them before: of the last step alone

`next_keys` is one step of the ring: the keys, or their gradients, of the rank before. Gradients of keys travel with the
keys: `sum_keys` adds what a step has found to what has arrived meanwhile. Padded rows yield 0.

`sdpa_ring` and `sdpa_heads` are `sdpa` on global tensors, and say how a rank is to compute it: by a ring, or, along the
axes `heads`, by dividing heads instead of rows. `localize` leaves none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_triton.base.library import LIBRARY, define
from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops import attention
from shardc.ir.ops.attention_parts import Softmax, Sum, wide
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, Run, runs

ALL_KEYS = -1  # the step of a call that has all of them


# ---------------------------------------------------------------------- what is computed
class Tile(NamedTuple):
    """Rows and keys that meet, as they are stored: row `row` and the next ones, key `key` and the next ones. On the
    `diagonal` the last row sees the last key."""

    row: int
    rows: int
    key: int
    keys: int
    diagonal: bool


def tiles(rows: Sequence[Run], keys: Sequence[Run], causal: bool) -> list[Tile]:
    """What is computed of attention between these rows and keys."""
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


def layout(rows: str, axes: Sequence[str], mesh: Mesh, coordinate: Mapping[str, int]) -> list[Run]:
    """The runs of a rank, of a sequence as `Blocks` print."""
    return [run for run in runs(Blocks.parse(rows), axes, mesh, coordinate) if run.extent]


def before(axes: Sequence[str], steps: int, mesh: Mesh, coordinate: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of the rank so many places before, in the ring along the axes, the first of which is major."""
    position, there = 0, dict(coordinate)
    for axis in axes:
        position = position * mesh.size(axis) + coordinate[axis]
    position = (position - steps) % mesh.size(axes)
    for axis in reversed(axes):
        there[axis], position = position % mesh.size(axis), position // mesh.size(axis)
    return there


def tiles_at(
    rows: str, axes: Sequence[str], step: int, causal: bool, mesh: Mesh, coordinate: Mapping[str, int]
) -> tuple[list[Tile], list[Run]]:
    """The tiles of a rank in a step, and the runs of its keys."""
    axes = mesh.resolve(axes)
    own = layout(rows, axes, mesh, coordinate)
    if step == ALL_KEYS:
        keys = [Run(0, int(Blocks.parse(rows)), 0)]
    else:
        keys = layout(rows, axes, mesh, before(axes, step, mesh, coordinate))
    return tiles(own, keys, causal), keys


# ---------------------------------------------------------------------- forward
def _as_they_are(q: Tensor, k: Tensor, mask: Tensor | None, todo: list[Tile]) -> list[Tile]:
    return todo


class Kernels(NamedTuple):
    """How one tile is computed: as `sdpa` and `sdpa_bwd`, with a last argument that aligns causal lower right. `cut`
    says which tiles are computed instead of others."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
    cut: Callable[[Tensor, Tensor, Tensor | None, list[Tile]], list[Tile]] = _as_they_are


REFERENCE = Kernels(attention.reference, attention.reference_backward)


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


def _of_keys(mask: Tensor | None, keys: Sequence[Run], step: int, stored: int) -> Tensor | None:
    """The columns of a mask that belong to the keys of a step, where those are stored."""
    if mask is None or step == ALL_KEYS or mask.shape[-1] == 1:
        return mask
    columns = mask.new_zeros((*mask.shape[:-1], stored))
    for run in keys:
        columns.narrow(-1, run.local, run.extent).copy_(mask.narrow(-1, run.start, run.extent))
    return columns


def _mask_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    if mask is None:
        return None
    if mask.ndim > 1 and mask.shape[-2] > 1:
        mask = mask.narrow(-2, tile.row, tile.rows)
    return mask if mask.shape[-1] == 1 else mask.narrow(-1, tile.key, tile.keys)


def _sdpa_rows(
    kernels: Kernels,
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor | None, lse: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, rows: str, axes: list[str], step: int, last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = current()
    todo, keys = tiles_at(rows, axes, step, causal, context.mesh, context.coordinate)
    mask = _of_keys(mask, keys, step, k.shape[-2])
    todo = kernels.cut(q, k, mask, todo)
    result, sums = _sdpa_rows_fake(q, k, v, mask, o, lse, causal, scale, gqa, rows, axes, step, last)
    found = Softmax(result, sums, o, lse, [(tile.row, tile.rows) for tile in todo])
    for tile in todo:
        queries = q.narrow(-2, tile.row, tile.rows)
        part = (t.narrow(-2, tile.key, tile.keys) for t in (k, v))
        its = kernels.forward(queries, *part, _mask_tile(mask, tile), tile.diagonal, scale, gqa, True)
        found.add(tile.row, *its)
    return found.finish()


def _sdpa_rows_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor | None, lse: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, rows: str, axes: list[str], step: int, last: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype if last else wide(q.dtype)
    return attention.empty(q, *q.shape[:-1], v.shape[-1], dtype=dtype), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


# ---------------------------------------------------------------------- backward
def _sdpa_rows_bwd(
    kernels: Kernels,
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    need_mask: bool, rows: str, axes: list[str], step: int, last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    context = current()
    todo, keys = tiles_at(rows, axes, step, causal, context.mesh, context.coordinate)
    assert step == ALL_KEYS or not need_mask, "the gradient of a mask is not summed along a ring"
    columns = _of_keys(mask, keys, step, k.shape[-2])
    todo = kernels.cut(q, k, columns, todo)
    *results, empty = _sdpa_rows_bwd_fake(
        g, q, k, v, mask, o, lse, dq, dk, dv, causal, scale, gqa, need_mask, rows, axes, step, last
    )
    its_rows, its_keys = [(tile.row, tile.rows) for tile in todo], [(tile.key, tile.keys) for tile in todo]
    sums = [
        Sum(result, so_far, spans)
        for result, so_far, spans in zip(results, (dq, dk, dv), (its_rows, its_keys, its_keys), strict=True)
    ]
    dmask = torch.zeros_like(columns, dtype=wide(q.dtype)) if need_mask and columns is not None else None
    for tile in todo:
        grad, queries, result = (t.narrow(-2, tile.row, tile.rows) for t in (g, q, o))
        part = [t.narrow(-2, tile.key, tile.keys) for t in (k, v)]
        its_lse = lse.narrow(-1, tile.row, tile.rows).contiguous()
        its_mask = _mask_tile(columns, tile)
        *parts, mask_part = kernels.backward(
            grad, queries, *part, its_mask, result, its_lse, tile.diagonal, scale, gqa, need_mask, True
        )
        for total, its, start in zip(sums, parts, (tile.row, tile.key, tile.key), strict=True):
            total.add(start, its)
        if dmask is not None:
            into = _mask_tile(dmask, tile)
            assert into is not None
            into.add_(mask_part)
    dq, dk, dv = (total.finish() for total in sums)
    return dq, dk, dv, empty if dmask is None else dmask.to(empty.dtype)


def _sdpa_rows_bwd_fake(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, causal: bool, scale: float | None, gqa: bool,
    need_mask: bool, rows: str, axes: list[str], step: int, last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dmask = mask.new_empty(mask.shape) if need_mask and mask is not None else q.new_empty(0)
    dtype = q.dtype if last else wide(q.dtype)
    return attention.empty(q, *q.shape, dtype=dtype), attention.empty(k, *k.shape), attention.empty(v, *v.shape), dmask


# ---------------------------------------------------------------------- the ring
def _next_keys(x: Tensor, axes: list[str]) -> Steps:
    group = current().mesh.size(axes)
    source = tuple((rank - 1) % group for rank in range(group))
    received = yield Exchange("permute", x.contiguous(), tuple(axes), source=source)
    return received


NEXT_KEYS = define(
    "next_keys(Tensor x, str[] axes) -> Tensor",
    partial(run_collective, _next_keys),
    lambda x, axes: x.new_empty(x.shape),
)
COLLECTIVES[NEXT_KEYS] = _next_keys

SUM_KEYS = define(
    "sum_keys(Tensor found, Tensor arrived) -> Tensor",
    lambda found, arrived: torch.add(found, arrived, out=attention.empty(found, *found.shape)),
    lambda found, arrived: attention.empty(found, *found.shape),
)

SDPA_ROWS = define(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? o, Tensor? lse, bool causal, float? scale, bool gqa,"
    " str rows, str[] axes, int step, bool last) -> (Tensor o, Tensor lse)",
    partial(_sdpa_rows, REFERENCE),
    _sdpa_rows_fake,
)
SDPA_ROWS_BWD = define(
    "sdpa_rows_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, Tensor? dq, Tensor? dk,"
    " Tensor? dv, bool causal, float? scale, bool gqa, bool need_mask, str rows, str[] axes, int step, bool last)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
    partial(_sdpa_rows_bwd, REFERENCE),
    _sdpa_rows_bwd_fake,
)


def register_kernels(device: str, kernels: Kernels) -> None:
    """Compute tiles so on a kind of device."""
    LIBRARY.impl("sdpa_rows", partial(_sdpa_rows, kernels), device)
    LIBRARY.impl("sdpa_rows_bwd", partial(_sdpa_rows_bwd, kernels), device)


def _axes_of(*args: Any) -> list[str]:
    """The axes are the third argument from the end of both."""
    return args[-3]


AXES_READ[SDPA_ROWS] = AXES_READ[SDPA_ROWS_BWD] = _axes_of


# ---------------------------------------------------------------------- what is asked for, on global tensors
def _asked(name: str) -> tuple[Any, Any]:
    """`sdpa` and its backward under another name, with the axes along which heads are divided."""
    forward = define(
        f"{name}(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool gqa, str[] heads)"
        " -> (Tensor o, Tensor lse)",
        lambda *args: attention.reference(*args[:-1]),
        lambda *args: attention.sdpa_fake(*args[:-1]),
    )
    backward = define(
        f"{name}_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, bool causal, "
        "float? scale, bool gqa, bool need_mask, str[] heads) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
        lambda *args: attention.reference_backward(*args[:-1]),
        lambda *args: attention.sdpa_bwd_fake(*args[:-1]),
    )
    return forward, backward


SDPA_RING, SDPA_RING_BWD = _asked("sdpa_ring")
SDPA_HEADS, SDPA_HEADS_BWD = _asked("sdpa_heads")
