"""Which new parameters and optimizer state may be written over the old ones: their memory is then held once.

    %w.new = add.Tensor(%w.decayed, %step)         add.out(%w.decayed, %step, out=%w)
    return param "w" = %w.new

    %m.out = begin_offload(%m.new)                 begin_offload_into(%m.new, out=%m)
    %m.host = end_offload(%m.out, %m.new)          %m.host is %m, which lies on the host
    return state "m" = %m.host

An output of role "param" or "state" may be, if nothing reads the input of its name any more once it is made, and so
may the cache of keys and values that generation keeps. The graph itself stays a function of its inputs: that is for
whoever runs it with state of its own, which the simulator does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import fx
from torch._ops import OpOverload

from kernels_triton.base.inplace import INTO
from shardc.ir.collectives import KINDS
from shardc.ir.graph import Graph, Port, op_name, operands, producer, results, type_of
from shardc.ir.microbatch import CACHE, Sections, sections
from shardc.ir.ops.host_copies import BEGIN_OFFLOAD_INTO, END_OFFLOAD
from shardc.ir.schema import schema_of
from shardc.ir.storages import Storage, storages


@dataclass(frozen=True)
class Write:
    """An output's value takes the place of an input. `op` makes it there; without one, it is copied there when made."""

    value: fx.Node
    over: fx.Node
    op: OpOverload | None


def writes(body: Graph, of: dict[fx.Node, Storage] | None = None, run: Sections | None = None) -> list[Write]:
    """The writes that may be in place. A collective reads its operand until its result is read. `of` and `run` are the
    storages and when calls run, where the caller knows them."""
    if not any(map(_written_over, body.outputs)):
        return []
    of = storages(body) if of is None else of
    run = run or sections(body)
    calls = run.in_order(body)
    index_of = {node: i for i, node in enumerate(calls)}
    last = last_reads(calls, index_of, of)
    twins = body.input_nodes()
    ends = Counter(of[value] for value in body.output_values)
    allowed: list[Write] = []
    for port, value in zip(body.outputs, body.output_values, strict=True):
        if not _written_over(port) or port.name not in twins or value.op == "placeholder":
            continue
        result = operands(value)[0] if value.target is END_OFFLOAD else value
        over, call = twins[port.name], producer(result)[0]
        same_layout = type_of(over).dims == type_of(value).dims and type_of(over).dtype == type_of(value).dtype
        once = ends[of[value]] == 1 and of[over] not in ends
        repeated = body.microbatches > 1 and call in run.microbatch
        if (
            same_layout
            and once
            and not repeated
            and of[result].value is result
            and last.get(of[over], -1) <= index_of[call]
        ):
            # No operand is another view of the memory that is written over.
            no_other_view = all(v is over or of[v] is not of[over] for v in operands(call))
            if result is not value:
                allowed.append(Write(result, over, BEGIN_OFFLOAD_INTO))
            elif call.target in INTO:
                allowed.append(Write(value, over, call.target if _placed(call, value, over, of) else None))  # type: ignore[arg-type]
            else:
                allowed.append(Write(value, over, _into(call, over) if call is value and no_other_view else None))
    return allowed


def _written_over(port: Port) -> bool:
    return port.role in ("param", "state") or (port.role == "buffer" and port.name.startswith(CACHE))


def last_reads(
    calls: Sequence[fx.Node], index_of: dict[fx.Node, int], of: dict[fx.Node, Storage]
) -> dict[Storage, int]:
    """The last call that reads each storage."""
    last: dict[Storage, int] = {}
    for call in calls:
        until = index_of[call]
        if op_name(call.target) in KINDS:
            readers = [
                index_of[user]
                for value in results(call)
                if value is not None
                for user in value.users
                if user in index_of
            ]
            until = min(readers, default=len(calls))
        for value in operands(call):
            last[of[value]] = max(last.get(of[value], -1), until)
    return last


def _placed(call: fx.Node, value: fx.Node, over: fx.Node, of: dict[fx.Node, Storage]) -> bool:
    """Does a call read the memory that it overwrites only at the places that it writes, or not at all?"""
    aliased = [(i, v) for i, v in enumerate(operands(call)) if of[v] is of[over]]
    if not aliased:
        return INTO[call.target].anywhere
    pairs, result_index = INTO[call.target].pairs(*call.args), producer(value)[1]
    return all(v is over and (result_index, i) in pairs for i, v in aliased)


def _into(call: fx.Node, over: fx.Node) -> OpOverload | None:
    """The variant of an op that writes its result into the tensor `over`, which may be one of its operands: of a
    pointwise op any of them, of a copy of some rows the one that the rows are copied into."""
    if op_name(call.target) == "index_copy":
        return out_variant(call.target) if call.args[0] is over else None  # type: ignore[arg-type]
    shapes = {type_of(v).shape for v in operands(call)}
    pointwise = op_name(call.target) in POINTWISE and shapes <= {(), type_of(call).shape}
    return out_variant(call.target) if pointwise else None  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def out_variant(op: OpOverload) -> OpOverload | None:
    """The op that takes what this one takes, and a tensor to write its result into."""
    op_arguments = [(a.name, str(a.type)) for a in schema_of(op).arguments]
    packet = op._overloadpacket  # pyright: ignore[reportPrivateUsage]
    for name in packet.overloads():
        other: OpOverload = getattr(packet, name)
        arguments = [(a.name, str(a.type)) for a in schema_of(other).arguments]
        if arguments == [*op_arguments, ("out", "Tensor")]:
            return other
    return None


# Element by element, so that a result may be written where an operand was read.
POINTWISE = {"add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "lerp.Scalar", "where.self", "maximum", "sqrt"}
