"""The communication of a graph as a list: what moves, along which axes, how many bytes, and why.

`bytes_per_rank` is what one rank *sends* under a bandwidth-optimal algorithm in a group of k, for a payload of n bytes:

    all_reduce      2 (k-1)/k n    n: the tensor, the same on every rank
    all_gather        (k-1)/k n    n: the gathered tensor, padding included (a rank sends its shard k-1 times)
    reduce_scatter    (k-1)/k n    n: the tensor before, padded to k equal chunks
    all_to_all        (k-1)/k n    n: what a rank holds before, padded to k equal chunks
    permute                   n    n: what a rank holds, or of that the rows that a neighbour needs

Rows that go to their experts are an all_to_all of the rows of a rank's tokens: so many are sent with even routing. By a
capacity it is one of as many rows as a rank has room for.

Bytes are rounded up to whole ones. They are those of one run; in a step of several microbatches a collective may run
several `times`.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import fx

from shardc.ir.graph import Graph, Phase, info, op_name, operands, type_of
from shardc.ir.microbatch import in_microbatch
from shardc.ir.ops.buckets import UNPACK
from shardc.ir.ops.exchange import COMBINE_ROWS, DISPATCH_ROWS, EXCHANGE_COUNTS
from shardc.ir.ops.halo import NEIGHBOUR_ROWS
from shardc.ir.schema import given
from shardc.ir.types import Axes

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]
KINDS: dict[str, CollectiveKind] = {
    "shardc.all_reduce": "all_reduce",
    "shardc.all_gather": "all_gather",
    "shardc.gather_blocks": "all_gather",
    "shardc.reduce_scatter": "reduce_scatter",
    "shardc.all_to_all": "all_to_all",
    "shardc.permute_ranks": "permute",
    "shardc.neighbour_rows": "permute",
    "shardc.mirror_rows": "permute",
    "shardc.next_keys": "permute",
    "shardc.merge_lse": "all_gather",
    "shardc.merge_parts": "all_gather",
    "shardc.exchange_counts": "all_to_all",
    "shardc.dispatch_rows": "all_to_all",
    "shardc.combine_rows": "all_to_all",
    "shardc.gather_linear": "all_gather",
    "shardc.linear_scatter": "reduce_scatter",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of a lowered graph."""

    kind: CollectiveKind
    axes: Axes  # as the user named them: sub-axes merged
    op: str  # "sum", "max" or "min" of a reduction, else ""
    bytes_per_rank: int  # sent by one rank
    phase: Phase
    value: str  # the name of its result
    cause: str
    payload_bytes: int  # n in the table above
    source: str
    group_size: int
    times: int = 1  # that it runs in a step: once, or once a microbatch
    fqn: str = ""  # the module that it comes from

    def __repr__(self) -> str:
        op, times = f" ({self.op})" if self.op else "", f" x{self.times}" if self.times > 1 else ""
        sent = f"{human_bytes(self.bytes_per_rank)}{times}"
        return f"Collective(%{self.value}: {self.kind}{op} over {'.'.join(self.axes)}, {self.phase}, {sent})"

    @property
    def bytes_per_step(self) -> int:
        """Sent by one rank in a step."""
        return self.bytes_per_rank * self.times


def collectives(graph: Graph) -> list[Collective]:
    """Every collective, in program order."""
    microbatch_nodes = in_microbatch(graph)
    pairs = [(node, collective(graph, node)) for node in graph.calls()]
    return [
        replace(transfer, times=graph.microbatches if node in microbatch_nodes else 1)
        for node, transfer in pairs
        if transfer is not None
    ]


class Moved(NamedTuple):
    """Of a collective what its call alone says: as `Collective` has it, with the size of its group."""

    kind: CollectiveKind
    axes: Axes
    op: str
    payload: int
    group: int


def what_moves(graph: Graph) -> list[tuple[Moved, int]]:
    """Of every collective, in program order, what it moves, and how often it runs."""
    microbatch_nodes = in_microbatch(graph)
    pairs = [(node, _moved(graph, node)) for node in graph.calls()]
    return [(m, graph.microbatches if node in microbatch_nodes else 1) for node, m in pairs if m is not None]


def collective(graph: Graph, node: fx.Node) -> Collective | None:
    """What a call communicates; None when it is no collective."""
    moved = _moved(graph, node)
    if moved is None:
        return None
    about = info(node)
    return Collective(
        moved.kind,
        moved.axes,
        moved.op,
        sent(moved.kind, moved.payload, moved.group),
        about.phase,
        about.name,
        str(about.cause),
        moved.payload,
        about.source,
        moved.group,
        fqn=about.fqn,
    )


def _moved(graph: Graph, node: fx.Node) -> Moved | None:
    kind = KINDS.get(op_name(node.target))
    if kind is None:
        return None
    args = given(node)
    axes: Axes = tuple(args["axes"])
    group = graph.mesh.size(axes)
    return Moved(kind, graph.mesh.merged(axes), args.get("op", ""), _payload(graph, kind, args, node, group), group)


def sent(kind: CollectiveKind, payload: int, group: int) -> int:
    """What one rank of a group sends for a payload: the table above, exactly."""
    shares = {"all_reduce": 2 * (group - 1), "permute": group}.get(kind, group - 1)
    return -(-shares * payload // group)


def bucket_of(value: fx.Node) -> fx.Node | None:
    """The collective that a value travelled in together with others; None if it did not."""
    if value.target is not operator.getitem:
        return None
    unpack = value.args[0]
    assert isinstance(unpack, fx.Node)
    moved = operands(unpack)[0] if unpack.target is UNPACK else None
    return moved if moved is not None and op_name(moved.target) in KINDS else None


def members(moved: fx.Node) -> dict[int, fx.Node]:
    """The values that travel in a bucket, as they are after it, by their places in it; none of another collective."""
    backs = [user for user in moved.users if user.target is UNPACK]
    values = {int(value.args[1]): value for unpack in backs for value in unpack.users}  # type: ignore[arg-type]
    return dict(sorted(values.items()))


def member(graph: Graph, value: fx.Node) -> Collective:
    """The part of a bucket's collective that one of its values accounts for."""
    moved = bucket_of(value)
    assert moved is not None, f"{info(value).name} is in no bucket"
    bucket, about = collective(graph, moved), info(value)
    assert bucket is not None
    size = type_of(value).local_bytes(graph.mesh)
    if bucket.kind == "all_gather":
        index = next(i for i, other in members(moved).items() if other is value)
        size = type_of(operands(operands(moved)[0])[index]).local_bytes(graph.mesh) * bucket.group_size
    elif bucket.kind == "reduce_scatter":
        size *= bucket.group_size
    part_sent = sent(bucket.kind, size, bucket.group_size)
    part = replace(bucket, value=about.name, cause=str(about.cause), source=about.source, fqn=about.fqn)
    return replace(part, bytes_per_rank=part_sent, payload_bytes=size)


def _payload(graph: Graph, kind: CollectiveKind, args: dict[str, Any], node: fx.Node, group: int) -> int:
    """n in bytes. The side whose chunks are even by construction is the one that tells it exactly."""
    about = info(node)
    result_type = about.results[0] if about.type is None else about.type  # of `linear_scatter`, a rank's rows
    assert result_type is not None
    operand_bytes, result_bytes = type_of(args["x"]).local_bytes(graph.mesh), result_type.local_bytes(graph.mesh)
    if kind == "all_gather":
        return operand_bytes * group
    if kind == "reduce_scatter":
        return result_bytes * group
    if args.get("capacity"):  # as many rows as there is room for at the experts, filled or not
        return max(operand_bytes, result_bytes)
    if node.target in (EXCHANGE_COUNTS, COMBINE_ROWS, NEIGHBOUR_ROWS):
        return result_bytes
    if kind == "all_to_all" and node.target is not DISPATCH_ROWS:
        split_size: int = args["atoms"][args["split"]]
        return operand_bytes // split_size * (-(-split_size // group) * group) if split_size else 0
    return operand_bytes


def human_bytes(count: float) -> str:
    """`32 KiB`, `1.5 MiB`, `12 B`."""
    size, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.1f}".removesuffix(".0") + f" {unit}"
