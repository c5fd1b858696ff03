"""Rows sent to the ranks of their experts, and what becomes of them sent back: uneven all-to-alls, for any routing.

A rank groups the rows of its own tokens by all experts (`group_rows`), so those of each rank's experts lie together:

    offs    2 2 5 6           4 experts over 2 ranks: 2 of its rows go to rank 0, 4 to rank 1
    counts  2 1               a line for each of rank 0's own experts: how many rows it gets from each rank
            0 3

    exchange_counts  offs -> counts
    group_ends       counts -> offs of the rows that a rank gets
    exchanged_perm   counts -> a perm of as many rows, for what asks a perm how many there are: it leads nowhere
    dispatch_rows    rows of a rank's tokens -> rows of a rank's experts, in the order of experts
    combine_rows     the inverse: rows are where they were before `dispatch_rows`

Each of the last two is the gradient of the other. Their results have room for all `rows` that may come; behind those
that came are zeros. How many rows go where is known on the device alone, and the host needs it to send them.
`exchange_counts` reads it once for all moves of a grouping, and leaves it with the counts. A move of counts that lie
elsewhere by now reads it again.

With a `capacity`, no expert has more rows of a rank than that (`ir.ops.expert_capacity`). So each pair of ranks
exchanges as many, filled or not, by an even all-to-all, and the host reads nothing:

    capacity 3, 2 experts a rank     6 rows to each rank: its own first, by expert; what is behind them is not read
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.functional import pad

from kernels_triton.base.library import define
from shardc.ir.ops.collectives import COLLECTIVES, Exchange, Steps, run_collective
from shardc.ir.ops.context import Sizes

_READ = "_shardc_sizes"  # of a tensor of counts, the Sizes that have been read


def _by_rank(offs: Tensor, ranks: int, each: int) -> Tensor:
    """How many rows there are for each of the `each` experts of each rank; none for those that pad the last ranks'."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1))
    return pad(counts, [0, ranks * each - counts.shape[0]]).view(ranks, each)


def _exchange_counts(x: Tensor, axes: list[str], shape: list[int], reads: bool = True) -> Steps:
    each, ranks = shape
    mine = _by_rank(x, ranks, each).contiguous()
    received = yield Exchange("all_to_all", mine, tuple(axes))
    counts = received.t().contiguous()
    if reads and not counts.is_meta:
        setattr(counts, _READ, read(mine, counts))
    return counts


def read(mine: Tensor, counts: Tensor) -> Sizes:
    """Sizes, by a rank's own counts and those of the rows that it gets: the host waits for the device."""
    sent, received = torch.stack([mine.sum(1), counts.sum(0)]).tolist()
    return Sizes(tuple(sent), tuple(received))


def sizes(offs: Tensor, counts: Tensor) -> Sizes:
    """How many rows are exchanged, by the offsets of a rank's own rows and the counts of those that it gets."""
    noted: Sizes | None = getattr(counts, _READ, None)
    each, ranks = counts.shape
    return read(_by_rank(offs, ranks, each), counts) if noted is None else noted


def _order(counts: Tensor, total: int) -> Tensor:
    """For each row in the order of experts, where it lies in that of the ranks it comes from."""
    each, ranks = counts.shape
    by_rank = counts.t().flatten().long()
    starts = (by_rank.cumsum(0) - by_rank).view(ranks, each).t().flatten()
    lengths = counts.flatten().long()
    shift = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(total, device=counts.device)
    return places + shift.repeat_interleave(lengths, output_size=total)


def _with_room(x: Tensor, rows: int) -> Tensor:
    return pad(x, [0, 0] * (x.ndim - 1) + [0, rows - x.shape[0]])


def width_of(rows: int, each: int, capacity: int) -> int:
    """How many rows of a rank's `rows` each rank gets for its experts, `each` of them, by a capacity."""
    return min(rows, each * capacity)


class _Blocks:
    """The rows that go by a capacity from each rank to this one, `width` of each: where each lies among all, which are
    in the order of experts. `counts` has a line an expert, and a column a rank."""

    def __init__(self, counts: Tensor, width: int) -> None:
        self.counts, self.width = counts.long(), width
        self.ends = self.counts.flatten().cumsum(0)  # of the rows for an expert from a rank
        self.before = self.counts.cumsum(0) - self.counts  # in the block of a rank: the rows of experts before

    def places(self) -> Tensor:
        """For each row of each block, its place in the order of experts; for those behind the last, any."""
        each, ranks = self.counts.shape
        row = torch.arange(self.width, device=self.counts.device).repeat(ranks, 1)
        expert = torch.searchsorted((self.before + self.counts).t().contiguous(), row, right=True).clamp(max=each - 1)
        rank = torch.arange(ranks, device=self.counts.device)[:, None]
        start = (self.ends.view(each, ranks) - self.counts)[expert, rank]
        return start + row - self.before[expert, rank]

    def sources(self, rows: int) -> tuple[Tensor, Tensor]:
        """For each place in the order of experts, where its row lies in the blocks; and whether there is one."""
        place = torch.arange(rows, device=self.counts.device)
        group = torch.searchsorted(self.ends, place, right=True).clamp(max=self.ends.shape[0] - 1)
        expert, rank = group // self.counts.shape[1], group % self.counts.shape[1]
        within = place - (self.ends - self.counts.flatten())[group]
        source = rank * self.width + self.before[expert, rank] + within
        return source.clamp(max=self.counts.shape[1] * self.width - 1), place < self.ends[-1]


def _rank_ends(offs: Tensor, ranks: int, each: int) -> tuple[Tensor, Tensor]:
    """Where the rows for each rank's experts start, and where they end."""
    last = (torch.arange(1, ranks + 1, device=offs.device) * each).clamp(max=offs.shape[0]) - 1
    ends = offs[last].long()
    return pad(ends[:-1], [1, 0]), ends


def _rows_where(x: Tensor, index: Tensor, there: Tensor) -> Tensor:
    return torch.where(there.view(-1, *[1] * (x.ndim - 1)), x[index], 0)


def _dispatch_blocks(x: Tensor, offs: Tensor, counts: Tensor, axes: list[str], rows: int, capacity: int) -> Steps:
    each, ranks = counts.shape
    width = width_of(x.shape[0], each, capacity)
    starts, _ = _rank_ends(offs, ranks, each)
    index = (starts[:, None] + torch.arange(width, device=x.device)).clamp(max=x.shape[0] - 1)
    arrived = yield Exchange("all_to_all", x[index], tuple(axes))
    source, there = _Blocks(counts, width).sources(rows)
    return _rows_where(arrived.flatten(0, 1), source, there)


def _combine_blocks(x: Tensor, offs: Tensor, counts: Tensor, axes: list[str], rows: int, capacity: int) -> Steps:
    each, ranks = counts.shape
    width = width_of(rows, each, capacity)
    back = x[_Blocks(counts, width).places().clamp(max=x.shape[0] - 1)]
    arrived = yield Exchange("all_to_all", back, tuple(axes))
    starts, ends = _rank_ends(offs, ranks, each)
    place = torch.arange(rows, device=x.device)
    rank = torch.searchsorted(ends, place, right=True).clamp(max=ranks - 1)
    source = (rank * width + place - starts[rank]).clamp(max=ranks * width - 1)
    return _rows_where(arrived.flatten(0, 1), source, place < ends[-1])


def _dispatch_rows(x: Tensor, offs: Tensor, counts: Tensor, axes: list[str], rows: int, capacity: int = 0) -> Steps:
    if capacity:
        return (yield from _dispatch_blocks(x, offs, counts, axes, rows, capacity))
    moved = sizes(offs, counts)
    front = x[: sum(moved.sent)].contiguous()
    arrived = yield Exchange("all_to_all_uneven", front, tuple(axes), sizes=moved)
    return _with_room(arrived[_order(counts, arrived.shape[0])], rows)


def _combine_rows(x: Tensor, offs: Tensor, counts: Tensor, axes: list[str], rows: int, capacity: int = 0) -> Steps:
    if capacity:
        return (yield from _combine_blocks(x, offs, counts, axes, rows, capacity))
    moved = sizes(offs, counts)
    total = sum(moved.received)
    back = torch.empty((total, *x.shape[1:]), dtype=x.dtype, device=x.device)
    back[_order(counts, total)] = x[:total]
    arrived = yield Exchange("all_to_all_uneven", back, tuple(axes), sizes=Sizes(moved.received, moved.sent))
    return _with_room(arrived, rows)


def _moved_fake(x: Tensor, offs: Tensor, counts: Tensor, axes: list[str], rows: int, capacity: int = 0) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _group_ends(counts: Tensor) -> Tensor:
    return counts.sum(1).cumsum(0).to(torch.int32)


def _group_ends_fake(counts: Tensor) -> Tensor:
    return counts.new_empty(counts.shape[:1], dtype=torch.int32)


def _exchanged_perm(counts: Tensor, rows: int) -> Tensor:
    return torch.full((rows,), -1, dtype=torch.int64, device=counts.device)


def _exchanged_perm_fake(counts: Tensor, rows: int) -> Tensor:
    return counts.new_empty((rows,), dtype=torch.int64)


def _collective(schema: str, steps: Callable[..., Steps], fake: Callable[..., Any]) -> OpOverload:
    op = define(schema, partial(run_collective, steps), fake)
    COLLECTIVES[op] = steps
    return op


_MOVED = "(Tensor x, Tensor offs, Tensor counts, str[] axes, int rows, int capacity=0) -> Tensor"
EXCHANGE_COUNTS = _collective(
    "exchange_counts(Tensor x, str[] axes, int[] shape, bool reads=True) -> Tensor",
    _exchange_counts,
    lambda x, axes, shape, reads=True: x.new_empty(shape),
)
DISPATCH_ROWS = _collective(f"dispatch_rows{_MOVED}", _dispatch_rows, _moved_fake)
COMBINE_ROWS = _collective(f"combine_rows{_MOVED}", _combine_rows, _moved_fake)
GROUP_ENDS = define("group_ends(Tensor counts) -> Tensor", _group_ends, _group_ends_fake)
EXCHANGED_PERM = define("exchanged_perm(Tensor counts, int rows) -> Tensor", _exchanged_perm, _exchanged_perm_fake)
ROW_MOVES = (DISPATCH_ROWS, COMBINE_ROWS)
EXCHANGES = (EXCHANGE_COUNTS, *ROW_MOVES)
