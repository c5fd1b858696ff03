"""Rows picked by number, from a table whose rows may be sharded.

    embedding                 v d, ... -> ... d        sum="v"
    embedding_dense_backward  ... d, ... -> v d        sum="...", and so accumulate_rows

With `v` split, a rank looks up the rows it owns and yields zeros for the rest, so the shards add up; in backward
it drops the gradients of rows that it does not own. `owned` turns global row numbers into local ones.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import info, type_of
from shardc.ir.ops.accumulate import ACCUMULATE_MORE_ROWS, ACCUMULATE_ROWS
from shardc.ir.ops.check_index import check_index
from shardc.ir.types import Atom, Dim, TensorType
from shardc.rules.local import LocalCall
from shardc.rules.notation import Dims, Notation
from shardc.rules.registry import example, rule

aten = torch.ops.aten


# ------------------------------------------------------------------------------------------------ ownership
def owned(call: LocalCall, index: fx.Node, dim: Dim, known: bool = False) -> tuple[fx.Node, fx.Node]:
    """Of global positions in `dim`: the local positions (0 where another rank owns it), and whether this rank does.

    A dim of several atoms is a mixed-radix number: each digit is shifted by this rank's part of its atom. A position
    that no rank owns is an error, or, with `known`, has been one before.
    """
    type = type_of(index)
    if not known:
        index = call.emit(check_index, index, math.prod(atom.size for atom in dim), type=type)
    digits: list[tuple[fx.Node, int]] = []  # with their local extents
    conditions: list[fx.Node] = []
    for k, atom in enumerate(dim):
        digit = index
        below = math.prod(a.size for a in dim[k + 1 :])
        if below > 1:
            digit = call.emit(aten.div.Tensor_mode, digit, below, rounding_mode="floor", type=type)
        if k > 0:
            digit = call.emit(aten.remainder.Scalar, digit, atom.size, type=type)
        for axes, size in _levels(call, atom):
            shift = call.offset(axes)
            digit = call.emit(aten.sub.Tensor, digit, shift, type=type)
            low = call.emit(aten.ge.Scalar, digit, 0, type=type.with_dtype(torch.bool))
            high = call.emit(aten.lt.Scalar, digit, size, type=type.with_dtype(torch.bool))
            conditions += [low, high]
        digits.append((digit, atom.local(call.graph.mesh)))
    local = digits[0][0]
    for digit, size in digits[1:]:
        local = call.emit(aten.mul.Tensor, local, size, type=type)
        local = call.emit(aten.add.Tensor, local, digit, type=type)
    owned_mask = conditions[0]
    for condition in conditions[1:]:
        owned_mask = call.emit(aten.bitwise_and.Tensor, owned_mask, condition, type=type.with_dtype(torch.bool))
    return call.emit(aten.where.ScalarOther, owned_mask, local, 0, type=type), owned_mask


def _levels(call: LocalCall, atom: Atom) -> list[tuple[dict[str, int], int]]:
    """How far each axis moves in an atom, and the extent that is left: one level if it divides, else axis by axis.

    Of nested uneven chunks the outer one cuts the inner short, so each level has a test of its own.
    """
    mesh = call.graph.mesh
    size, strides = atom.size, list[tuple[str, int]]()
    for axis in atom.axes:
        size = -(-size // mesh.size(axis))
        strides.append((axis, size))
    if not atom.axes or not atom.uneven(mesh):
        return [(dict(strides), size)] if strides else []
    return [({axis: chunk}, chunk) for axis, chunk in strides]


def sharded(dim: Dim) -> bool:
    return any(atom.axes for atom in dim)


def broadcast_mask(call: LocalCall, mask: fx.Node, type: TensorType, before: int) -> fx.Node:
    """A mask over some dims of `type`, with `before` dims of it in front and the others behind, as size-1 dims."""
    dims = type_of(mask).dims
    for _ in range(before):
        dims = ((), *dims)
        mask = call.emit(aten.unsqueeze.default, mask, 0, type=TensorType(torch.bool, dims))
    while len(dims) < len(type.dims):
        dims = (*dims, ())
        mask = call.emit(aten.unsqueeze.default, mask, -1, type=TensorType(torch.bool, dims))
    return mask


def keep_owned(call: LocalCall, values: fx.Node, owned_mask: fx.Node, before: int = 0) -> tuple[Any, ...]:
    """`values` where this rank owns the position, and 0 elsewhere, as a call's target, arguments and keywords."""
    return aten.where.ScalarOther, (broadcast_mask(call, owned_mask, type_of(values), before), values, 0), {}


# ------------------------------------------------------------------------------------------------ embedding
def _look_up_owned(call: LocalCall) -> Any:
    rows = call.operands[0].dims[0]
    if not sharded(rows):
        return call.with_args()
    index, owned_mask = owned(call, call.args["indices"], rows)
    type = call.results[0]
    picked = call.emit(aten.embedding.default, call.args["weight"], index, type=type)
    return keep_owned(call, picked, owned_mask)


@rule(
    aten.embedding.default,
    localize=_look_up_owned,
    examples=[
        example((12, 6), (4, 3), ints={"indices": 12}),
        example((9, 4), (5,), 2, ints={"indices": 9}),
    ],
)
def embedding(weight: Dims, indices: Dims, *options: Any) -> Notation:
    # padding_idx has no effect forward.
    return Notation(f"v d, {indices if indices.ndim else '()'} -> {indices} d", sum="v", linear=(0,), counts="v")


def _scatter_owned(call: LocalCall) -> Any:
    rows = call.results[0].dims[0]
    if not sharded(rows):
        return call.with_args()
    index, owned_mask = owned(call, call.args["indices"], rows, known=info(call.node).phase == "bwd")
    padding = call.args["padding_idx"]
    if padding >= 0:
        type = type_of(owned_mask)
        real = call.emit(aten.ne.Scalar, call.args["indices"], padding, type=type)
        owned_mask = call.emit(aten.bitwise_and.Tensor, owned_mask, real, type=type)
    target, args, kwargs = keep_owned(call, call.args["grad_output"], owned_mask)
    grad = call.emit(target, *args, type=call.operands[0], **kwargs)
    size = call.result_shape()[0]
    return call.with_args(grad_output=grad, indices=index, num_weights=size, padding_idx=-1)


@rule(
    aten.embedding_dense_backward.default,
    localize=_scatter_owned,
    examples=[
        example((4, 3, 6), (4, 3), 12, -1, False, ints={"indices": 12}),
        example((5, 4), (5,), 9, 2, False, ints={"indices": 9}),
        example((5, 4), (5,), 4, -1, True, ints={"indices": 4}),
    ],
)
def embedding_backward(
    grad_output: Dims, indices: Dims, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Notation:
    text = f"{indices} d, {indices if indices.ndim else '()'} -> v d"
    if scale_grad_by_freq:  # divides by how often a row occurs in all the indices
        return Notation(text, whole=f"{indices} v", linear=(0,), counts="v")
    return Notation(text, sum=str(indices), linear=(0,), counts="v")


@rule(
    ACCUMULATE_ROWS,
    localize=_scatter_owned,
    examples=[
        example((4, 3, 6), (4, 3), 12, -1, torch.float64, ints={"indices": 12}),
        example((5, 4), (5,), 9, 2, torch.float64, ints={"indices": 9}),
        example((6,), (), 5, -1, torch.float64, ints={"indices": 5}),
    ],
)
def accumulate_rows(
    grad_output: Dims, indices: Dims, num_weights: int, padding_idx: int, dtype: torch.dtype
) -> Notation:
    return embedding_backward(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq=False)


@rule(
    ACCUMULATE_MORE_ROWS,
    localize=_scatter_owned,
    examples=[
        example((12, 6), (4, 3, 6), (4, 3), -1, ints={"indices": 12}),
        example((9, 4), (5, 4), (5,), 2, ints={"indices": 9}),
    ],
)
def accumulate_more_rows(total: Dims, grad_output: Dims, indices: Dims, padding_idx: int) -> Notation:
    # Before it is localized it adds to a whole sum; `infer_placement` knows the others.
    rows = indices if indices.ndim else "()"
    return Notation(f"v d, {indices} d, {rows} -> v d", whole=str(indices), counts="v")
