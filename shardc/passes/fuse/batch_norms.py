"""The moments of a batch norm's channels in one reading: its mean, and its squared distances from the mean.

    %s = sum(%x, [0, 2, 3])               ->   %means, %squares = group_moments(%x)     a row is a sample's channel
    %c = div(%s, n)                            %s = channel_totals(%means, size)
    %v = sum(square(%x - %c), [0, 2, 3])       %c = div(%s, n)
                                               %v = channel_squares(%means, %squares, %c, size)

Two sums one after the other read x twice, and the norm itself a third time. A row is held in registers, so that its
moments are exact and read it once; what follows are a few numbers, of which one kernel makes everything up to the
running statistics. Where the batch is sharded the mean is that of all ranks: a collective lies between, as before.
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
from shardc.passes.fuse.clusters import LONG
from shardc.passes.fuse.group_norms import Splitting
from shardc.passes.fuse.units import Inner, Make, Operand, lower

aten = torch.ops.aten
SUM = aten.sum.dim_IntList


def join_moments(graph: Graph, exclude: Collection[str] = ()) -> None:
    """Rewrite them, in place, where kernels can walk x's memory."""
    splitting: Splitting | None = None
    place = {node: at for at, node in enumerate(graph.calls())}
    for node in place:
        if node.target is not SUM or op_name(node.target) in exclude or info(node).name in exclude:
            continue
        found = _about(node)
        total = None if found is None else _total(found[0], node, place)
        if found is None or total is None or info(total).name in exclude:
            continue
        splitting = splitting or Splitting(graph)
        x, centre = found
        shape = type_of(x).local_shape(graph.mesh)
        if splitting.lies_well(x) and 1 < math.prod(shape[2:]) <= LONG:
            _join(splitting, x, centre, total, node, math.prod(shape[2:]))


def _join(splitting: Splitting, x: fx.Node, centre: fx.Node, total: fx.Node, squared: fx.Node, size: int) -> None:
    graph, channel = splitting.graph, TensorType(torch.float32, type_of(x).dims[:2])
    with graph.fx.inserting_before(total):
        means, squares = splitting.pair(GROUP_MOMENTS, x, like=total, types=[channel, channel])
        whole = splitting.put(CHANNEL_TOTALS, means, size, len(type_of(x).shape), like=total, type=type_of(total))
    with graph.fx.inserting_before(squared):
        about = splitting.put(CHANNEL_SQUARES, means, squares, centre, size, like=squared, type=type_of(squared))
    for old, new in ((total, whole), (squared, about)):
        splitting.takes(old, new)
        graph.fx.erase_node(old)


def _sums_channels(node: fx.Node) -> bool:
    """A sum over all dims but the channels', which are kept: of float32."""
    if node.target is not SUM or not isinstance(node.args[0], fx.Node) or type_of(node).dtype != torch.float32:
        return False
    ndim = len(type_of(node.args[0]).shape)
    dims, keep = node.args[1], node.args[2] if len(node.args) > 2 else node.kwargs.get("keepdim", False)
    others = [d for d in range(ndim) if d != 1]
    return bool(keep) and ndim > 2 and isinstance(dims, (list, tuple)) and sorted(d % ndim for d in dims) == others  # type: ignore[operator]


def _about(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """x and c of `sum((x - c)^2)`."""
    if not _sums_channels(node):
        return None
    square = node.args[0]
    assert isinstance(square, fx.Node)
    twice = square.target is aten.mul.Tensor and square.args[0] is square.args[1]
    off = square.args[0] if twice or square.target is aten.square.default else None
    if not isinstance(off, fx.Node) or off.target is not aten.sub.Tensor or off.kwargs or len(off.args) != 2:
        return None
    x, centre = off.args[0], off.args[1]
    if not isinstance(x, fx.Node) or not isinstance(centre, fx.Node):
        return None
    kept = type_of(node).dims
    fits = type_of(x).dims == type_of(off).dims and type_of(centre).dims == kept and type_of(x).dtype == torch.float32
    return (x, centre) if fits and type_of(centre).dtype == torch.float32 else None


def _total(x: fx.Node, squared: fx.Node, place: Mapping[fx.Node, int]) -> fx.Node | None:
    """The sum of x over the same dims, which is there before."""
    for user in x.users:
        alike = _sums_channels(user) and user.args[0] is x and type_of(user).dims == type_of(squared).dims
        if alike and place.get(user, len(place)) < place[squared]:
            return user
    return None


# ---------------------------------------------------------------------- as kernels: a row is a channel of all samples
def _rows(m: Make, *parts: Operand) -> list[Operand]:
    batch, channels = m.shape_of(parts[0])
    m.shape = (channels, batch)
    return [m("same", m.ordered(one, (1, 0))) for one in parts]


def _over_batch(m: Make, value: Operand) -> Operand:
    rows = (m.shape[0], 1)
    return m.reduce("rsum", value, "row", rows, m.shape[1]) if m.shape[1] > 1 else value


@lower(CHANNEL_TOTALS)
def channel_totals(m: Make, means: Operand, size: int, dims: int) -> Inner:
    (own,) = _rows(m, means)
    return m("mul", _over_batch(m, own), float(size), shape=(m.shape[0], 1))


@lower(CHANNEL_SQUARES)
def channel_squares(m: Make, means: Operand, squares: Operand, centre: Operand, size: int) -> Operand:
    own, about = _rows(m, means, squares)
    apart = m("sub", own, m.spread_over(centre, (m.shape[0], 1), m.shape))
    return _over_batch(m, m.add(about, m.mul(m("square", apart), float(size))))
