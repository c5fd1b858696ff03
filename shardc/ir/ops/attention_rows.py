"""Attention of a rank's rows of a sequence: `sdpa_rows` and `sdpa_rows_bwd`, and the ways along which keys travel.

What rows a rank has, `local.runs` says: one run, or several where the sequence lies in blocks. What of them and of the
keys is computed, `attention_tiles` says.

`step` says whose keys they are: all of them (-1), or, of n ranks in a ring, those of the rank `step` places before. A
call of a ring takes what the steps before it have found, and adds its own:

    forward     o, lse     the softmax over the keys so far; o is wide until the last step
    backward    dq         so far, wide until the last step
                dk, dv     of these keys, of the last step alone from the ranks that had them before
                dmask      so far, of a mask with a gradient: a column a key

Keys of a ring are as many as its rows, or others that lie over the same axes, as `keys` says: cross-attention.

`next_keys` is one step of the ring: the keys, or their gradients, of the rank before, or so many `places` before.
Gradients of keys travel with the keys, as wide as sums are: `sum_keys` adds what a step has found to what has arrived
meanwhile. Padded rows yield 0.

Of a window a rank needs few of others' keys, and gets these alone, from those that have them. Which they are follows
from the layout, a zigzag too:

    [-2, 1], 16 rows over 4, rank 1 has rows [4, 8)       needs keys 2 and 3 of the rank one place before, and key 8
    chunks of 8                                           needs keys [0, 4)
    reach_rows   of a rank's keys, those that the rank `places` behind needs
    reach_sum    the gradients of these, as they have come back, at their places among a rank's own

`sdpa_ring` and `sdpa_heads` are `sdpa` on global tensors, and say how a rank is to compute it: by a ring, or, along the
axes `heads`, by dividing heads instead of rows. `localize` leaves none of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_triton.base.library import define, implement
from shardc.ir.blocks import Blocks
from shardc.ir.mesh import Mesh
from shardc.ir.ops import attention
from shardc.ir.ops.attention_sums import wide
from shardc.ir.ops.attention_tiles import Kernels, Tile, attend, attend_backward, empty, tiles
from shardc.ir.ops.attention_window import Window
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import current
from shardc.ir.ops.local import AXES_READ, Run, runs

ALL_KEYS = -1  # the step of a call that has all of them


# ---------------------------------------------------------------------- what is computed
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


class Reached(NamedTuple):
    """Keys of another rank that a rank's rows see: from `start` in the sequence, `place` at their owner, and `local`
    among all that come from there."""

    start: int
    extent: int
    place: int
    local: int


def reached(
    rows: str, axes: Sequence[str], places: int, window: Sequence[int], mesh: Mesh, coordinate: Mapping[str, int]
) -> list[Reached]:
    """What a rank needs of the keys of the rank so many places before."""
    found: list[Reached] = []
    known = Window(*window)
    seen = sorted(known.keys(mine.start, mine.start + mine.extent) for mine in layout(rows, axes, mesh, coordinate))
    for run in layout(rows, axes, mesh, before(axes, places, mesh, coordinate)):
        last = run.start
        for low, high in seen:
            first, end = max(last, low), min(run.start + run.extent, high)
            if first < end:
                local = found[-1].local + found[-1].extent if found else 0
                found.append(Reached(first, end - first, run.local + first - run.start, local))
                last = end
    return found


def reach(rows: str, axes: Sequence[str], window: Sequence[int], mesh: Mesh) -> dict[int, int]:
    """By how many places keys travel, of how many at most for a rank: none where a rank needs none."""
    return _reach(rows, tuple(axes), tuple(window), mesh)


@lru_cache(maxsize=1024)
def _reach(rows: str, axes: tuple[str, ...], window: tuple[int, ...], mesh: Mesh) -> dict[int, int]:
    group = [mesh.coordinate(rank) for rank in mesh.group_of(0, axes)]
    most = {
        places: max(sum(r.extent for r in reached(rows, axes, places, window, mesh, there)) for there in group)
        for places in range(1, len(group))
    }
    return {places: length for places, length in most.items() if length}


def tiles_at(
    rows: str,
    axes: Sequence[str],
    step: int,
    causal: bool,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    window: Sequence[int] = (),
    keys: str = "",
) -> tuple[list[Tile], list[Run]]:
    """The tiles of a rank in a step, and the runs of its keys. `keys`: how they lie, if not as rows do."""
    axes = mesh.resolve(axes)
    own = layout(rows, axes, mesh, coordinate)
    if step == ALL_KEYS:
        seen = [Run(0, int(Blocks.parse(keys or rows)), 0)]
    elif window and step:
        came = reached(rows, axes, step, window, mesh, coordinate)
        seen = [Run(part.start, part.extent, part.local) for part in came]
    else:
        seen = layout(keys or rows, axes, mesh, before(axes, step, mesh, coordinate))
    return tiles(own, seen, causal, window), seen


@lru_cache(maxsize=1024)
def tiles_of_ranks(
    rows: str, axes: tuple[str, ...], step: int, causal: bool, mesh: Mesh, window: tuple[int, ...], keys: str
) -> Sequence[Sequence[Tile]]:
    """The tiles of each rank along the axes: asked once for all layers."""
    return list(_of_ranks(rows, axes, step, causal, mesh, window, keys))


@lru_cache(maxsize=4096)
def forms_of_tiles(
    rows: str, axes: tuple[str, ...], step: int, causal: bool, mesh: Mesh, window: tuple[int, ...], keys: str
) -> Sequence[Sequence[Tile]]:
    """The same, wherever tiles lie, and what several ranks have once. In a long ring, most have what others have."""
    forms: dict[tuple[Tile, ...], None] = {}
    for of_rank in _of_ranks(rows, axes, step, causal, mesh, window, keys):
        forms[tuple([Tile(0, t.rows, 0, t.keys, t.diagonal, t.offset, t.window) for t in of_rank])] = None
    return list(forms)


def _of_ranks(
    rows: str, axes: tuple[str, ...], step: int, causal: bool, mesh: Mesh, window: tuple[int, ...], keys: str
) -> Iterator[list[Tile]]:
    if step == ALL_KEYS or (window and step):
        for rank in mesh.group_of(0, axes):
            yield tiles_at(rows, axes, step, causal, mesh, mesh.coordinate(rank), window, keys)[0]
        return
    rows_of, keys_of = _layouts(rows, axes, mesh), _layouts(keys or rows, axes, mesh)
    for place, rows_of_rank in enumerate(rows_of):
        yield tiles(rows_of_rank, keys_of[(place - step) % len(keys_of)], causal, window)


@lru_cache(maxsize=64)
def _layouts(rows: str, axes: tuple[str, ...], mesh: Mesh) -> Sequence[Sequence[Run]]:
    """The runs of each rank of the ring along the axes, in its order."""
    return [layout(rows, axes, mesh, mesh.coordinate(rank)) for rank in mesh.group_of(0, axes)]


# ---------------------------------------------------------------------- forward
def _of_keys(mask: Tensor | None, keys: Sequence[Run], step: int, stored: int) -> Tensor | None:
    """The columns of a mask that belong to the keys of a step, where those are stored."""
    if mask is None or step == ALL_KEYS or mask.shape[-1] == 1:
        return mask
    columns = mask.new_zeros((*mask.shape[:-1], stored))
    for run in keys:
        columns.narrow(-1, run.local, run.extent).copy_(mask.narrow(-1, run.start, run.extent))
    return columns


def _sdpa_rows(
    kernels: Kernels,
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor | None, lse: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, rows: str, axes: list[str], step: int, last: bool,
    window: Sequence[int] = (), keys: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    context = current()
    todo, seen = tiles_at(rows, axes, step, causal, context.mesh, context.coordinate, window, keys)
    mask = _of_keys(mask, seen, step, k.shape[-2])
    so_far = None if o is None or lse is None else (o, lse)
    return attend(kernels, todo, q, k, v, mask, so_far, scale, gqa, q.dtype if last else wide(q.dtype))


def _sdpa_rows_fake(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor | None, lse: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, rows: str, axes: list[str], step: int, last: bool,
    window: Sequence[int] = (), keys: str = "",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype if last else wide(q.dtype)
    return empty(q, *q.shape[:-1], v.shape[-1], dtype=dtype), q.new_empty(q.shape[:-1], dtype=wide(q.dtype))


# ---------------------------------------------------------------------- backward
def _sdpa_rows_bwd(
    kernels: Kernels,
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dmask: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, rows: str, axes: list[str], step: int, last: bool,
    window: Sequence[int] = (), keys: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    context = current()
    todo, seen = tiles_at(rows, axes, step, causal, context.mesh, context.coordinate, window, keys)
    columns = _of_keys(mask, seen, step, k.shape[-2])
    *results, none = _sdpa_rows_bwd_fake(
        g, q, k, v, mask, o, lse, dq, dk, dv, dmask, causal, scale, gqa, need_mask, rows, axes, step, last, window
    )
    its_mask = torch.zeros_like(columns, dtype=wide(q.dtype)) if need_mask and columns is not None else None
    so_far = (dq, dk, dv)
    dq, dk, dv = attend_backward(kernels, todo, g, q, k, v, columns, o, lse, results, so_far, its_mask, scale, gqa)
    if its_mask is None or mask is None:
        return dq, dk, dv, none
    return dq, dk, dv, _with_columns(mask, dmask, its_mask, seen, step).to(none.dtype)


def _with_columns(mask: Tensor, so_far: Tensor | None, part: Tensor, keys: Sequence[Run], step: int) -> Tensor:
    """The gradient of a mask, with that of the keys of a step."""
    total = torch.zeros_like(mask, dtype=part.dtype) if so_far is None else so_far.to(part.dtype, copy=True)
    if step == ALL_KEYS or mask.shape[-1] == 1:
        return total.add_(part)
    for run in keys:
        total.narrow(-1, run.start, run.extent).add_(part.narrow(-1, run.local, run.extent))
    return total


def _sdpa_rows_bwd_fake(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, o: Tensor, lse: Tensor,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dmask: Tensor | None,
    causal: bool, scale: float | None, gqa: bool, need_mask: bool, rows: str, axes: list[str], step: int, last: bool,
    window: Sequence[int] = (), keys: str = "",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    none = q.new_empty(0, dtype=q.dtype if last else wide(q.dtype))
    dtype = mask.dtype if last and mask is not None else wide(q.dtype)
    dmask = mask.new_empty(mask.shape, dtype=dtype) if need_mask and mask is not None else none
    dq, dk, dv = (empty(t, *t.shape, dtype=t.dtype if last else wide(t.dtype)) for t in (q, k, v))
    return dq, dk, dv, dmask


# ---------------------------------------------------------------------- the ring
def _next_keys(x: Tensor, axes: list[str], places: int = 1) -> Steps:
    group = current().mesh.size(axes)
    source = tuple((rank - places) % group for rank in range(group))
    received = yield Exchange("permute", x.contiguous(), tuple(axes), source=source)
    return received


NEXT_KEYS = define(
    "next_keys(Tensor x, str[] axes, int places=1) -> Tensor",
    partial(run_collective, _next_keys),
    lambda x, axes, places=1: x.new_empty(x.shape),
)
COLLECTIVES[NEXT_KEYS] = _next_keys


# ---------------------------------------------------------------------- what a window reaches
def _reach_rows(x: Tensor, rows: str, axes: list[str], window: list[int], places: int, length: int) -> Tensor:
    context = current()
    names = context.mesh.resolve(axes)
    there = before(names, -places, context.mesh, context.coordinate)
    sent = x.new_zeros([*x.shape[:-2], length, x.shape[-1]])
    for part in reached(rows, names, places, window, context.mesh, there):
        sent.narrow(-2, part.local, part.extent).copy_(x.narrow(-2, part.place, part.extent))
    return sent


def _reach_sum(
    parts: list[Tensor], rows: str, axes: list[str], window: list[int], places: list[int], length: int
) -> Tensor:
    context = current()
    names = context.mesh.resolve(axes)
    total = parts[0].new_zeros([*parts[0].shape[:-2], length, parts[0].shape[-1]])
    for part, far in zip(parts, places, strict=True):
        there = before(names, -far, context.mesh, context.coordinate)
        for r in reached(rows, names, far, window, context.mesh, there):
            total.narrow(-2, r.place, r.extent).add_(part.narrow(-2, r.local, r.extent))
    return total


REACH_ROWS = define(
    "reach_rows(Tensor x, str rows, str[] axes, int[] window, int places, int length) -> Tensor",
    _reach_rows,
    lambda x, rows, axes, window, places, length: x.new_empty([*x.shape[:-2], length, x.shape[-1]]),
)
REACH_SUM = define(
    "reach_sum(Tensor[] parts, str rows, str[] axes, int[] window, int[] places, int length) -> Tensor",
    _reach_sum,
    lambda parts, rows, axes, window, places, length: parts[0].new_empty(
        [*parts[0].shape[:-2], length, parts[0].shape[-1]]
    ),
)
AXES_READ[REACH_ROWS] = AXES_READ[REACH_SUM] = lambda x, rows, axes, *_: axes
SUM_KEYS = define(
    "sum_keys(Tensor found, Tensor arrived) -> Tensor",
    lambda found, arrived: torch.add(found, arrived, out=empty(found, *found.shape)),
    lambda found, arrived: empty(found, *found.shape),
)

SDPA_ROWS = define(
    "sdpa_rows(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? o, Tensor? lse, bool causal, float? scale, bool gqa,"
    ' str rows, str[] axes, int step, bool last, int[] window=[], str keys="") -> (Tensor o, Tensor lse)',
    partial(_sdpa_rows, attention.REFERENCE),
    _sdpa_rows_fake,
)
SDPA_ROWS_BWD = define(
    "sdpa_rows_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, Tensor? dq, Tensor? dk,"
    " Tensor? dv, Tensor? dmask, bool causal, float? scale, bool gqa, bool need_mask, str rows, str[] axes, int step,"
    ' bool last, int[] window=[], str keys="") -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)',
    partial(_sdpa_rows_bwd, attention.REFERENCE),
    _sdpa_rows_bwd_fake,
)


def register_kernels(device: str, kernels: Kernels) -> None:
    """Compute tiles so on a kind of device."""
    implement("sdpa_rows", partial(_sdpa_rows, kernels), device)
    implement("sdpa_rows_bwd", partial(_sdpa_rows_bwd, kernels), device)


AXES_READ[SDPA_ROWS] = lambda *args: args[10]
AXES_READ[SDPA_ROWS_BWD] = lambda *args: args[16]


# ---------------------------------------------------------------------- what is asked for, on global tensors
def _asked(name: str) -> tuple[Any, Any]:
    """`sdpa` and its backward under another name, with the axes along which heads are divided."""

    def forward(*args: Any) -> tuple[Tensor, Tensor]:
        return attention.whole(attention.REFERENCE, *args[:7], *args[8:])

    def backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return attention.whole_backward(attention.REFERENCE, *args[:11], *args[12:])

    return (
        define(
            f"{name}(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float? scale, bool gqa, str[] heads,"
            " int[] window=[]) -> (Tensor o, Tensor lse)",
            forward,
            lambda *args: attention.sdpa_fake(*args[:7]),
        ),
        define(
            f"{name}_bwd(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor o, Tensor lse, bool causal, "
            "float? scale, bool gqa, bool need_mask, str[] heads, int[] window=[])"
            " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dmask)",
            backward,
            lambda *args: attention.sdpa_bwd_fake(*args[:11]),
        ),
    )


SDPA_RING, SDPA_RING_BWD = _asked("sdpa_ring")
SDPA_HEADS, SDPA_HEADS_BWD = _asked("sdpa_heads")
