"""Padding that kernels apply as they run: an op of its own would read and write the whole value.

    mask_pad(x, fill)              ->      where(column < size - r * local, x, fill)
    constant_pad_nd(x, [0, 7])     ->      x is stored in rows that are 7 elements longer, with zeros there

Of a dim that one axis shards unevenly, rank r holds the elements r * local, r * local + 1, ...; those from `size` on
are padding. Nested shardings and parts of a dim stay as they are. A kernel that computes rows extends them to the end
of their last 16 bytes, as the `align` pass requires: no other call then reads them only to pad them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import fx

from kernels_triton.ir.row_padding import UNIT, padded_columns
from shardc.ir.graph import Graph, info, set_info, type_of
from shardc.ir.ops import local
from shardc.ir.types import TensorType
from shardc.passes.fusion.lowering.lowered_op import LoweringBuilder, NotLowerable, Operand, lower

aten = torch.ops.aten
PAD = aten.constant_pad_nd.default


def has_padding(targets: Counter[int]) -> bool:
    """Is there a mask, or are there pads that may be equal, for `lower_padding` to rewrite? `targets` counts the ids of
    the ops of a graph's calls."""
    return id(local.mask_pad) in targets or targets[id(PAD)] > 1


def lower_padding(graph: Graph) -> None:
    """Rewrite masks as selects, in place, where possible. Later readers of x read the result, whose padding is
    zero, instead."""
    position = {node: i for i, node in enumerate(graph.fx.nodes)}
    shared_calls: dict[object, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target is not local.mask_pad or (dim := _masked_dim(node)) is None:
            continue
        x, fill = node.args[0], node.args[-1]
        assert isinstance(x, fx.Node)
        if fill == 0:
            for user in [user for user in x.users if position[user] > position[node] and user.op == "call_function"]:
                user.replace_input_with(x, node)
        with graph.fx.inserting_before(node):
            _rewrite(graph, node, dim, shared_calls)
    _pad_once(graph)


def _pad_once(graph: Graph) -> None:
    """Merge equal pads: products that read one value with and without zeroed padding now read the same value."""
    first_pads: dict[object, fx.Node] = {}
    for node in list(graph.calls()):
        if node.target is PAD:
            first = first_pads.setdefault((info(node).phase, node.args, str(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.fx.erase_node(node)


def _masked_dim(node: fx.Node) -> int | None:
    """The masked dim of a float value, if it is one atom that one axis shards."""
    _, _, pos, _, axes, _ = node.args
    type, first_atom = type_of(node), 0
    if len(axes) != 1 or not type.dtype.is_floating_point:  # type: ignore[arg-type]
        return None
    for d, atoms in enumerate(type.dims[: type.ndim]):
        if first_atom <= pos < first_atom + len(atoms):  # type: ignore[operator]
            return d if len(atoms) == 1 else None
        first_atom += len(atoms)
    return None


def _rewrite(graph: Graph, node: fx.Node, dim: int, shared_calls: dict[object, fx.Node]) -> None:
    x, atoms, pos, size, axes, fill = node.args
    extent: int = atoms[pos]  # type: ignore[index]
    type, scalar = type_of(node), TensorType(torch.int64, ())
    split = type.dims[dim]
    shape = [extent if d == dim else 1 for d in range(type.ndim)]
    column = TensorType(torch.int64, tuple(split if d == dim else () for d in range(type.ndim)))

    def put(target: object, *args: object, type: TensorType, **kwargs: object) -> fx.Node:
        key = (info(node).phase, target, repr(args), type)  # not shared across phases, which would extend its lifetime
        if key not in shared_calls:
            shared_calls[key] = graph.call(target, args, kwargs, like=node, type=type)
        return shared_calls[key]

    first = put(local.axis_offset, axes, [extent], type=scalar)
    count = put(aten.rsub.Scalar, first, size, type=scalar)
    number = put(aten.arange.default, extent, type=TensorType(torch.int64, (split,)), dtype=torch.int64)
    number = put(aten.view.default, number, shape, type=column)
    is_real = put(aten.lt.Tensor, number, count, type=column.with_dtype(torch.bool))
    chosen = put(aten.where.ScalarOther, is_real, x, fill, type=type)
    about = info(node)
    node.replace_all_uses_with(chosen)
    graph.activations = {name: chosen if value is node else value for name, value in graph.activations.items()}
    graph.fx.erase_node(node)
    set_info(chosen, about)


@lower(PAD)
def rows_before_zeros(m: LoweringBuilder, x: Operand, pad: Sequence[int], value: float = 0) -> Operand:
    before, after = m.shape_of(x)[-1:], m.shape[-1:]
    if value or pad[0] or any(pad[2:]) or not before or not UNIT < before[0] < after[0] == padded_columns(before[0]):
        raise NotLowerable
    return m.pad_rows(x)
