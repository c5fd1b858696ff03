"""What a collective holds for itself while it is under way, beside its operand and its result.

    %r = reduce_scatter(%g)      begin: a copy of %g in rows, one for each rank, where they do not lie so in %g
                                 begin: the memory that this rank's row arrives in, which becomes %r
    %w = all_gather(%s)          wait: where the chunks have to be put in order, %w is a copy of what arrived

Its own code says so, run up to the meeting and on from there, without data.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from shardc.ir.buckets import reduced_in_place
from shardc.ir.graph import Graph, type_of
from shardc.ir.liveness import Life
from shardc.ir.mesh import Mesh
from shardc.ir.ops.collectives import COLLECTIVES, all_reduce, all_reduce_over, landing
from shardc.ir.ops.context import Communicator, RankContext, running
from shardc.ir.ops.exchange import COMBINE_ROWS, ROW_MOVES
from shardc.ir.overlap_schedule import Times
from shardc.ir.schema import given
from shardc.ir.storages import META, Operand, Storage, frozen, operand_layouts


class Buffers(NamedTuple):
    """Bytes from begin to wait. `is_result`: what arrives is the result, and no copy of it."""

    packed: int
    arriving: int
    is_result: bool


def buffers_of(body: Graph, times: Times, calls: Sequence[fx.Node], lives: Sequence[Life]) -> list[Life]:
    """The lives of the buffers of collectives. A result that lies in its buffer is born with it."""
    layouts = operand_layouts(body)
    life_of = {life.storage.value: life for life in lives}
    buffer_lives: list[Life] = []
    for index, call in enumerate(calls):
        begun, arrived = times.begun[index], times.arrived[index]
        if call.target not in COLLECTIVES or begun == arrived:
            continue
        args = tuple([frozen(arg, layouts) for arg in given(call).values()])
        exact = call.target in ROW_MOVES and not given(call).get("capacity")
        buffers = _bound(body, call) if exact else _buffers(call.target, args, body.mesh, reduced_in_place(call))
        if buffers.is_result and call in life_of:
            life_of[call].born = begun
        for size in (buffers.packed, 0 if buffers.is_result else buffers.arriving):
            if size:
                storage = Storage(call, size)
                buffer_lives.append(Life(storage, begun, arrived, "fwd", "fwd", False, True, in_flight=True))
    return buffer_lives


def _bound(body: Graph, call: fx.Node) -> Buffers:
    """Of rows whose numbers a step knows alone: all that may be sent, and all that may come."""
    args, mesh = given(call), body.mesh
    members = mesh.group_of(0, args["axes"])
    packed = call.target is COMBINE_ROWS or list(members) != sorted(members)  # `dispatch_rows` sends from the front
    held = type_of(args["x"]).local_bytes(mesh)
    return Buffers(held if packed else 0, type_of(call).local_bytes(mesh), False)


def copied_bytes(body: Graph, call: fx.Node, layouts: dict[fx.Node, Operand]) -> tuple[int, int]:
    """What a rank copies for a collective before it begins, and after it has been waited for, in bytes."""
    args = tuple([frozen(arg, layouts) for arg in given(call).values()])
    result = type_of(call).local_bytes(body.mesh)
    if call.target in ROW_MOVES and not given(call).get("capacity"):
        return _bound(body, call).packed, 0
    spent = reduced_in_place(call)
    buffers = _buffers(call.target, args, body.mesh, spent)
    # The operand of an all_reduce is copied to where its result arrives, unless it is written over.
    before = buffers.packed + (buffers.arriving if call.target is all_reduce and not spent else 0)
    return before, 0 if buffers.is_result else result


class _Nobody:
    """A group that nothing is sent to."""

    def __getattr__(self, kind: str) -> Any:
        raise AssertionError(f"{kind}: a layout is asked for, and nothing is sent")


@lru_cache(maxsize=65536)
@torch.no_grad()
def _buffers(target: Any, args: tuple[Any, ...], mesh: Mesh, spent: bool) -> Buffers:
    x, *other_args = [_thawed(arg) for arg in args]
    steps = (all_reduce_over if spent else COLLECTIVES[target])(x, *other_args)
    with running(RankContext(mesh, {}, cast(Communicator, _Nobody()))):
        exchange = next(steps)
        members = mesh.group_of(0, exchange.axes)
        send_storage = exchange.x.untyped_storage()
        packed = 0 if send_storage is x.untyped_storage() else send_storage.nbytes()
        if len(members) == 1 and exchange.kind not in ("all_reduce", "permute"):
            return Buffers(packed, 0, False)
        reordered = list(members) != sorted(members)  # torch's order of the group is another
        if reordered and exchange.kind in ("reduce_scatter", "all_to_all"):
            packed += send_storage.nbytes()
        arriving = landing(exchange, len(members))
        chunks = arriving.clone() if reordered and exchange.kind in ("all_gather", "all_to_all") else arriving
        try:
            steps.send(chunks)
        except StopIteration as done:
            result: torch.Tensor = done.value
        else:
            raise AssertionError("a collective meets its group once")
    home = arriving.untyped_storage()
    return Buffers(packed, 0 if home is send_storage else home.nbytes(), result.untyped_storage() is home)


def _thawed(arg: Any) -> Any:
    if isinstance(arg, Operand):
        return torch.empty_strided(arg.shape, arg.strides, dtype=arg.dtype, device=META)
    return [_thawed(item) for item in cast("Sequence[Any]", arg)] if isinstance(arg, tuple) else arg
