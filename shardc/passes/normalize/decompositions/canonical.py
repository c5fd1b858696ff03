"""One spelling for each thing: aliases renamed, calls that change nothing dropped, constants all `full`.

Layout in memory is not part of a graph's meaning here, so `clone` and `contiguous` go too; a `view` is a
reshape, and whoever runs it copies if it must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardc.ir.graph import type_of
from shardc.ir.schema import schema_of
from shardc.passes.normalize.decompositions.table import KEEP, Emit, Node, Result, aten, decompose, dtype_of, shape_of


# ---------------------------------------------------------------------- calls that change nothing
@decompose(
    aten.clone.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
)
def identity(e: Emit, x: Node, *options: Any) -> Result:
    return x


@decompose(aten._conj.default)
def conjugate(e: Emit, x: Node | complex) -> Result:
    """At once, and not when it is read: what is sent is memory, which the mark of a conjugate is no part of.

    A number, which a trace has where the model multiplies by one, stays as exact as it is: a 0-dim tensor's dtype does
    not decide another's.
    """
    if not isinstance(x, Node):
        return e(aten.full.default, [], x.conjugate(), dtype=torch.complex128)
    return e(aten.conj_physical.default, x)


@decompose(aten._neg_view.default)
def negated(e: Emit, x: Node) -> Result:
    return e.neg(x)


@decompose(aten.resolve_conj.default, aten.resolve_neg.default)
def resolved(e: Emit, x: Node) -> Result:
    return x


@decompose(
    aten.view.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.repeat.default,
    aten._to_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    sometimes=True,
)
def same_shape(e: Emit, x: Node, *options: Any) -> Result:
    """For these, the same shape and dtype means the same values."""
    unchanged = shape_of(e.at) == shape_of(x) and dtype_of(e.at) == dtype_of(x)
    return x if unchanged else KEEP


@decompose(aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, sometimes=True)
def by_one(e: Emit, x: Node, other: Node | float) -> Result:
    """What `addmm`'s alpha and beta leave behind. The number may still promote integers."""
    unchanged = not isinstance(other, Node) and other == 1 and dtype_of(e.at) == dtype_of(x)
    return x if unchanged else KEEP


@decompose(aten.slice_backward.default, sometimes=True)
def slice_backward(e: Emit, g: Node, *options: Any) -> Result:
    return g if shape_of(e.at) == shape_of(g) else KEEP


@decompose(aten.permute.default, sometimes=True)
def permute(e: Emit, x: Node, order: Sequence[int]) -> Result:
    ndim = len(order)
    return x if [d % ndim for d in order] == list(range(ndim)) else KEEP


@decompose(aten.transpose.int, sometimes=True)
def transpose(e: Emit, x: Node, a: int, b: int) -> Result:
    ndim = max(1, len(shape_of(x)))
    return x if a % ndim == b % ndim else KEEP


@decompose(aten.constant_pad_nd.default, sometimes=True)
def pad(e: Emit, x: Node, widths: Sequence[int], value: float) -> Result:
    return KEEP if any(widths) else x


# ---------------------------------------------------------------------- aliases
@decompose(aten._unsafe_view.default)
def unsafe_view(e: Emit, x: Node, shape: Sequence[int]) -> Result:
    return e.view(x, shape_of(e.at))


@decompose(aten.t.default)
def t(e: Emit, x: Node) -> Result:
    return x if len(shape_of(x)) < 2 else e(aten.transpose.int, x, 0, 1)


@decompose(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(e: Emit, x: Node, other: Node | float, alpha: float) -> Result:
    x = x if alpha == 1 else e.mul(x, alpha)
    if isinstance(other, Node):
        return e.sub(other, x)
    return e.add(e.neg(x), other)


@decompose(aten.stack.default)
def stack(e: Emit, tensors: Sequence[Node], dim: int) -> Result:
    dim %= len(shape_of(e.at))
    return e(aten.cat.default, [e(aten.unsqueeze.default, x, dim) for x in tensors], dim)


@decompose(aten.addcmul.default)
def addcmul(e: Emit, x: Node, a: Node, b: Node, value: float) -> Result:
    product = e.mul(a, b)
    return e.add(x, product if value == 1 else e.mul(product, value))


@decompose(aten.addcdiv.default)
def addcdiv(e: Emit, x: Node, a: Node, b: Node, value: float) -> Result:
    quotient = e.div(a, b)
    return e.add(x, quotient if value == 1 else e.mul(quotient, value))


@decompose(aten.masked_fill.Scalar)
def masked_fill(e: Emit, x: Node, mask: Node, value: float) -> Result:
    if value == 0 and shape_of(e.at) == shape_of(x):  # linear in x, so that a pending sum may pass
        return e(aten.where.ScalarSelf, mask, value, x)
    return e.where(mask, e.full([], value, dtype_of(x)), x)


@decompose(aten.masked_fill.Tensor)
def masked_fill_tensor(e: Emit, x: Node, mask: Node, value: Node) -> Result:
    return e.where(mask, e.cast(value, dtype_of(x)), x)


# ---------------------------------------------------------------------- views that are copied at once
COPIES: dict[Any, Any] = {
    aten.as_strided_copy.default: aten.as_strided.default,
    aten.diagonal_copy.default: aten.diagonal.default,
    aten.expand_copy.default: aten.expand.default,
    aten.permute_copy.default: aten.permute.default,
    aten.select_copy.int: aten.select.int,
    aten.slice_copy.Tensor: aten.slice.Tensor,
    aten.squeeze_copy.default: aten.squeeze.default,
    aten.squeeze_copy.dim: aten.squeeze.dim,
    aten.squeeze_copy.dims: aten.squeeze.dims,
    aten.transpose_copy.int: aten.transpose.int,
    aten.unfold_copy.default: aten.unfold.default,
    aten.unsqueeze_copy.default: aten.unsqueeze.default,
    aten.view_as_complex_copy.default: aten.view_as_complex.default,
    aten.view_as_real_copy.default: aten.view_as_real.default,
}


@decompose(*COPIES)
def copied_view(e: Emit, x: Node, *arguments: Any) -> Result:
    view = COPIES[e.at.target]
    count = sum(not argument.kwarg_only for argument in schema_of(view).arguments) - 1
    return e(view, x, *arguments[:count])


@decompose(aten.view_copy.default, sometimes=True)
def view_copy(e: Emit, x: Node, size: Sequence[int]) -> Result:
    return e.view(x, shape_of(e.at))


@decompose(aten.t_copy.default)
def t_copy(e: Emit, x: Node) -> Result:
    return t(e, x)


@decompose(aten.narrow_copy.default)
def narrow_copy(e: Emit, x: Node, dim: int, start: int, length: int) -> Result:
    size = shape_of(x)[dim]
    start += size if start < 0 else 0
    return e(aten.slice.Tensor, x, dim, start, start + length)


# ---------------------------------------------------------------------- constants
def _filled(e: Emit, value: float) -> Node:
    """A `full` of the replaced call's type, which need not read the tensor that the call was modelled on."""
    type = type_of(e.at)
    return e.full(type.shape, value, type.dtype)


@decompose(
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_strided.default,
)
def zeros(e: Emit, *options: Any) -> Result:
    return _filled(e, 0)


@decompose(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(e: Emit, *options: Any) -> Result:
    return _filled(e, 1)


@decompose(aten.full_like.default, aten.new_full.default, aten.fill.Scalar)
def full_like(e: Emit, x: Node, *options: Any) -> Result:
    # new_full(x, size, value), but full_like(x, value) and fill(x, value)
    return _filled(e, options[1] if e.at.target is aten.new_full.default else options[0])


@decompose(aten.scalar_tensor.default)
def scalar_tensor(e: Emit, value: float, *options: Any) -> Result:
    return _filled(e, value)


@decompose(aten.fill.Tensor)
def fill_tensor(e: Emit, x: Node, value: Node) -> Result:
    return e.expand(e.cast(value, dtype_of(x)), shape_of(x))


@decompose(aten.copy.default)
def copy(e: Emit, x: Node, source: Node, *options: Any) -> Result:
    return e.expand(e.cast(source, dtype_of(x)), shape_of(x))
