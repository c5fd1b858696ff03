"""Which results of kernels lie where an operand lay that nothing reads any more.

    %logits = linear(%x, %w)                                        bf16[8192, 128256], 2 GiB
    %total, %picked, %d.logits = cross_entropy([%logits, ...])      %d.logits is %logits' memory
    %d.x = linear_dgrad(%d.logits, %w)

What a program holds at most is often held where the loss is computed. A kernel that reads each element before it writes
the element's place says which of its results may lie so (`kernels_triton.base.inplace.OVER_DEAD`). The graph stays a
function of its inputs: a simulation gives each result memory of its own.

This is derived from the graph whenever it is asked for. So a pass may move calls, or add readers: the result then has
memory of its own again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx

from kernels_triton.base.inplace import INTO, OVER_DEAD
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, op_name, operands, producer, type_of
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops.buckets import PACK
from shardc.ir.ops.host_copies import HOST_COPIES
from shardc.ir.ops.linear import LINEAR, LINEAR_BIAS, LINEAR_DGRAD

PRODUCTS = (LINEAR, LINEAR_BIAS, LINEAR_DGRAD)


class Memory(Protocol):
    """A storage (`ir.storages`): the value that it was made for, and its bytes."""

    value: fx.Node
    bytes: int


def over_dead_operands(
    body: Graph, of: Mapping[fx.Node, Memory], lies: Mapping[fx.Node, object]
) -> dict[fx.Node, fx.Node]:
    """The results of a localized body that take an operand's memory, each with that operand. `of` and `lies` are the
    storages and layouts of the values, each result having memory of its own."""
    calls = [call for call in body.calls() if id(call.target) in OVER_DEAD]
    if not calls:
        return {}
    index_of = {call: index for index, call in enumerate(body.calls())}
    repeated = None if body.microbatches == 1 else in_microbatch(body)
    returned = {of[value] for value in body.output_values}
    over: dict[fx.Node, fx.Node] = {}
    for call in calls:
        read = operands(call)
        values = {int(user.args[1]): user for user in call.users}  # type: ignore[arg-type]
        for number, position in OVER_DEAD[id(call.target)](*call.args):
            operand, value = read[position], values.get(number)
            if value is None:
                continue
            source, result = of[operand], of[value]
            maker = producer(source.value)[0]
            readers = {user for view, storage in of.items() if storage is source for user in view.users}
            sent = any(_is_sent(user) for user in (*readers, *value.users))
            alike = type_of(operand).dtype == type_of(value).dtype and lies[operand] is lies[value]
            whole = source.bytes == result.bytes == type_of(value).local_bytes(body.mesh)
            once = sum(of[other] is source for other in read) == 1
            last = all(index_of.get(user, 0) <= index_of[call] for user in readers)
            together = repeated is None or {maker, call} <= repeated
            kept = {source, result} & returned
            if alike and whole and once and last and together and not sent and not kept and _makes_memory(maker):
                over[value] = operand
    return over


def _is_sent(user: fx.Node) -> bool:
    """Does a call read memory beside the calls behind it: a collective, a bucket of one, a copy to the host?"""
    return op_name(user.target) in KINDS or user.target is PACK or user.target in HOST_COPIES


def _makes_memory(call: fx.Node) -> bool:
    """Does a call make contiguous memory that is its result's alone?"""
    is_kernel = call.target in INTO and INTO[call.target].prepare is not None
    return call.op == "call_function" and (is_kernel or call.target in PRODUCTS)
