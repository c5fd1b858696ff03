"""The moments of a batch norm's channels from one read of x: the mean, and the squared distances from it.

    %s = sum(%x, [0, 2, 3])               ->   %means, %squares = group_moments(%x)     a row is a sample's channel
    %c = div(%s, n)                            %s = channel_totals(%means, size)
    %v = sum(square(%x - %c), [0, 2, 3])       %c = div(%s, n)
                                               %v = channel_squares(%means, %squares, %c, size)

Two sums in sequence read x twice, and the norm itself reads it a third time. A row is held in registers, so that its
exact moments take one read. They are a few numbers, from which one kernel computes everything up to the running
statistics. Where the batch is sharded, the mean is that of all ranks: a collective stays between the two sums.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import fx

from shardc.ir.graph import Graph, info, op_name, type_of
from shardc.ir.ops.channel_sums import CHANNEL_SQUARES, CHANNEL_TOTALS
from shardc.ir.ops.group_norm import GROUP_MOMENTS
from shardc.ir.types import TensorType
from shardc.passes.fusion.clustering.cluster import LONG_ROW
from shardc.passes.fusion.lowering.group_norms import GroupNormSplitter
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, Operand, Temporary, lower

aten = torch.ops.aten
SUM = aten.sum.dim_IntList


def has_channel_moments(graph: Graph) -> bool:
    """Is there a sum of squared distances that `join_channel_moments` may rewrite?"""
    return any(node.target is SUM and _centred_operands(node) is not None for node in graph.calls())


def join_channel_moments(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Rewrite pairs of sums, in place, where kernels can read x's memory."""
    splitting: GroupNormSplitter | None = None
    position = {node: i for i, node in enumerate(graph.calls())}
    for node in position:
        if node.target is not SUM or op_name(node.target) in exclude or info(node).name in exclude:
            continue
        centred = _centred_operands(node)
        total = None if centred is None else _earlier_sum(centred[0], node, position)
        if centred is None or total is None or info(total).name in exclude:
            continue
        splitting = splitting or GroupNormSplitter(graph)
        x, centre = centred
        shape = type_of(x).local_shape(graph.mesh)
        if splitting.is_walkable(x) and 1 < math.prod(shape[2:]) <= LONG_ROW:
            _join(splitting, x, centre, total, node, math.prod(shape[2:]))


def _join(
    splitting: GroupNormSplitter, x: fx.Node, centre: fx.Node, total: fx.Node, squared: fx.Node, size: int
) -> None:
    graph, channel = splitting.graph, TensorType(torch.float32, type_of(x).dims[:2])
    with graph.fx.inserting_before(total):
        means, squares = splitting.call_with_results(GROUP_MOMENTS, x, like=total, types=[channel, channel])
        sums = splitting.call(CHANNEL_TOTALS, means, size, len(type_of(x).shape), like=total, type=type_of(total))
    with graph.fx.inserting_before(squared):
        squares_about = splitting.call(
            CHANNEL_SQUARES, means, squares, centre, size, like=squared, type=type_of(squared)
        )
    for old, new in ((total, sums), (squared, squares_about)):
        splitting.replace_value(old, new)
        graph.fx.erase_node(old)


def _sums_channels(node: fx.Node) -> bool:
    """Is it a float32 sum over all dims but the channels', with dims kept?"""
    if node.target is not SUM or not isinstance(node.args[0], fx.Node) or type_of(node).dtype != torch.float32:
        return False
    ndim = len(type_of(node.args[0]).shape)
    dims, keep = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    others = [d for d in range(ndim) if d != 1]
    return bool(keep) and ndim > 2 and isinstance(dims, (list, tuple)) and sorted(d % ndim for d in dims) == others  # type: ignore[operator]


def _centred_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """x and c of `sum((x - c)^2)`."""
    if not _sums_channels(node):
        return None
    square = node.args[0]
    assert isinstance(square, fx.Node)
    is_product = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    difference = square.args[0] if is_product or square.target is aten.square.default else None
    if (
        not isinstance(difference, fx.Node)
        or difference.target is not aten.sub.Tensor
        or difference.kwargs
        or len(difference.args) != 2
    ):
        return None
    x, centre = difference.args[0], difference.args[1]
    if not isinstance(x, fx.Node) or not isinstance(centre, fx.Node):
        return None
    sum_dims = type_of(node).dims
    fits = (
        type_of(x).dims == type_of(difference).dims
        and type_of(centre).dims == sum_dims
        and type_of(x).dtype == torch.float32
    )
    return (x, centre) if fits and type_of(centre).dtype == torch.float32 else None


def _earlier_sum(x: fx.Node, squared: fx.Node, position: Mapping[fx.Node, int]) -> fx.Node | None:
    """The sum of x over the same dims, if it is earlier."""
    for user in x.users:
        is_same_sum = _sums_channels(user) and user.args[0] is x and type_of(user).dims == type_of(squared).dims
        if is_same_sum and position.get(user, len(position)) < position[squared]:
            return user
    return None


# ---------------------------------------------------------------------- lowerings: a row is a channel of all samples
def _rows(m: LoweringBuilder, *parts: Operand) -> list[Operand]:
    batch, channels = m.shape_of(parts[0])
    m.shape = (channels, batch)
    return [m("same", m.permuted(part, (1, 0))) for part in parts]


def _over_batch(m: LoweringBuilder, value: Operand) -> Operand:
    rows = (m.shape[0], 1)
    return m.reduce("rsum", value, "row", rows, m.shape[1]) if m.shape[1] > 1 else value


@lower(CHANNEL_TOTALS)
def channel_totals(m: LoweringBuilder, means: Operand, size: int, dims: int) -> Temporary:
    (rows,) = _rows(m, means)
    return m("mul", _over_batch(m, rows), float(size), shape=(m.shape[0], 1))


@lower(CHANNEL_SQUARES)
def channel_squares(m: LoweringBuilder, means: Operand, squares: Operand, centre: Operand, size: int) -> Operand:
    mean_rows, square_rows = _rows(m, means, squares)
    distance = m("sub", mean_rows, m.broadcast(centre, (m.shape[0], 1), m.shape))
    return _over_batch(m, m.add(square_rows, m.mul(m("square", distance), float(size))))
