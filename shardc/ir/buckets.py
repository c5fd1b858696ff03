"""Which members of a bucket are made in its flat tensor, instead of being copied there.

    %w.grad = linear_wgrad(%g, %x)                mm(g.t(), x, out=flat[0:n])
    %flat = pack([%w.grad, %b.grad])       ->     nothing left to copy

The flat tensor is then there from its first such member on. A member may be made there if nothing but `pack` reads it,
it lies there in one piece, and its op can write into a tensor that it is given. The graph itself stays a function of
its inputs: that is for whoever runs it.

An all-reduce of a flat tensor writes its result over it: nothing else reads that. So may a sum over microbatches of
flat tensors: the first microbatch's becomes the sum (`runtime/execute/body_code.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from kernels_triton.base.buckets import starts
from kernels_triton.base.inplace import INTO, Into
from shardc.ir.graph import Graph, op_name, operands, producer, type_of
from shardc.ir.in_place import POINTWISE, out_variant
from shardc.ir.microbatch import Sections, sections
from shardc.ir.ops.accumulate import (
    ACCUMULATE,
    ACCUMULATE_MORE_ROWS,
    ACCUMULATE_ROWS,
    ACCUMULATE_WGRAD,
    SUMS,
    write_row_sums,
    write_wgrad,
)
from shardc.ir.ops.buckets import PACK, UNPACK, columns_packed, unpack
from shardc.ir.ops.collectives import all_reduce
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, LINEAR_DGRAD, LINEAR_WGRAD, write_linear_bias
from shardc.ir.schema import given
from shardc.ir.storages import Storage
from shardc.ir.sums import parts_of

aten = torch.ops.aten
MAKES = {*POINTWISE, "mm", "bmm", "addmm", "baddbmm", "mv", "sum.dim_IntList", "mul.Scalar", "neg"}  # with `out`


@dataclass(frozen=True)
class Layout:
    """A flat tensor of one row, and where each member begins in it."""

    pack: fx.Node
    starts: tuple[int, ...]  # and where the last one ends
    shapes: tuple[tuple[int, ...], ...]

    @property
    def padded(self) -> bool:
        return sum(math.prod(shape) for shape in self.shapes) < self.starts[-1]


@dataclass(frozen=True)
class Piece:
    """A member that is made in its place. `make(*args, out=..., **kwargs)` does so; None: its op is one of INTO."""

    layout: Layout
    at: int  # among the members
    make: Callable[..., Any] | None


def layout_of(body: Graph, pack: fx.Node) -> Layout | None:
    """How a flat tensor is laid out; None where members are cut into several rows."""
    args = given(pack)
    if args["rows"] > 1:
        return None
    shapes = tuple(type_of(x).local_shape(body.mesh) for x in args["xs"])
    columns = columns_packed([math.prod(shape) for shape in shapes], args["mids"], 1)
    return Layout(pack, tuple(starts(columns, args["unit"])), shapes)


def pieces(body: Graph, run: Sections | None = None) -> dict[fx.Node, Piece]:
    """The members that are allocated in their buckets. `run` says when calls run, where the caller knows it."""
    piece_of: dict[fx.Node, Piece] = {}
    packs = body.calls_of(PACK)
    if not packs:
        return piece_of
    early, _, once = run or sections(body)
    for pack in packs:
        if (layout := layout_of(body, pack)) is None:
            continue
        members = operands(pack)
        counts = Counter(members)
        for index, (value, lead) in enumerate(zip(members, given(pack)["leads"], strict=True)):
            call = producer(value)[0]
            # Each microbatch has a flat tensor of its own.
            if (call in early, call in once) != (pack in early, pack in once):
                continue
            if lead == 1 and value.op != "placeholder" and len(value.users) == 1 and counts[value] == 1:
                if call.target is ACCUMULATE_MORE_ROWS:  # the first call that makes it writes there, and others add
                    piece_of |= {part: Piece(layout, index, maker(part.target)) for part in parts_of(call)}  # type: ignore[arg-type]
                elif call.target in INTO:
                    if INTO[call.target].anywhere:
                        piece_of[value] = Piece(layout, index, None)
                elif (make := maker(call.target)) is not None:
                    piece_of[value] = Piece(layout, index, make)
    return piece_of


def is_summed(pack: fx.Node) -> bool:
    """Is a flat tensor a term of a sum over microbatches that is unpacked, and nothing else? What lies between its
    members is not read, and need not be zero."""
    readers = list(pack.users)
    return [call.target for call in readers] == [ACCUMULATE] and {call.target for call in readers[0].users} == {UNPACK}


def reduced_in_place(moved: fx.Node) -> bool:
    """Does an all-reduce write its result over its operand?"""
    if moved.target is not all_reduce:
        return False
    (flat,) = operands(moved)
    return flat.target is PACK and len(flat.users) == 1


def with_buckets(body: Graph, of: dict[fx.Node, Storage], run: Sections | None = None) -> dict[fx.Node, Storage]:
    """The storage of every value, with members that are allocated in their buckets, and reduced there. `run`: as in
    `pieces`."""
    placed = {value: of[piece.layout.pack] for value, piece in pieces(body, run).items()}
    over = {of[call]: of[operands(call)[0]] for call in body.calls_of(all_reduce) if reduced_in_place(call)}
    if not placed and not over:
        return of
    return {value: placed.get(value, over.get(storage, storage)) for value, storage in of.items()}


@lru_cache(maxsize=1024)
def maker(op: OpOverload) -> Callable[..., Any] | None:
    """How an op of one result writes it into a tensor."""
    if op in (ACCUMULATE, aten._to_copy.default, aten.clone.default):
        return _copied
    if op is LINEAR_WGRAD:
        return _wgrad
    if op is LINEAR_BIAS:
        return write_linear_bias
    if op is ACCUMULATE_WGRAD:
        return write_wgrad
    if op is ACCUMULATE_ROWS:
        return write_row_sums
    return out_variant(op) if op_name(op) in MAKES else None


def writes_out(call: fx.Node) -> bool:
    """Can a call of one result write it into a tensor that it is given, contiguous and of the result's type?"""
    if call.target in (LINEAR, LINEAR_DGRAD):
        return type_of(call).ndim > 1
    return call.target not in SUMS and isinstance(call.target, OpOverload) and maker(call.target) is not None


def _copied(x: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    """A cast, or a copy: `out` has the dtype that was asked for."""
    return out.copy_(x)


def _wgrad(g: Tensor, x: Tensor, *, out: Tensor) -> Tensor:
    return torch.mm(g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1]), out=out)


INTO[UNPACK] = Into(lambda *_: frozenset(), unpack, anywhere=True)
