"""Attention of a rank's rows of a sequence: `sdpa_rows` and `sdpa_rows_bwd`, and the ring along which keys travel.

What rows a rank has, `local.runs` says: one run, or several where the sequence lies in blocks. Causal attention of a
run of rows [a, b) and a run of keys [c, e) is a tile or two, of which only the last has a diagonal; what lies in the
future is in none, so it is not computed, and neither are rows and keys of padding:

    rows [8, 12)    keys [0, 4) full      keys [0, 12): one tile, aligned lower right      keys [12, 16) none

`step` says whose keys they are: all of them (-1), or, in a ring of n ranks, those of the rank `step` places before. A
call of a ring takes what the steps before it have found, and adds its own:

    forward     o, lse     the softmax over the keys so far; o is wide until the last step
    backward    dq         so far, wide until the last step
                dk, dv     of these keys, from the ranks that had them before; they travel with the keys

`next_keys` is one step of the ring: the keys, or their gradients, of the rank before. Padded rows yield 0.

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
    found: list[Tile] = []
    ends = {end for run in keys for end in (run.start, run.start + run.extent)} if causal else set[int]()
    for run in rows:
        last = run.start + run.extent
        cuts = [run.start, *sorted(end for end in ends if run.start < end < last), last]
        for first, end in pairwise(cuts):
            found += _tiles_of(Run(first, end - first, run.local + first - run.start), keys, causal)
    return found


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
class Kernels(NamedTuple):
    """How one tile is computed: as `sdpa` and `sdpa_bwd`, with a last argument that aligns causal lower right."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


REFERENCE = Kernels(attention.reference, attention.reference_backward)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What parts are merged in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    once = last and o is None and len({tile.row for tile in todo}) == len(todo)
    total, sums = _sdpa_rows_fake(q, k, v, mask, o, lse, causal, scale, gqa, rows, axes, step, last)
    if not once and total.dtype != wide(q.dtype):
        total = attention.empty(q, *total.shape, dtype=wide(q.dtype))
    if o is None or lse is None:
        total.zero_()
        sums.fill_(float("-inf"))
    else:
        total.copy_(o)
        sums.copy_(lse)
    add_tiles(kernels, todo, (q, k, v, mask), (total, sums), scale, gqa, once=once)
    want = q.dtype if last else wide(q.dtype)
    return (total if total.dtype == want else attention.empty(q, *total.shape, dtype=want).copy_(total)), sums


def add_tiles(
    kernels: Kernels,
    todo: Sequence[Tile],
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None],
    into: tuple[Tensor, Tensor],
    scale: float | None,
    gqa: bool,
    *,
    once: bool = False,
) -> None:
    """Add tiles to the softmax so far, an output and its log-sums; `once`: they are all that there is of their rows."""
    q, k, v, mask = operands
    total, sums = into
    for tile in todo:
        queries = q.narrow(-2, tile.row, tile.rows)
        part = (t.narrow(-2, tile.key, tile.keys) for t in (k, v))
        result, its_sums = kernels.forward(queries, *part, _mask_tile(mask, tile), tile.diagonal, scale, gqa, True)
        of_rows, known = total.narrow(-2, tile.row, tile.rows), sums.narrow(-1, tile.row, tile.rows)
        if once:
            of_rows.copy_(result)
            known.copy_(its_sums)
        else:
            _merge(of_rows, known, result, its_sums)


def _merge(o: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Of two parts of the keys, the softmax over both, in the place of the first."""
    both = torch.logaddexp(lse, other_lse)
    finite = both.masked_fill(both == float("-inf"), 0.0)
    weights = ((part - finite).exp().unsqueeze(-1) for part in (lse, other_lse))
    o.copy_(o * next(weights) + other.to(o.dtype) * next(weights))
    lse.copy_(both)


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
    totals = [_started(t, so_far, wide(t.dtype)) for t, so_far in ((q, dq), (k, dk), (v, dv))]
    dmask = torch.zeros_like(columns, dtype=wide(q.dtype)) if need_mask and columns is not None else None
    add_gradients(kernels, todo, (g, q, k, v, columns, o, lse), (*totals, dmask), scale, gqa)
    *fakes, empty = _sdpa_rows_bwd_fake(
        g, q, k, v, mask, o, lse, dq, dk, dv, causal, scale, gqa, need_mask, rows, axes, step, last
    )
    dq, dk, dv = (
        total if total.dtype == fake.dtype else fake.copy_(total) for total, fake in zip(totals, fakes, strict=True)
    )
    return dq, dk, dv, empty if dmask is None else dmask.to(empty.dtype)


def add_gradients(
    kernels: Kernels,
    todo: Sequence[Tile],
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor],
    into: Sequence[Tensor | None],
    scale: float | None,
    gqa: bool,
) -> None:
    """Add the gradients of tiles to those of q, k, v and, if it is there, the mask. `operands`: g, q, k, v, the mask, o
    and lse, of all keys."""
    g, q, k, v, mask, o, lse = operands
    *totals, dmask = into
    for tile in todo:
        its_rows = [t.narrow(-2, tile.row, tile.rows) for t in (g, q)]
        its_keys = [t.narrow(-2, tile.key, tile.keys) for t in (k, v)]
        result, sums = o.narrow(-2, tile.row, tile.rows), lse.narrow(-1, tile.row, tile.rows)
        need_mask, its_mask = dmask is not None, _mask_tile(mask, tile)
        *parts, mask_part = kernels.backward(
            *its_rows, *its_keys, its_mask, result, sums.contiguous(), tile.diagonal, scale, gqa, need_mask, True
        )
        places = ((tile.row, tile.rows), (tile.key, tile.keys), (tile.key, tile.keys))
        for total, part, (start, length) in zip(totals, parts, places, strict=True):
            assert total is not None
            total.narrow(-2, start, length).add_(part)
        if dmask is not None:
            its_total = _mask_tile(dmask, tile)
            assert its_total is not None
            its_total.add_(mask_part)


def _started(like: Tensor, so_far: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = attention.empty(like, *like.shape, dtype=dtype)
    return total.zero_() if so_far is None else total.copy_(so_far)


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
