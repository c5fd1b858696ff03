"""Collectives whose process group, options and shapes are looked up once per call site, before the first step.

    begin(x)        torch's process group is given the operand: no generator, no `Exchange`, no look-up, no checks
    arrived(under_way)    waits, and gives the result in its shape

Prepared are an all-reduce, an all-gather and a reduce-scatter of ranks that torch orders as shardc does, in one piece,
and only over process groups. All others run as `ir.ops.collectives` has them. Both give the same bits: what is sent,
and how it is cut and joined, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import operands, type_of
from shardc.ir.ops.collectives import (
    all_gather,
    all_reduce,
    chunks_of,
    joined_chunks,
    reduce_scatter,
    sent_at,
    without_gaps,
)
from shardc.ir.ops.scaled import FP8
from shardc.ir.schema import given
from shardc.runtime.execute.process_groups import REDUCE_OPS, ProcessGroupCommunicator
from shardc.torch_compat import all_gather_into, all_reduce_over, reduce_scatter_into

# torch's handle, where the result arrives, and what is kept until then: the operand, and as what it is sent.
UnderWay = tuple[Any, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class PreparedCollective:
    begin: Callable[[Tensor], UnderWay]
    arrived: Callable[[UnderWay], Tensor]


def prepare_collective(call: fx.Node, comm: object, late: bool, spent: bool) -> PreparedCollective | None:
    """A call's collective, if it can be prepared. `late`: it has the group of what nothing waits for; `spent`: nobody
    else reads its operand, and the result may be written over it."""
    if call.target not in (all_reduce, all_gather, reduce_scatter) or not isinstance(comm, ProcessGroupCommunicator):
        return None
    args = given(call)
    members = comm.members(args["axes"], late)
    dtype = type_of(operands(call)[0]).dtype
    if members.count == 1 or not members.in_order or dtype.is_complex or dtype in FP8:
        return None
    if call.target is all_reduce:
        return _all_reduce(members.group, args["op"], spent)
    atoms, pos, shape = list(args["atoms"]), args["pos"], list(args["shape"])
    if call.target is all_gather:
        in_pieces = atoms[pos] * members.count == args["size"] and sent_at(atoms, pos, dtype.itemsize)
        return None if in_pieces else _all_gather(members.group, members.count, atoms, pos, args["size"], shape)
    chunk = [*atoms[:pos], -(-atoms[pos] // members.count), *atoms[pos + 1 :]]
    if args.get("counts") or (chunk[pos] * members.count == atoms[pos] and sent_at(chunk, pos, dtype.itemsize)):
        return None
    return _reduce_scatter(members.group, members.count, args["op"], atoms, pos, shape)


def _all_reduce(group: Any, op: str, spent: bool) -> PreparedCollective:
    reduce = all_reduce_over(group, REDUCE_OPS[op])

    def begin(x: Tensor) -> UnderWay:
        result = x.contiguous() if spent else x.clone(memory_format=torch.contiguous_format)
        return reduce(result), result, x, result

    return PreparedCollective(begin, _arrived)


def _all_gather(
    group: Any, count: int, atoms: Sequence[int], pos: int, size: int, shape: list[int]
) -> PreparedCollective:
    gather = all_gather_into(group)
    if pos == 0 and count * atoms[0] == size:  # the chunks lie one behind the other already
        # gloo cuts the result along dim 0: the operand must have the shape of such a part.
        rows = shape if shape and shape[0] % count == 0 else [size, *atoms[1:]]
        row = [rows[0] // count, *rows[1:]]

        def begin(x: Tensor) -> UnderWay:
            sent = x if x.is_contiguous() else without_gaps(x.reshape(atoms))
            result = x.new_empty(rows)
            return gather(result, sent.view(row)), result, x, sent

        return PreparedCollective(begin, _arrived if rows is shape else _shaped(shape))

    def begin_chunks(x: Tensor) -> UnderWay:
        sent = without_gaps(x.reshape(atoms))
        chunks = x.new_empty((count, *atoms))
        return gather(chunks.view(-1), sent.view(-1)), chunks, x, sent

    def joined(under_way: UnderWay) -> Tensor:
        under_way[0].wait()
        return joined_chunks(under_way[1], pos, size, shape)

    return PreparedCollective(begin_chunks, joined)


def _reduce_scatter(
    group: Any, count: int, op: str, atoms: Sequence[int], pos: int, shape: list[int]
) -> PreparedCollective:
    scatter, chunk = reduce_scatter_into(group, REDUCE_OPS[op]), -(-atoms[pos] // count)
    result_size = prod(shape)
    in_place = pos == 0 and chunk * count == atoms[0]  # rows for one rank lie one behind the other already

    def begin(x: Tensor) -> UnderWay:
        sent = x
        if not (in_place and x.is_contiguous()):
            sent = without_gaps(chunks_of(x.reshape(atoms), pos, count, chunk))
        result = x.new_empty(result_size)
        return scatter(result, sent.view(-1)), result, x, sent

    return PreparedCollective(begin, _shaped(shape))


def _arrived(under_way: UnderWay) -> Tensor:
    under_way[0].wait()
    return under_way[1]


def _shaped(shape: list[int]) -> Callable[[UnderWay], Tensor]:
    def arrived(under_way: UnderWay) -> Tensor:
        under_way[0].wait()
        return under_way[1].view(shape)

    return arrived
