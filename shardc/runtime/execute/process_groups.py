"""The communicator of a real job: torch.distributed process groups, one for every set of axes that a program uses.

torch orders the members of a group by rank, shardc along the given axes, major first. Where the two orders differ
(`("tp", "dp")` on a mesh dp x tp), rows are reordered around the call. Results are fresh tensors, except that an
all-reduce whose operand is not read again (`spent`) works in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import Exchange, landing
from shardc.ir.ops.context import Sizes
from shardc.ir.ops.scaled import FP8
from shardc.torch_compat import (
    all_gather_pieces,
    all_gather_single,
    high_priority,
    reduce_scatter_pieces,
    reduce_scatter_single,
)

PendingResult = Callable[[], torch.Tensor]
REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class ProcessGroupCommunicator:
    """A `Communicator` over gloo or NCCL. It also has a group along all axes of the mesh, to gather whole tensors.

    Creating a group is itself collective: every rank creates all groups in the same order, also groups without it. A
    job may have several `copies` of the mesh; each lists the job's ranks in the order of the mesh's ranks. This rank is
    `rank` of copy `copy_index`. `also` lists further groups of the job's ranks, and `back` those that have a second
    group, for what is sent back. Groups of another communicator that is `known` are not made again. Along the axes
    `twice` there are two groups: sums of gradients have the other one, and hold up no other exchange. The first is of
    high priority, as compute waits for what it brings.
    """

    def __init__(
        self,
        mesh: Mesh,
        rank: int,
        axes: Iterable[Sequence[str]],
        timeout: timedelta,
        copies: Sequence[Sequence[int]] | None = None,
        copy_index: int = 0,
        also: Iterable[Sequence[int]] = (),
        known: ProcessGroupCommunicator | None = None,
        twice: Iterable[Sequence[str]] = (),
        back: Iterable[Sequence[int]] = (),
    ) -> None:
        copies = [range(mesh.world_size)] if copies is None else copies
        self.mesh, self.rank, self._job = mesh, rank, copies[copy_index]
        all_ranks = tuple(sorted(member for copy in copies for member in copy))
        self.groups: dict[tuple[int, ...], Any] = {
            all_ranks: dist.group.WORLD,
            **({} if known is None else known.groups),
        }
        self.back: dict[tuple[int, ...], Any] = {} if known is None else dict(known.back)
        within = [ranks for names in (*axes, mesh.names) for ranks in mesh.groups(names)]
        for group in (*([copy[rank] for rank in ranks] for copy in copies for ranks in within), *also):
            members = tuple(sorted(group))
            if len(members) > 1 and members not in self.groups:
                options = high_priority(dist.get_backend(), timeout)
                self.groups[members] = dist.new_group(list(members), timeout=timeout, pg_options=options)
        for group in back:
            members = tuple(sorted(group))
            if len(members) > 1 and members not in self.back:
                options = high_priority(dist.get_backend(), timeout)
                self.back[members] = dist.new_group(list(members), timeout=timeout, pg_options=options)
        self._late: dict[tuple[int, ...], Any] = {}
        for group in (
            [copy[rank] for rank in ranks] for copy in copies for axes in twice for ranks in mesh.groups(axes)
        ):
            members = tuple(sorted(group))
            if len(members) > 1 and members not in self._late:
                self._late[members] = dist.new_group(list(members), timeout=timeout)
        self._members: dict[tuple[bool, tuple[str, ...]], Members] = {}

    def group(self, members: Sequence[int]) -> Any:
        """The process group of some of the job's ranks, created at the start; None for a single rank."""
        return self.groups[tuple(sorted(members))] if len(members) > 1 else None

    def all_reduce(self, x: torch.Tensor, op: str, axes: Sequence[str]) -> torch.Tensor:
        return self.begin(Exchange("all_reduce", x, tuple(axes), op))()

    def all_gather(self, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        return self.begin(Exchange("all_gather", x, tuple(axes)))()

    def reduce_scatter(self, x: torch.Tensor, op: str, axes: Sequence[str]) -> torch.Tensor:
        return self.begin(Exchange("reduce_scatter", x, tuple(axes), op))()

    def all_to_all(self, x: torch.Tensor, axes: Sequence[str]) -> torch.Tensor:
        return self.begin(Exchange("all_to_all", x, tuple(axes)))()

    def permute(self, x: torch.Tensor, axes: Sequence[str], source: Sequence[int]) -> torch.Tensor:
        return self.begin(Exchange("permute", x, tuple(axes), source=tuple(source)))()

    def all_to_all_uneven(self, x: torch.Tensor, axes: Sequence[str], sizes: Sizes) -> torch.Tensor:
        return self.begin(Exchange("all_to_all_uneven", x, tuple(axes), sizes=sizes))()

    def begin(self, exchange: Exchange) -> PendingResult:
        """Start an exchange. The returned function waits for it and returns its result.

        On GPUs the caller's stream waits, not the caller. Until then the operand and the result stay allocated.
        8-bit floats are moved as bytes: gloo does not know them.
        """
        dtype = exchange.x.dtype
        if dtype in FP8:
            assert exchange.kind not in ("all_reduce", "reduce_scatter"), "no sums are computed in 8 bits"
            arrived = self.begin(replace(exchange, x=exchange.x.contiguous().view(torch.uint8)))
            return lambda: arrived().view(dtype)
        members = self.members(exchange.axes, exchange.late)
        match exchange.kind:
            case "all_reduce":
                return self._all_reduce(exchange, members)
            case "all_gather":
                return self._all_gather(exchange, members)
            case "reduce_scatter":
                return self._reduce_scatter(exchange, members)
            case "all_to_all":
                return self._all_to_all(exchange, members)
            case "permute":
                return self._permute(exchange, members)
            case "all_to_all_uneven":
                return self._all_to_all_uneven(exchange, members)

    def _all_reduce(self, exchange: Exchange, members: Members) -> PendingResult:
        result = landing(exchange, members.count)
        if members.count == 1:
            return lambda: result
        work = dist.all_reduce(result, op=REDUCE_OPS[exchange.op], group=members.group, async_op=True)
        return _pending_result(work, lambda: result)

    def _all_gather(self, exchange: Exchange, members: Members) -> PendingResult:
        x = exchange.x
        if members.count == 1:
            return lambda: x.unsqueeze(0).clone(memory_format=torch.contiguous_format)
        rows, row = landing(exchange, members.count), x.contiguous().view(-1)
        if exchange.pos:
            arriving = _pieces(rows.movedim(0, exchange.pos), exchange.pos)
            work = all_gather_pieces(arriving, _pieces(row.view(x.shape), exchange.pos), members.group)
        else:
            work = all_gather_single(rows.view(-1), row, members.group, async_op=True)
        return _pending_result(work, lambda: members.to_ours(rows), row)

    def _reduce_scatter(self, exchange: Exchange, members: Members) -> PendingResult:
        x = exchange.x
        if members.count == 1:
            return lambda: x[0].clone(memory_format=torch.contiguous_format)
        row, op = landing(exchange, members.count), REDUCE_OPS[exchange.op]
        rows = members.to_theirs(x).movedim(0, exchange.pos).contiguous()
        if exchange.pos:
            work = reduce_scatter_pieces(_pieces(row, exchange.pos), _pieces(rows, exchange.pos), op, members.group)
        else:
            work = reduce_scatter_single(row.view(-1), rows.view(-1), op, members.group, async_op=True)
        return _pending_result(work, lambda: row, rows)

    def _all_to_all(self, exchange: Exchange, members: Members) -> PendingResult:
        x = exchange.x
        if members.count == 1:
            return lambda: x.clone(memory_format=torch.contiguous_format)
        received, rows = landing(exchange, members.count), members.to_theirs(x).contiguous()
        work = dist.all_to_all_single(received, rows, group=members.group, async_op=True)
        return _pending_result(work, lambda: members.to_ours(received), rows)

    def _all_to_all_uneven(self, exchange: Exchange, members: Members) -> PendingResult:
        x, (sent, received) = exchange.x, exchange.sizes
        if members.count == 1:
            return lambda: x.clone(memory_format=torch.contiguous_format)
        arriving = landing(exchange, members.count)
        rows, sent = members.parts_to_theirs(x, sent)
        lengths = members.in_theirs(received)
        work = dist.all_to_all_single(
            arriving, rows.contiguous(), list(lengths), list(sent), group=members.group, async_op=True
        )
        return _pending_result(work, lambda: members.parts_to_ours(arriving, lengths), rows)

    def _permute(self, exchange: Exchange, members: Members) -> PendingResult:
        x, source = exchange.x.contiguous(), exchange.source
        received = landing(exchange, members.count)
        position = members.ranks.index(self._job[self.rank])
        if source[position] == position:
            received.copy_(x)
        transfers = [
            dist.P2POp(dist.isend, x, members.ranks[target], group=members.group)
            for target, origin in enumerate(source)
            if origin == position and target != position
        ]
        if source[position] != position:
            transfers.append(dist.P2POp(dist.irecv, received, members.ranks[source[position]], group=members.group))
        works = dist.batch_isend_irecv(transfers) if transfers else []

        def arrived(_held: torch.Tensor = x) -> torch.Tensor:
            for work in works:
                work.wait()
            return received

        return arrived

    def members(self, axes: Sequence[str], late: bool = False) -> Members:
        """This rank's group along some axes; `late`: that of sums of gradients, where there is one."""
        key = late, tuple(axes)
        members = self._members.get(key)
        if members is None:
            ranks = [self._job[rank] for rank in self.mesh.group_of(self.rank, key[1])]
            other = self._late.get(tuple(sorted(ranks))) if late else None
            members = self._members[key] = Members(ranks, self.group(ranks) if other is None else other)
        return members


def _pieces(x: torch.Tensor, dims: int) -> list[torch.Tensor]:
    """What lies behind the first dims of a contiguous tensor, as flat pieces."""
    return list(x.view(math.prod(x.shape[:dims]), -1).unbind(0))


def _pending_result(work: Any, result: PendingResult, *operands: torch.Tensor) -> PendingResult:
    """A function that waits and returns the result. It keeps `operands` alive, which are read until then."""

    def arrived(_held: tuple[torch.Tensor, ...] = operands) -> torch.Tensor:
        work.wait()
        return result()

    return arrived


class Members:
    """One group: the job's ranks in shardc's order, torch's handle, and the row permutations between the two orders."""

    def __init__(self, ranks: Sequence[int], group: Any) -> None:
        self.ranks, self.group, self.count = tuple(ranks), group, len(ranks)
        theirs = sorted(ranks)
        self._ours = None if theirs == list(ranks) else [theirs.index(rank) for rank in ranks]
        self._theirs = None if self._ours is None else [self.ranks.index(rank) for rank in theirs]
        self.in_order = self._ours is None  # torch's order is ours

    def to_ours(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._ours is None else rows[self._ours]

    def to_theirs(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._theirs is None else rows[self._theirs]

    def in_theirs(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return lengths if self._theirs is None else tuple(lengths[i] for i in self._theirs)

    def parts_to_theirs(self, rows: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Parts of these lengths, one for each member, and their lengths, in torch's order."""
        if self._theirs is None:
            return rows, lengths
        parts = rows.split(list(lengths))
        return torch.cat([parts[i] for i in self._theirs]), self.in_theirs(lengths)

    def parts_to_ours(self, rows: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
        """The parts of these lengths in torch's order, in ours."""
        if self._ours is None:
            return rows
        parts = rows.split(list(lengths))
        return torch.cat([parts[i] for i in self._ours])
